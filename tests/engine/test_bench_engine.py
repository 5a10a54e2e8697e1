"""The engine benchmark without a GPU: its requests and floors, and whole runs of a tiny model on the CPU path."""

import dataclasses
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
from support.tiny_models import tiny_config

from autotune.worker import Failed
from bench import engine, engine_worker, engine_workloads, plot
from bench.engine_floors import Shape, floor
from bench.engine_workloads import MODELS, WORKLOADS, Request, Workload, checksum, requests, truncated, write_model
from bench.joining import joined

pytestmark = pytest.mark.long

H200 = {"copy_gb_per_s": 4257, "matmul_tflop_per_s": 690}
# name: checksum, requests, tokens of prompts, tokens of outputs, longest, floor: of the run that measured vLLM
LISTED = {
    "W1": ("7a6463e4257b", 256, 148894, 148756, 1967, 36340),
    "W2": ("7a6463e4257b", 256, 148894, 148756, 1967, 13944),
    "W3a": ("2b0221e6c2fb", 1, 128, 256, 384, 0.279),
    "W3b": ("2b0221e6c2fb", 1, 128, 256, 384, 3.431),
    "W4": ("013e928d87f8", 256, 557056, 16384, 2240, 125.6),
    "W5": ("c10b33c500c4", 256, 148894, 80519, 1474, 8589),
    "W5b": ("2b0221e6c2fb", 1, 128, 256, 384, 1.393),
    "W6": ("1fd529c1e294", 32, 131072, 32, 4097, 45901),
    "L1": ("95b1bb1e0fa1", 1, 30000, 256, 30256, 1.06),
    "L8": ("537d78ceb923", 8, 128000, 2048, 16256, 7.28),
    "L8m": ("f38ac87bc4bc", 8, 81800, 2048, 25790, 2.438),
    "T8": ("63be15bb04e3", 1, 32776, 1, 32777, 4.403),
    "T128": ("f741cacdf660", 1, 32896, 1, 32897, 5.784),
    "J128": ("f72cc3d2a176", 70, 40548, 17920, 1278, 4.907),
    "J20": ("f72cc3d2a176", 70, 40548, 17920, 1278, 13.735),
    "JS128": ("2425405eeb2e", 70, 152320, 17920, 2432, 8.309),
    "F2": ("cf607c8cbc7d", 2, 256, 512, 384, 0.2852),
    "F4": ("2b2942094341", 4, 512, 1024, 384, 0.2985),
    "F8": ("3071b73efc23", 8, 1024, 2048, 384, 0.3252),
    "F16": ("4afcb8a01817", 16, 2048, 4096, 384, 0.3786),
    "W2x2": ("50dd50117cc6", 512, 297650, 291895, 2001, 16421),
    "W5x2": ("0f80df6cd268", 512, 297650, 158524, 1499, 13095),
    "W5x4": ("f01abcadb881", 1024, 589545, 316861, 1521, 18382),
    "A2": ("09dac3a6b15e", 128, 73202, 40841, 1506, 1235),
    "A3": ("2b0221e6c2fb", 1, 128, 256, 384, 31.72),
    "S1": ("2b0221e6c2fb", 1, 128, 256, 384, 3.431),
    "S8": ("3071b73efc23", 8, 1024, 2048, 384, 3.484),
    "S64": ("923d53cf1550", 64, 8192, 16384, 384, 3.911),
    "D1": ("2b0221e6c2fb", 1, 128, 256, 384, 3.431),
    "D8": ("3071b73efc23", 8, 1024, 2048, 384, 3.484),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_are_those_that_vllm_got(name):
    batch = requests(WORKLOADS[name])
    lengths = [len(request.prompt) for request in batch], [request.max_tokens for request in batch]
    found = checksum(batch), len(batch), *map(sum, lengths), max(map(sum, zip(*lengths, strict=True)))
    assert found == LISTED[name][:5]
    assert found[4] <= WORKLOADS[name].max_model_len


def test_every_workload_is_listed():
    assert WORKLOADS.keys() == LISTED.keys()
    assert {*WORKLOADS, "start cold", "start warm"} == engine.LISTED["engine"]["rows"].keys()
    for name, row in engine.LISTED["engine"]["rows"].items():
        if name in WORKLOADS:
            assert row["unit"] == engine.UNITS[WORKLOADS[name].kind] and row["floor"] == LISTED[name][5]


def test_repetitions_have_the_same_lengths_and_other_tokens():
    workload = WORKLOADS["W4"]
    cold, warm, other = requests(workload), requests(workload, again=1), requests(workload, 1)
    for a, b, c in zip(cold, warm, other, strict=True):
        assert len(a.prompt) == len(b.prompt) == len(c.prompt) and a.max_tokens == b.max_tokens == c.max_tokens
        assert a.prompt[:2048] == cold[0].prompt[:2048] == b.prompt[:2048]
        assert a.prompt[2048:] != b.prompt[2048:] and a.prompt[:16] != c.prompt[:16]
    assert checksum(cold) != checksum(warm) != checksum(other)


def test_checksum_sees_order_tokens_and_lengths():
    batch = [Request([1, 2], 3, 0.0), Request([4], 5, 0.0)]
    changed = [batch[::-1], [Request([1], 3, 0.0), batch[1]], [batch[0], Request([4], 6, 0.0)]]
    assert len({checksum(other) for other in [batch, *changed]}) == 4


def test_truncated():
    short = truncated(requests(WORKLOADS["W1"]), 128)
    assert max(r.max_tokens for r in short) == 128 and min(r.max_tokens for r in short) >= 100
    assert [r.prompt for r in short] == [r.prompt for r in requests(WORKLOADS["W1"])]


@pytest.mark.parametrize("name", WORKLOADS)
def test_floors_are_the_listed_ones(name):
    workload = WORKLOADS[name]
    value = floor(workload, MODELS[workload.model], **H200).value(workload, requests(workload))
    assert value == pytest.approx(LISTED[name][5], rel=2e-3)


def test_floor_of_a_shared_beginning_read_once():
    workload = WORKLOADS["W4"]
    rates = H200 | {"matmul_tflop_per_s": 1e5}  # else products bound the shared steps
    apart, together = (floor(workload, MODELS[workload.model], **rates, share=share) for share in (False, True))
    saved = 255 * 2048 * 131072 / (1.03 * 4257e9)  # bytes of a step, of 256 sequences
    assert together.prefill == apart.prefill
    assert apart.decode - together.decode == pytest.approx(63 * saved, rel=1e-6)


def test_several_gpus_are_compared_with_all_of_their_rates():
    row = {"workload": "W3b", "kind": "latency", "value": 4.0}
    one, four = (engine.compared(row, H200, gpus) for gpus in (1, 4))
    assert one["floor"] == pytest.approx(4 * four["floor"]) and one["percent"] == pytest.approx(4 * four["percent"])
    assert "goal" in one and not {"goal", "listed"} & four.keys()


def test_floor_written_out():
    """One request of a model with one layer: 3 prompt tokens, 2 steps."""
    config = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 4, "intermediate_size": 16}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    workload = Workload("T", "t", "throughput", 1, (3, 3), (3, 3))
    found = floor(workload, config, copy_gb_per_s=1.0 / 1.03, matmul_tflop_per_s=1e-3)  # 1e9 bytes, 1e9 FLOPs a second
    weights = 8 * (2 + 2) * 4 + 8 * 8 + 3 * 8 * 16
    head, pair, kv = 8 * 32, 4 * 8, 2 * 1 * 4 * 2
    prefill = 3 * 2 * weights + (0 + 1 + 2) * pair + 2 * head
    steps = [max(2 * (weights + head) + n * kv, 2 * weights + 2 * head + n * pair) for n in (3, 4)]
    assert (found.prefill, found.decode, found.steps) == pytest.approx((prefill / 1e9, sum(steps) / 1e9, 2))


