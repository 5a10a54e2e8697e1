"""``data_parallel_size`` with ``enable_expert_parallel``: engines that share a model's experts.

Each has requests of its own, and all give the tokens of one engine that has the model alone."""

import json
import shutil
import signal
import time
from contextlib import suppress

import psutil
import pytest
from safetensors.torch import load_file, save_file
from support.engines import tiny_checkpoint, tiny_llm
from support.imported_processes import engine_processes, imported_processes
from support.server import MODEL, eventually, running_server, socket_folders
from support.streams import all_gone
from support.waiting import PATIENCE
from support.wishes import SIZES, WISHES, assert_same, assert_same_beams, generate, prompts_of

from tritonllm import LLM, SamplingParams
from tritonllm.config.engine import EngineConfig
from tritonllm.serve.engines.engine_client import EngineDeadError
from tritonllm.serve.engines.replicas import start_engines

FAMILY = "qwen3_moe"
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def sharing(family=FAMILY, size=2, **options):
    """Engines, and their processes."""
    others = engine_processes()
    llm = tiny_llm(tiny_checkpoint(family), **SIZES, **options, **sharing_experts(size))
    return llm, [one for one in engine_processes() if one not in others]


def sharing_experts(size):
    return {"data_parallel_size": size, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def alone():
    return tiny_llm(tiny_checkpoint(FAMILY), **SIZES)


@pytest.fixture(scope="module")
def two():
    before = socket_folders()
    with imported_processes():
        llm = tiny_llm(tiny_checkpoint(FAMILY), **SIZES, **sharing_experts(2))
    yield llm
    llm.shutdown()
    eventually(lambda: socket_folders() <= before)


def test_all_that_requests_ask_for(alone, two):
    """More than are in the engines at once; some are preempted, and the engines are not done at the same time."""
    prompts, before = prompts_of([3, 26, 7, 18, 40, 5, 33]), two.replica_stats
    assert_same(generate(two, prompts * 2, WISHES[:7] * 2), generate(alone, prompts * 2, WISHES[:7] * 2))
    pairs = zip(two.replica_stats, before, strict=True)
    assert all(now.generated_tokens > then.generated_tokens for now, then in pairs)


def test_one_request_alone(alone, two):
    """The other engine has nothing to do: it joins each step, and counts none."""
    prompts, before = prompts_of([9]), two.replica_stats
    assert_same(generate(two, prompts, [LONG]), generate(alone, prompts, [LONG]))
    steps = [now.steps - then.steps for now, then in zip(two.replica_stats, before, strict=True)]
    assert sorted(steps)[0] == 0 and sorted(steps)[1] >= 100


def test_after_a_pause(alone, two):
    """They sleep until a request comes to either of them."""
    for _ in range(3):
        time.sleep(0.1)
        prompts = prompts_of([5, 8])
        assert_same(generate(two, prompts, WISHES[:2]), generate(alone, prompts, WISHES[:2]))


def test_beams(alone, two):
    assert_same_beams(two, alone)


@pytest.mark.parametrize(
    ("family", "size", "options"),
    [
        ("qwen2_moe", 2, {"async_scheduling": True}),
        ("gpt_oss", 4, {"async_scheduling": True}),
        ("glm4_moe", 2, {"enable_prefix_caching": False}),
    ],
)
def test_mechanisms(family, size, options):
    prompts, expected = prompts_of([3, 26, 7, 18, 11]), tiny_llm(tiny_checkpoint(family), **SIZES)
    with imported_processes():
        llm, processes = sharing(family, size, **options)
    assert len(processes) == size
    assert_same(generate(llm, prompts, WISHES[:5]), generate(expected, prompts, WISHES[:5]))
    llm.shutdown()
    assert all_gone(processes)


@pytest.mark.long
def test_a_server():
    options = ["--data-parallel-size", "2", "--enable-expert-parallel", "--num-blocks", "64", "--block-size", "4"]
    prompt, body = prompts_of([12])[0], {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    with running_server(str(tiny_checkpoint(FAMILY)), *options) as server:
        asked = {"model": MODEL, "prompt": prompt, **body}
        answers = [server.client.post("/v1/completions", json=asked).json() for _ in range(3)]
    expected = tiny_llm(tiny_checkpoint(FAMILY)).generate([prompt], SamplingParams(**body))
    assert {answer["choices"][0]["text"] for answer in answers} == {expected[0].outputs[0].text}


def other_experts(folder):
    """A checkpoint whose experts of the second half differ: those that the second of two engines has."""
    count = json.loads((tiny_checkpoint(FAMILY) / "config.json").read_text())["num_experts"]
    shutil.copytree(tiny_checkpoint(FAMILY), folder)
    changed = 0
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            number = name.partition(".experts.")[2].partition(".")[0]
            if number.isdigit() and int(number) >= count // 2:
                tensors[name] = tensors[name] * -3.0
                changed += 1
        save_file(tensors, file, metadata={"format": "pt"})
    assert changed
    return folder


def test_stored_blocks_are_those_of_all_experts(tmp_path):
    """Each engine finds what the other has stored, and none takes blocks of a model whose experts elsewhere differ."""
    stored = tmp_path / "stored"
    prompts = [*prompts_of([41]), *prompts_of([42], seed=50)]  # a beginning in common would be found within one run
    store = {"kv_connector": "FileStore", "kv_connector_extra_config": {"path": str(stored)}}
    options = {**SIZES, "num_blocks": 64, "kv_offloading_size": 0.01, "kv_transfer_config": store}
    other, fetched = other_experts(tmp_path / "other"), []
    for checkpoint, asked in (
        (tiny_checkpoint(FAMILY), prompts),
        (tiny_checkpoint(FAMILY), prompts[::-1]),
        (other, prompts),
    ):
        expected = tiny_llm(checkpoint, **SIZES)
        with imported_processes():
            llm = tiny_llm(checkpoint, **options, **sharing_experts(2))
        assert_same(generate(llm, asked, WISHES[:2]), generate(expected, asked, WISHES[:2]))
        eventually(lambda: fetched or sum(one.kv_saved_blocks for one in llm.replica_stats) >= 20)  # noqa: B023
        fetched.append([one.kv_fetched_blocks for one in llm.replica_stats])
        llm.shutdown()
    assert fetched[0] == [0, 0] and min(fetched[1]) > 0 and fetched[2] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.long
def test_what_happens_to_one_ends_all(number):
    """Also of an engine that only joins the steps of the other."""
    before = socket_folders()
    llm, engines = sharing(worker_timeout=4.0 if number == signal.SIGSTOP else PATIENCE)
    assert len(engines) == 2

    class Striking:
        """A progress bar."""

        def __init__(self, **_):
            pass

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = set_postfix_str = lambda self, *_, **__: None

        def update(self):
            with suppress(psutil.NoSuchProcess):  # progress may come once more before its end is known
                engines[1].send_signal(number)

    why = "was killed by signal 9" if number == signal.SIGKILL else "no sign of life for 4 s"
    with pytest.raises(EngineDeadError, match=rf"{why}.*the others were ended with it"):
        llm.generate(
            prompts_of([5] * 8),
            [SamplingParams(temperature=0, max_tokens=2 + 90 * i, ignore_eos=True) for i in range(8)],
            use_tqdm=Striking,
        )
    eventually(lambda: all_gone(engines))
    eventually(lambda: socket_folders() <= before)


def test_what_cannot_be_is_said():
    dense = {"model": str(tiny_checkpoint()), "data_parallel_size": 2, "enable_expert_parallel": True, "device": "cpu"}
    with imported_processes():
        with pytest.raises(ValueError, match="has no experts"):
            LLM(**dense)
        with pytest.raises(ValueError, match="data_parallel_size=3"):
            sharing(size=3)
    with pytest.raises(ValueError, match=r"restart=1: engines that share experts .* cannot be started anew"):
        start_engines(EngineConfig.from_kwargs(**dense), max_restarts=1)
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    for name, options in (("speculative_config", drafts), ("deterministic", {"deterministic": True})):
        with pytest.raises(ValueError, match=f"^{name}: engines that share experts"):
            LLM(**dense, **options)
