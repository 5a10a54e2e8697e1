"""Kernels are placed on the clock of the engine's events."""

import time

import pytest
import torch
from support.trace_rules import check_trace, load
from torch.profiler import ProfilerActivity, profile, record_function

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path
from tritonllm.telemetry import kernel_records
from tritonllm.telemetry.kernel_records import Kernel, Reading, plain_name, read_clocks, to_monotonic, write_kernels
from tritonllm.telemetry.trace import Trace
from tritonllm.telemetry.trace_file import Clock, TraceFile
from tritonllm.telemetry.trace_layout import GPU, STREAMS
from tritonllm.telemetry.trace_reader import read_trace
from tritonllm.telemetry.trace_summary import summarize


def test_both_clocks():
    first = read_clocks()
    before, unix, after = time.monotonic(), time.time_ns(), time.monotonic()
    last = read_clocks()
    slack = (first.within + last.within) / 1e9
    assert before - slack <= to_monotonic(unix, first, last) <= after + slack


def test_what_torch_profiles_lies_where_the_host_was():
    """The same path as that of a GPU's kernels, with what the profiler records on the CPU."""
    brackets, first = [], read_clocks()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for number in range(20):
            before = time.monotonic()
            with record_function(f"mine {number}"):
                torch.ones(50, 50) @ torch.ones(50, 50)
            brackets.append((before, time.monotonic()))
    last = read_clocks()
    events = {event.name(): event for event in profiler.profiler.kineto_results.events()}
    slack = (first.within + last.within + 2000) / 1e9  # the profiler reads a counter of the processor's
    for number, (before, after) in enumerate(brackets):
        event = events[f"mine {number}"]
        begin, end = event.start_ns(), event.start_ns() + event.duration_ns()
        assert before - slack <= to_monotonic(begin, first, last)
        assert to_monotonic(end, first, last) <= after + slack


def test_a_clock_that_is_slewed():
    first, last = Reading(1_000, 5_000, 1), Reading(2_001_000, 2_006_000, 1)  # 1000 ns more in 2 ms
    assert to_monotonic(5_000, first, last) == 1_000 / 1e9
    assert to_monotonic(2_006_000, first, last) == 2_001_000 / 1e9
    middle = (5_000 + 2_006_000) // 2
    assert to_monotonic(middle, first, last) == pytest.approx((1_000 + 2_001_000) / 2e9, abs=2e-9)
    assert to_monotonic(6_000, first, first) == 2_000 / 1e9


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("void at::native::(anonymous namespace)::cat_kernel<float>(int, float*)", "at::native::cat_kernel<float>"),
        ("_paged_decode_kernel", "_paged_decode_kernel"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("k" * 200, "k" * 120),
    ],
)
def test_names(name, plain):
    assert plain_name(name) == plain


def test_kernels_of_a_stream_that_overlap_have_tracks_of_their_own(tmp_path):
    file, zero = TraceFile(tmp_path / "a.json", 1000), Reading(0, 0, 0)
    begins = [0, 500, 600, 700, 800, 900, 5_000, 5_000]
    kernels = [Kernel(f"k{n}", 7, begin, begin + 2_000) for n, begin in enumerate(begins)]
    kernels.insert(3, Kernel("other", 13, 650, 660))
    write_kernels(file, Clock(0.0), GPU, kernels, zero, zero)
    file.close()
    tracks = check_trace(load(tmp_path / "a.json"))
    assert {track: len(slices) for (_, track), slices in tracks.items()} == {
        STREAMS: 3,
        STREAMS + 1: 3,
        STREAMS + 2: 1,
        STREAMS + 3: 1,
        STREAMS + 4: 1,
    }


def test_none_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recorder = kernel_records.KernelRecorder(5)
    recorder.start()
    assert recorder.about == "none: there is no GPU" and not recorder.running and recorder.stop() == []
    kernel_records.prepare()


class FakeRecorder(kernel_records.KernelRecorder):
    """Has seen kernels, at times that are known."""

    def start(self):
        self._first, self._profiler = read_clocks(), object()

    def stop(self):
        if self._profiler is None:
            return []
        self._profiler = None
        now = time.time_ns()
        return [Kernel("matmul", 7, now - 10_000 * n, now - 10_000 * n + 4_000) for n in range(250, 0, -1)]


def test_a_trace_with_kernels_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tritonllm.telemetry.trace.KernelRecorder", FakeRecorder)
    monkeypatch.setattr(kernel_records, "MOST_KERNELS", 200)
    monkeypatch.setattr(FakeRecorder, "_has_gpu", staticmethod(lambda: True))
    llm = LLM(str(model_path()), num_blocks=64, max_num_seqs=4)
    with Trace(llm, tmp_path / "a.json", kernel_steps=3):
        llm.generate(["There was a fox"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    check_trace(load(tmp_path / "a.json"))
    summary = summarize(read_trace(tmp_path / "a.json"))
    found = summary["kernels"]
    assert found["by_name"] == [{"name": "matmul", "count": 200, "ms": pytest.approx(0.8), "share": 1.0}]
    assert found["busy_share"] == pytest.approx(0.4, abs=0.01)
    assert summary["trace"]["kernels"] == "of the first 3 steps"
    (read,) = [one for one in read_trace(tmp_path / "a.json").host if one.name == "read the profiler's records"]
    assert (read.args["kernels"], read.args["left_out"]) == (250, 50)


@pytest.mark.gpu
def test_kernels_of_steps_on_a_gpu(tmp_path):
    """Each lies in the slice of its step: the clocks agree to some microseconds."""
    kernel_records.prepare()
    llm = LLM(str(model_path()), max_num_seqs=8, num_blocks=256)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate(["There was"], params, use_tqdm=False)
    torch.cuda.synchronize()
    for name in ("a.json.gz", "b.json"):  # twice: the profiler is begun and ended again
        with Trace(llm, tmp_path / name, kernel_steps=16) as trace:
            llm.generate(["There was a fox", "Tom and Mia"], params, use_tqdm=False)
            assert trace.open
        check_trace(load(tmp_path / name))
        data = read_trace(tmp_path / name)
        found = summarize(data)["kernels"]
        assert found["count"] >= 16 * 10, "a step has several kernels a layer"
        assert found["in_steps_share"] > 0.98
        (read,) = [one for one in data.host if one.name == "read the profiler's records"]
        assert read.args["clocks_ns"] < 20_000 and read.args["left_out"] == 0
        recorded = [step for step in data.steps if step.args["step"] <= data.steps[0].args["step"] + 14]
        kernels = sorted(one for track in data.kernels.values() for one in track)
        for step in recorded:
            inside = [one for one in kernels if step.begin - 20 <= one.begin and one.end <= step.end + 20]
            assert len(inside) >= 10, f"step {step.args['step']} has its kernels"
    assert len(data.steps) >= 40