def test_the_floor_of_a_turn():
    """Of few new tokens it is the reading of weights and keys, of many their products."""
    config, rates = MODELS["llama-3.1-8b"], {"copy_gb_per_s": 4257, "matmul_tflop_per_s": 690}
    shape = Shape.of(config)
    few, many = (Workload("", "llama-3.1-8b", "turn", 1, (n, n), (1, 1), shared=32768) for n in (8, 2048))
    read = (shape.weight_bytes(8) + 32776 * shape.kv) / (1.03 * 4257e9)
    assert floor(few, config, **rates).value(few, requests(few)) == pytest.approx(1e3 * read)
    pairs = (32768 + 1024) * 2048 * shape.pair_flops
    computed = (2048 * shape.token_flops + pairs + 2 * shape.head) / 690e12
    assert floor(many, config, **rates).value(many, requests(many)) == pytest.approx(1e3 * computed, rel=1e-3)


def test_a_turn_that_found_nothing_cached_is_no_result(tiny, tmp_path):
    options = '{"device": "cpu", "enable_prefix_caching": false}'
    with pytest.raises(RuntimeError, match="0 of 32 tokens were in the prefix cache"):
        bench(tmp_path, "--workload", "T5", "--options", options)


def test_the_floor_of_prompts_that_join():
    """A step that reads all weights, and the keys of all; of many tokens their products."""
    config, rates = MODELS["llama-3.1-8b"], {"copy_gb_per_s": 4257, "matmul_tflop_per_s": 690}
    shape = Shape.of(config)
    few, many = (
        Workload("", "llama-3.1-8b", "join", 10, (100, 100), (40, 40), shared=1000, joins=joins)
        for joins in ((2, 8), (4, 256))
    )
    keys = 10 * (1000 + 100 + 20) + 2 * 1008
    for share, read in ((False, keys), (True, keys - 11 * 1000)):
        bound = (shape.weight_bytes(26) + read * shape.kv) / (1.03 * 4257e9)
        assert floor(few, config, **rates, share=share).value(few, requests(few)) == pytest.approx(1e3 * bound)
    pairs = 10 * 1120 + 4 * (256 * 1000 + 255 * 256 / 2)
    computed = (1034 * shape.token_flops + 14 * 2 * shape.head + pairs * shape.pair_flops) / 690e12
    assert floor(many, config, **rates).value(many, requests(many)) == pytest.approx(1e3 * computed)


