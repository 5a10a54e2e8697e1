"""The engine on a GPU: captured decode steps, memory, and the same tokens as without them."""

import gc
import json
import subprocess
import sys

import pytest
import torch
from support.checkout import environment
from support.engines import greedy, tiny_llm, token_ids
from support.real_configs import QWEN3_0_6B
from support.tiny_models import random_tokens

from tritonllm import LLM, SamplingParams
from tritonllm.engine.data.results import StepTimeoutError
from tritonllm.engine.step import shared_prefix
from tritonllm.engine.step.room_sizes import graph_sizes
from tritonllm.engine.step.shared_prefix import CascadePlanner

pytestmark = pytest.mark.gpu

LENGTHS = (1, 700, 33, 128, 2, 511, 90, 300)
PROMPTS = [random_tokens(n, 10000, seed=n) for n in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(json.dumps(QWEN3_0_6B))
    return str(folder)


def make(folder, **kwargs):
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 2048}
    return LLM(folder, **{**settings, "num_blocks": 2048, "max_num_seqs": 16, **kwargs})


def test_graphs_chunks_and_preemption_do_not_change_greedy_tokens(folder):
    """float32, where two schedules differ by rounding far below the gap between tokens."""
    expected = token_ids(make(folder, enforce_eager=True).generate(PROMPTS, greedy(40), use_tqdm=False))
    for settings in ({}, {"max_num_batched_tokens": 100}, {"num_blocks": 130}, {"block_size": 64, "num_blocks": 512}):
        llm = make(folder, **settings)
        for _ in range(2):  # the second time from the prefix cache
            assert token_ids(llm.generate(PROMPTS, greedy(40), use_tqdm=False)) == expected, settings
        stats = llm.engine.stats
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.preemptions > 0 or "num_blocks" not in settings or settings["num_blocks"] > 130


def test_planning_ahead_does_not_change_tokens(folder):
    """Of any kind of request: those that stop early, count their tokens on the device, or want log-probabilities."""
    kinds = [
        greedy(40),
        SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2, max_tokens=40, stop_token_ids=list(range(0, 151936, 40))),
        SamplingParams(temperature=0.5, seed=3, max_tokens=30, frequency_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=5, max_tokens=35, min_tokens=20, logit_bias={7: 5.0}),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=1.0, seed=6, max_tokens=33, allowed_token_ids=list(range(500))),
    ]
    params = [kinds[i % len(kinds)] for i in range(2 * len(PROMPTS))]
    few_blocks = {"max_num_seqs": 6, "block_size": 4, "num_blocks": 240, "max_model_len": 960}
    for settings in ({}, few_blocks, {"enforce_eager": True}):
        results = []
        for ahead in (False, True):
            llm = make(folder, async_scheduling=ahead, **settings)
            outputs = llm.generate(PROMPTS + PROMPTS[::-1], params, use_tqdm=False)
            results.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs])
            assert llm.engine.stats.num_free_blocks == llm.engine.stats.num_blocks
            assert (llm.engine.stats.preemptions > 0) == (settings is few_blocks)
        assert results[0] == results[1], settings
        assert {reason for _, reason in results[0]} == {"length", "stop"}


@pytest.mark.parametrize("eager", [False, True])
def test_a_shared_prefix_does_not_change_greedy_tokens(folder, monkeypatch, eager):
    """float32; read once for all, in captured and in eager steps, beside sequences that do not share it."""
    shared = random_tokens(1000, 10000, seed=99)
    prompts = [shared + prompt for prompt in PROMPTS] + PROMPTS[2:4]
    expected = token_ids(make(folder, disable_cascade_attn=True).generate(prompts, greedy(40), use_tqdm=False))
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 1 << 20)
    plans, plan = [], CascadePlanner.plan
    monkeypatch.setattr(CascadePlanner, "plan", lambda *args: plans.append(plan(*args)) or plans[-1])
    llm = make(folder, enforce_eager=eager)
    for _ in range(2):  # the second time all of them find it in the prefix cache
        assert token_ids(llm.generate(prompts, greedy(40), use_tqdm=False)) == expected
    assert sum(found is not None for found in plans) > 30


