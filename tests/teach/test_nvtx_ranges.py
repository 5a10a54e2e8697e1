"""Ranges of steps for NVIDIA's profilers, as far as they can be seen without one."""

import pytest
import torch
from support.engines import greedy, tiny_llm

from tritonllm import LLM
from tritonllm.serve.engines.profiling import ProfilerConfig, Profiles
from tritonllm.telemetry.nvtx_ranges import StepRanges


@pytest.fixture
def calls(monkeypatch):
    """What is told to CUDA, in order."""
    told = []
    for module, names in (
        (torch.cuda.nvtx, ("range_push", "range_pop", "mark")),
        (torch.cuda.profiler, ("start", "stop")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, lambda *args, name=name: told.append((name, *args)))
    return told


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(async_scheduling=False)


def test_each_step_is_a_range_around_its_launch(llm, calls):
    ranges = StepRanges(llm)
    first = llm.engine.stats.steps + 1
    llm.generate([[5, 6, 7], [8, 9]], greedy(3), use_tqdm=False)
    ranges.close()
    ranges.close()
    steps = [f"step {first + i}" for i in range(3)]
    kinds = ["2 prefill, 5 tokens", "2 decode, 2 tokens", "2 decode, 2 tokens"]
    expected = [("start",)]
    for step, kind in zip(steps, kinds, strict=True):
        expected += [("range_push", f"{step}: {kind}"), ("range_pop",), ("mark", f"{step} is done")]
    assert calls == [*expected, ("stop",)]
    llm.generate([[5, 6, 7]], greedy(2), use_tqdm=False)
    assert len(calls) == 11 and ranges.note == "it was closed" and not ranges.open


def test_the_capture_begins_late_and_ends_itself(llm, calls):
    ranges = StepRanges(llm, delay_steps=2, max_steps=3)
    assert not calls
    llm.generate([[5, 6, 7]], greedy(9), use_tqdm=False)
    assert [call[0] for call in calls] == ["start", *["range_push", "range_pop", "mark"] * 3, "stop"]
    assert ranges.steps == 3 and "max_iterations" in ranges.note


def test_a_step_that_fails_leaves_no_range_open(llm, calls, monkeypatch):
    ranges = StepRanges(llm)
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine._runner, "launch", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[5, 6, 7]], greedy(2), use_tqdm=False)
    llm.generate([[5, 6, 7]], greedy(2), use_tqdm=False)
    ranges.close()
    names = [call[0] for call in calls]
    assert names.count("range_push") == names.count("range_pop") == 3


def test_as_a_profiler_of_the_engine(llm, calls):
    profiles = Profiles(llm.engine, ProfilerConfig.of({"profiler": "cuda"}))
    assert profiles.start_profile() == {"profiler": "cuda"}
    assert profiles.start_profile() == {"refused": "a trace is written already: end it with /stop_profile"}
    llm.generate([[5, 6, 7]], greedy(2), use_tqdm=False)
    assert profiles.stop_profile() == {"profiler": "cuda", "steps": 2, "note": "it was told to end (stop_profile)"}
    assert "refused" in profiles.stop_profile()


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_without_a_gpu_it_is_refused_before_the_model_is_read(device):
    if device == "auto" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=r"profiler='cuda' marks steps for .*: use profiler='torch'"):
        LLM("/no/such/model", device=device, profiler_config={"profiler": "cuda"})