def test_prompts_that_join_are_new_each_time(tiny, tmp_path, monkeypatch):
    """Their beginning is that of the requests that run. Those that end too early give no result."""
    batches = [joined(TINY["T7"], repetition, number) for repetition in (0, 1) for number in (0, 1)]
    assert {len(request.prompt) for batch in batches for request in batch} == {37}
    assert len({tuple(request.prompt[32:]) for batch in batches for request in batch}) == 8
    assert all(r.prompt[:32] == requests(TINY["T7"])[0].prompt[:32] for batch in batches[:2] for r in batch)
    monkeypatch.setitem(TINY, "T7", dataclasses.replace(TINY["T7"], output=(20, 20)))
    with pytest.raises(RuntimeError, match="requests ended before all prompts"):
        bench(tmp_path, "--workload", "T7")


def test_experts_that_a_step_touches():
    shape = Shape.of(MODELS["qwen3-30b-a3b"])
    one, all_of_them = shape.weight_bytes(1), shape.weight_bytes(10_000)
    assert (all_of_them - one) == pytest.approx(2 * 48 * 120 * 3 * 2048 * 768)
    assert all_of_them == pytest.approx(2 * (30.5e9 - 151936 * 2048), rel=0.01)  # embeddings are looked up, not read


# ---------------------------------------------------------------- whole runs

TINY = {
    "T1": Workload("T1", "tiny", "throughput", 5, (4, 9), (3, 6), 0.6, max_model_len=64, repeats=2),
    "T3": Workload("T3", "tiny", "latency", 1, (5, 5), (4, 4), max_model_len=64, repeats=3),
    "T4": Workload("T4", "tiny", "prefix", 4, (3, 3), (2, 2), max_model_len=64, shared=32),
    "T5": Workload("T5", "tiny", "turn", 1, (3, 3), (1, 1), max_model_len=64, shared=32, repeats=2),
    "T7": Workload(
        "T7", "tiny", "join", 3, (4, 9), (150, 150), 0.6, max_model_len=256, shared=32, repeats=1, joins=(2, 5)
    ),
    "T6": Workload("T6", "other", "prefill", 2, (16, 16), (1, 1), max_model_len=64),
}