def test_seeds_reproduce_in_any_batch(folder):
    llm = make(folder)
    params = [SamplingParams(temperature=1.0, top_k=50, seed=i, max_tokens=20, ignore_eos=True) for i in range(8)]
    together = token_ids(llm.generate(PROMPTS, params, use_tqdm=False))
    alone = [token_ids(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert together == alone


def test_half_precision_runs(folder):
    for dtype in ("bfloat16", "float16"):
        outputs = make(folder, dtype=dtype).generate(PROMPTS, greedy(8, logprobs=1), use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
        assert all(output.outputs[0].cumulative_logprob > -1e3 for output in outputs)


def test_service_makes_the_driver_wait_for_nothing(folder, monkeypatch):
    """Pinned memory that is new, or kernels of cuBLAS for other sizes, would wait for all that the device is doing."""
    llm = make(folder, dtype="bfloat16", max_num_seqs=100)
    model, rows = llm.engine._runner._model, []
    compute = model.compute_logits
    monkeypatch.setattr(model, "compute_logits", lambda hidden: rows.append(len(hidden)) or compute(hidden))
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    kinds = [greedy(9), greedy(4, logprobs=3), SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=13)]
    llm.generate(PROMPTS * 30, kinds * 80, use_tqdm=False)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert len(set(rows)) > 1 and set(rows) <= set(graph_sizes(100))


@pytest.mark.parametrize("eager", [False, True])
def test_nothing_compiles_once_the_engine_is_ready(folder, record_property, eager):
    """In a process of its own: here, other tests have compiled most of it already."""
    command = [sys.executable, "-m", "support.count_compilations", folder, str(eager)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), timeout=200)
    counts = json.loads(done.stdout.splitlines()[-1])
    record_property("compiled_at_start", counts["at_start"])
    assert counts["at_start"] > 10
    assert counts["later"] == []
    assert counts["shared"] > 0  # steps with a shared prefix were among them


def test_the_same_tokens_as_on_the_cpu():
    """A tiny model: Triton kernels against the references, through whole requests."""
    prompts = [random_tokens(n, 300, seed=n) for n in (1, 3, 17, 40, 5, 64, 9, 30)]
    on_cpu = token_ids(tiny_llm(device="cpu").generate(prompts, greedy(), use_tqdm=False))
    assert token_ids(tiny_llm(device="cuda", dtype="float32").generate(prompts, greedy(), use_tqdm=False)) == on_cpu


def test_a_step_that_takes_too_long_is_named_and_left(folder, monkeypatch):
    """The device is kept busy; once it is free again, so is the engine."""
    llm = make(folder, enforce_eager=True)
    expected = token_ids(llm.generate(PROMPTS[:3], greedy(5), use_tqdm=False))
    impatient = make(folder, enforce_eager=True, step_timeout=0.2)
    forward = impatient.engine._runner._forward

    def slow(*args):
        torch.cuda._sleep(3_000_000_000)  # clock cycles: more than a second
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(impatient.engine._runner, "_forward", slow)
        with pytest.raises(StepTimeoutError, match=r"after 0\.2 s .*prompt tokens of requests '0'"):
            impatient.generate(PROMPTS[:3], greedy(5), use_tqdm=False)
    assert not impatient.engine.has_unfinished_requests()
    torch.cuda.synchronize()
    assert token_ids(impatient.generate(PROMPTS[:3], greedy(5), use_tqdm=False)) == expected


def test_small_vocabularies_with_min_p_alone(tmp_path):
    """Requests that stopped the device: the demo model's size of vocabulary, min-p and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_0_6B, "vocab_size": 2048, "num_hidden_layers": 2}))
    llm = make(str(tmp_path), step_timeout=30.0)
    prompts = [random_tokens(9, 2048, seed=n) for n in range(64)]
    for min_p in (0.02, 0.1, 1.0):
        params = SamplingParams(temperature=1.7, min_p=min_p, seed=1, max_tokens=16, ignore_eos=True)
        assert all(output.finished for output in llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_engines_on_two_gpus_of_one_process(folder):
    """The second one's kernels, descriptors, graphs and copies are its GPU's, though the first GPU stays current."""
    expected = token_ids(make(folder, device="cuda:0").generate(PROMPTS, greedy(20), use_tqdm=False))
    before = torch.cuda.memory_allocated(0)
    llm = make(folder, device="cuda:1")
    assert torch.cuda.memory_allocated(0) - before < 1 << 26  # weights alone are 3 GB
    assert token_ids(llm.generate(PROMPTS, greedy(20), use_tqdm=False)) == expected
    half = {"dtype": "bfloat16", "max_num_seqs": 16}
    tokens = [
        token_ids(make(folder, device=device, **half).generate(PROMPTS, greedy(20), use_tqdm=False))
        for device in ("cuda:1", "cuda:0")
    ]
    assert tokens[0] == tokens[1] and torch.cuda.current_device() == 0


def test_an_engine_that_is_dropped_gives_its_memory_back_at_once(folder):
    """Without the help of Python's search for cycles: whoever makes engine after engine would run out of memory."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        llm = make(folder)
        llm.generate(PROMPTS, greedy(3), use_tqdm=False)
        assert torch.cuda.memory_allocated() - before > 1 << 30
        del llm
        torch._C._cuda_clearCublasWorkspaces()  # the process's, not the engine's: 32 MiB a stream on Hopper
        assert torch.cuda.memory_allocated() - before < 1 << 20
    finally:
        gc.enable()