@pytest.fixture
def tiny(monkeypatch):
    """Workloads of two tiny models, and child processes run in this one."""
    monkeypatch.setattr(engine_workloads, "TOKEN_IDS", 90)
    config = tiny_config("qwen3") | {"head_dim": 16, "max_position_embeddings": 8192}
    models = {"tiny": config, "other": config}
    for module in (engine, engine_worker):
        monkeypatch.setattr(module, "MODELS", models)
        monkeypatch.setattr(module, "WORKLOADS", TINY)
    monkeypatch.setattr(engine, "START_MODEL", "tiny")
    listed = {name: {"peer": 10.0, "goal": 0.001, "unit": ""} for name in (*TINY, "start cold")}
    listed["start warm"] = {"goal": 1e6, "unit": "s"}
    monkeypatch.setitem(engine.LISTED["engine"], "rows", listed)
    monkeypatch.setitem(engine.LISTED, "machine", engine_worker.machine()["gpu"])
    calls = []

    def run(command, env, timeout, check):
        calls.append(SimpleNamespace(command=command, env=env))
        assert command[1:3] == ["-m", "bench.engine_worker"]
        return SimpleNamespace(returncode=engine_worker.main(command[3:]))

    monkeypatch.setattr(engine, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    return calls


def bench(tmp_path, *more):
    out = tmp_path / "new" / "engine.json"
    options = [
        "--ceilings",
        "listed",
        "--out",
        str(out),
        "--options",
        '{"device": "cpu", "block_size": 4, "num_blocks": 1024}',
    ]
    code = engine.main([*options, *more])
    return code, json.loads(out.read_text()) if out.exists() else None


@pytest.mark.smoke
def test_whole_run(tiny, tmp_path, capsys):
    code, report = bench(tmp_path)
    assert code == 0
    assert [row["workload"] for row in report["rows"]] == [
        "start cold",
        "start warm",
        "T1",
        "T3",
        "T4",
        "T5",
        "T7",
        "T6",
    ]
    assert report["engine"]["name"] == "tritonllm" and report["machine"]["torch"] == torch.__version__
    assert report["ceilings"] == H200 and report["date"].startswith("20")
    cold, _, t1, t3, t4, t5, t7, t6 = report["rows"]
    assert cold["value"] == cold["seconds"]["import"] + cold["seconds"]["start"] and not cold["goal_met"]
    assert [len(row["values"]) for row in (t1, t3, t4, t5, t6)] == [2, 3, 3, 2, 3]
    assert t1["unit"] == "output tok/s" and t1["goal_met"] and t1["checksum"] == checksum(requests(TINY["T1"]))
    tokens = sum(request.max_tokens for request in requests(TINY["T1"]))
    assert t1["value"] == pytest.approx(tokens / t1["seconds"])
    assert t1["percent"] == pytest.approx(100 * t1["value"] / t1["floor"])
    assert t1["times_better_than_listed"] == pytest.approx(t1["value"] / 10)
    assert t3["value"] == pytest.approx(1e3 * (t3["seconds"] - t3["first_token_seconds"]) / 3)
    assert t3["percent"] == pytest.approx(100 * t3["floor"] / t3["value"])
    assert t3["times_better_than_listed"] == pytest.approx(10 / t3["value"])
    assert t4["value"] == pytest.approx(4 / t4["seconds"]) and t4["warm_value"] == pytest.approx(4 / t4["warm_seconds"])
    assert t4["floor_shared_reads"] > t4["floor"]
    assert t5["unit"] == "ms" and t5["value"] == pytest.approx(1e3 * t5["seconds"]) and t5["first_turn_seconds"] > 0
    assert t5["percent"] == pytest.approx(100 * t5["floor"] / t5["value"]) and "floor_shared_reads" not in t5
    assert t7["unit"] == "ms" and 0 < t7["value"] <= t7["longest"] < 1e3 * t7["seconds"]
    assert t7["floor_shared_reads"] < t7["floor"]
    assert t6["value"] == pytest.approx(32 / t6["seconds"]) and t6["floor"] > 0
    assert all(row["kernels_compiled"] == 0 for row in report["rows"][2:])
    printed = capsys.readouterr().out
    assert "0 rows failed" in printed and "vLLM 0.24.0" in printed and "goal" in printed


def test_another_gpu_has_neither_aims_nor_peers(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(engine.LISTED, "machine", "NVIDIA H200")
    code, report = bench(tmp_path, "--workload", "T6", "--repeats", "1")
    assert code == 0 and "percent" in report["rows"][0] and not {"goal", "listed"} & report["rows"][0].keys()
    assert "goal" not in capsys.readouterr().out


def test_starts_have_caches_of_their_own(tiny, tmp_path):
    assert bench(tmp_path, "--workload", "T6,start,T1", "--repeats", "1")[0] == 0
    apart, cold, warm = tiny
    assert "--repeats" in apart.command and apart.env.get("TRITON_CACHE_DIR", "") != cold.env["TRITON_CACHE_DIR"]
    assert cold.env["TRITON_CACHE_DIR"] == warm.env["TRITON_CACHE_DIR"]
    assert [c.command[c.command.index("--workloads") + 1] for c in tiny] == ["T6", "", "T1"]


@pytest.mark.parametrize("draft", [None, "other"])
def test_drafts_of_a_set_acceptance(tiny, tmp_path, monkeypatch, capsys, draft):
    """In a process of its own, with an engine without drafts beside the one that has some, of a draft model or not."""
    workload = Workload("T8", "tiny", "speculation", 3, (33, 40), (23, 23), max_model_len=64, repeats=1, draft=draft)
    for module in (engine, engine_worker):
        monkeypatch.setattr(module, "WORKLOADS", TINY | {"T8": workload})
    engine.LISTED["engine"]["rows"]["T8"] = {"goal": 1e6, "unit": "ms/token"}
    code, report = bench(tmp_path, "--workload", "T8,T3")
    assert code == 0 and [c.command[c.command.index("--workloads") + 1] for c in tiny] == ["T8", "T3"]
    row, _ = report["rows"]
    assert (row["plain_steps"], row["kernels_compiled"]) == (22, 0)
    assert row["steps"] < 18 and row["accepted_a_step"] > 1
    assert row["times_plain"] == pytest.approx(row["plain_value"] / row["value"])
    each = row["plain_value"] * 22 / row["plain_steps"], row["value"] * 22 / row["steps"]
    assert row["step_ratio"] == pytest.approx(each[1] / each[0])
    assert row["percent"] == pytest.approx(100 * row["floor"] / row["value"])
    assert "x plain, steps" in capsys.readouterr().out


def test_repetitions_never_find_their_prompts_cached(tiny, tmp_path):
    _, report = bench(tmp_path, "--workload", "T1,T4,T6")
    t1, t4, t6 = report["rows"]
    assert t1["cached_tokens"] == t6["cached_tokens"] == 0
    assert t4["cached_tokens"] <= 3 * 32  # of the repetition's own first request


def test_wrong_length_gives_no_result(tiny, tmp_path, monkeypatch, capsys):
    right = engine_worker.Engine.run

    def run(self, batch):
        generate = self.llm.generate

        def lose_a_token(*args, **kwargs):
            outputs = generate(*args, **kwargs)
            outputs[-1].outputs[0].token_ids = outputs[-1].outputs[0].token_ids[:-1]
            return outputs

        self.llm.generate = lose_a_token if len(batch) > 1 else generate
        return right(self, batch)

    monkeypatch.setattr(engine_worker.Engine, "run", run)
    with pytest.raises(RuntimeError, match=r"request 4 got \d tokens instead of \d: no result"):
        bench(tmp_path, "--workload", "T1")


@pytest.mark.parametrize("error", ["exit", "timeout"])
def test_a_process_that_fails_costs_its_own_rows(tiny, tmp_path, monkeypatch, capsys, error):
    good = engine.subprocess.run

    def run(command, **options):
        if "tiny" not in command:
            return good(command, **options)
        if error == "timeout":
            raise subprocess.TimeoutExpired(command, 1200)
        return SimpleNamespace(returncode=-9)

    monkeypatch.setattr(engine.subprocess, "run", run)
    code, report = bench(tmp_path, "--workload", "T1,T3,T6")
    assert code == 1
    reason = "exit code -9" if error == "exit" else "no result within 1200 s"
    assert [reason in row.get("failed", "") for row in report["rows"]] == [True, True, False]
    assert "FAILED" in capsys.readouterr().out


def test_plot_of_a_run(tiny, tmp_path):
    _, report = bench(tmp_path)
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert plot.main([str(tmp_path / "r.json"), "-o", str(tmp_path / "r.svg")]) == 0
    drawn = (tmp_path / "r.svg").read_text()
    assert all(f"{name}  " in drawn for name in TINY) and "start cold" not in drawn and "aim" in drawn


def test_vllm_is_driven_by_the_same_lines(tmp_path, monkeypatch):
    """The names and arguments of vLLM's LLM that are used, with a stand-in for the package."""

    class LLM:
        def __init__(self, model, **options):
            assert options == {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
            assert json.loads(Path(model, "config.json").read_text()) == MODELS["qwen3-0.6b"]

        def generate(self, prompts, sampling_params, use_tqdm):
            assert not use_tqdm and all(prompt.keys() == {"prompt_token_ids"} for prompt in prompts)
            tokens = [SimpleNamespace(token_ids=[0] * params["max_tokens"]) for params in sampling_params]
            return [SimpleNamespace(outputs=[one], num_cached_tokens=None) for one in tokens]

    package = SimpleNamespace(LLM=LLM, SamplingParams=dict, __version__="0.24.0")
    monkeypatch.setattr(engine_worker.importlib, "import_module", lambda name: package)
    folder = write_model("qwen3-0.6b", MODELS["qwen3-0.6b"], tmp_path)
    started = engine_worker.Engine("vllm", folder, {"max_model_len": 4096})
    done = started.run(requests(WORKLOADS["W3a"]))
    assert started.version == "0.24.0" and (done.generated, done.cached) == (256, 0) and started.first_seconds >= 0


def test_ceilings_need_a_gpu(monkeypatch, capsys, tmp_path):
    class NoGpu:
        def __init__(self, handler):
            pass

        def call(self, method, timeout):
            raise Failed("no CUDA GPUs are available")

        def close(self):
            pass

    monkeypatch.setattr(engine, "Worker", NoGpu)
    assert engine.main(["--out", str(tmp_path / "r.json")]) == 1
    assert "no GPU to measure on: no CUDA GPUs are available; --ceilings listed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--workload", "W9"], "got 'W9'"),
        (["--workload", ""], "got ''"),
        (["--repeats", "0"], "at least 1"),
        (["--options", "[1]"], "JSON object"),
        (["--engine", "other"], "other"),
    ],
)
def test_bad_arguments(argv, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        engine.main(argv)
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_list(capsys):
    assert engine.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(WORKLOADS)


def test_compilations_are_counted(monkeypatch):
    seen = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **info: seen.append(info["repr"]))
    compiled = engine_worker.watch_compilations()
    triton.knobs.runtime.jit_post_compile_hook(repr="kernel")
    assert compiled == seen == ["kernel"]  # whoever watched before still does


def test_token_ids_are_valid_for_every_model():
    assert max(max(request.prompt) for request in requests(WORKLOADS["W1"])) < engine_workloads.TOKEN_IDS
    assert min(config["vocab_size"] for config in MODELS.values()) > engine_workloads.TOKEN_IDS
    assert isinstance(requests(WORKLOADS["W1"])[0].prompt[0], int) and not isinstance(
        requests(WORKLOADS["W1"])[0].max_tokens, np.integer
    )
