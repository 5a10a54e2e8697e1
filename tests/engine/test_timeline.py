"""The timeline without a GPU: from made-up records to steps and tables, and a driven run on the CPU path."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from support.engines import tiny_llm

from bench import engine_workloads, plot, timeline
from bench.engine_workloads import Workload, requests
from bench.timeline_links import line, links
from bench.timeline_record import MOST_STEPS, Drive, Event, drive, recorded

LAYERS = 3
CONFIG = {"num_hidden_layers": LAYERS, "hidden_size": 64}
STEP = [("copy", 1, 1), ("embed", 2, 0), *[("gemm", 10, 0), ("attention", 5, 2)] * LAYERS, ("sample", 4, 20)]
STEP_US = sum(us + gap for _, us, gap in STEP)


def records(steps, jitter=lambda step, name: False):
    """Events of so many steps of STEP (name, us, us until the next), some with a copy more."""
    at, events = 1_000_000, []
    for step in range(steps):
        for name, us, gap in STEP:
            if jitter(step, name):
                events.append(Event("Memcpy HtoD", at, at + 500))
                at += 500
            events.append(Event(name, at, at + us * 1000))
            at += (us + gap) * 1000
    return events


def run_of(events, steps):
    begin = events[0].start - 1000
    run = Drive(begin, [begin + i * STEP_US * 1000 for i in range(1, steps + 1)])
    run.first_decode, run.last_decode = 2, steps - 2
    return run


def test_a_step_begins_where_the_gpu_waited():
    steps = timeline.split_steps(records(9), 9)
    assert [[event.name for event in step] for step in steps] == [[name for name, _, _ in STEP]] * 8


def test_steps_that_differ_are_left_out():
    steps = timeline.split_steps(records(9, lambda step, name: step == 4 and name == "embed"), 9)
    assert len(steps) == 7 and all(len(step) == len(STEP) for step in steps)


def test_nothing_that_happens_once_a_step():
    with pytest.raises(ValueError, match="none happens once a step"):
        timeline.split_steps([Event("gemm", i, i + 1) for i in range(30)], 3)
    with pytest.raises(ValueError, match="0 GPU events"):
        timeline.split_steps([], 3)


def test_report_of_a_step():
    events = records(40)
    result = timeline.step_report(run_of(events, 40), events, LAYERS)
    assert (result["events"], result["steps"]) == (len(STEP), MOST_STEPS - 1)
    assert result["recorded_step_us"] == STEP_US and result["busy_us"] == sum(us for _, us, _ in STEP)
    assert result["busy_percent"] == pytest.approx(100 * result["busy_us"] / STEP_US)
    assert [row["name"] for row in result["sequence"]] == [name for name, _, _ in STEP]
    assert result["sequence"][-1]["gap_us"] == 20
    gemm, attention, *_ = result["kernels"]
    assert (gemm["name"], gemm["count"], gemm["per_layer"], gemm["us"]) == ("gemm", LAYERS, 1.0, 30)
    assert (attention["us"], attention["gap_us"]) == (15, 6)
    assert sum(kernel["share"] for kernel in result["kernels"]) == pytest.approx(result["busy_percent"])


def test_events_that_overlap_count_once():
    step = [Event("a", 0, 10_000), Event("b", 4_000, 14_000), Event("c", 5_000, 6_000), Event("d", 15_000, 16_000)]
    rows = timeline.positions([step])
    assert [(row["us"], row["gap_us"]) for row in rows] == [(10, 0), (4, 0), (0, 1), (1, 0)]


def test_idle():
    events = [
        Event("a", 0, 100_000),
        Event("b", 40_000, 60_000),
        Event("c", 102_000, 150_000),
        Event("d", 190_000, 200_000),
    ]
    found = timeline.idle(events, 0, 200_000)
    assert (found["idle_percent"], found["host_percent"]) == pytest.approx((21.0, 20.0))
    assert timeline.idle(events, 50_000, 102_000)["idle_percent"] == pytest.approx(100 * 2 / 52)
    assert timeline.idle([], 0, 50_000)["idle_percent"] == 100


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_split_decode_kernel", "_split_decode_kernel"),
        ("nvjet_tst_128x64_64x10_2x1_v_bz_TNT", "nvjet_tst_128x64_64x10_2x1_v_bz_TNT"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul> >"
            "(int, at::native::FillFunctor<int>, std::array<char*, 1ul>)",
            "vectorized_elementwise_kernel<FillFunctor>",
        ),
        ("void (anonymous namespace)::softmax_warp<float, 3>(float*)", "softmax_warp"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::Params)", "splitKreduce_kernel"),
    ],
)
def test_short_names(name, short):
    assert timeline.short_name(name) == short


@pytest.fixture
def driven(monkeypatch):
    """Five requests of a tiny model, run to their end."""
    monkeypatch.setattr(engine_workloads, "TOKEN_IDS", 90)
    workload = Workload("T", "tiny", "throughput", 5, (4, 9), (12, 20))
    llm = tiny_llm()
    return llm, workload, drive(llm, requests(workload))


def test_drive_finds_the_stretch_in_which_all_decode(driven):
    _, workload, run = driven
    longest = max(request.max_tokens for request in requests(workload))
    shortest = min(request.max_tokens for request in requests(workload))
    assert len(run.steps) >= longest and 1 <= run.first_decode <= 3
    assert shortest - 3 <= run.last_decode <= shortest + 1
    begin, end, count = run.stretch()
    assert begin < end and count >= 2 and run.step_ms() > 0 and run.seconds > 0


def test_too_short_a_stretch():
    run = Drive(0, [1, 2, 3, 4], first_decode=1, last_decode=2)
    with pytest.raises(ValueError, match="let them generate more tokens"):
        run.stretch()


def test_whole_report_and_its_picture(monkeypatch, driven, tmp_path):
    """With the profiler's place taken by made-up records of each step of the run."""
    llm, workload, _ = driven
    monkeypatch.setitem(engine_workloads.WORKLOADS, "T", workload)

    class Recorded(list):
        def __enter__(self):
            self.llm_step, self.ends = llm.engine.step, []
            return self

        def __exit__(self, *error):
            pass

    def drive_and_record(engine, batch):
        run = drive(engine, batch)
        times = [run.begin, *run.steps]
        for a, b in itertools.pairwise(times):
            unit = (b - a) // (2 * STEP_US)
            for name, us, gap in STEP:
                events.append(Event(name, a, a + us * unit))
                a += (us + gap) * unit
        return run

    events = Recorded()
    monkeypatch.setattr(timeline, "drive", drive_and_record)
    monkeypatch.setattr(timeline, "recorded", lambda: events)
    result = timeline.report(llm, "T", 15, CONFIG)
    assert result["running"] == 5 and result["max_tokens"] == 15 and result["events"] == len(STEP)
    assert 0 < result["busy_percent"] < 100 and result["step_us"] > 0 and result["seconds"] > 0
    assert {kernel["name"] for kernel in result["totals"]} == {name for name, _, _ in STEP}
    shown = timeline.text(result)
    assert "| gemm | 3 | 1 |" in shown and "5 running" in shown
    whole = {"machine": {"gpu": "NVIDIA Test"}, "commit": "abc", "date": "2026-01-02T03:04:05", "timelines": [result]}
    (tmp_path / "timeline.json").write_text(json.dumps(whole))
    assert plot.main([str(tmp_path / "timeline.json"), "-o", str(tmp_path / "timeline.svg")]) == 0
    assert "gemm" in (tmp_path / "timeline.svg").read_text()
    only_prefill = timeline.report(llm, "T", 1, CONFIG)  # no decode step: the whole run by kernel
    assert "kernels" not in only_prefill and "| gemm |" in timeline.text(only_prefill)


@pytest.mark.parametrize(
    ("ranks", "running", "each"),
    [
        (2, 8, 8 * 8192 * 2),  # one shot: the part, to the other
        (4, 8, 3 * 8 * 8192 * 2),  # and to three
        (4, 128, 1.5 * 128 * 8192 * 2),  # two shots: three quarters of the parts, and of the sums
        (3, 128, 4 / 3 * 128 * 8192 * 2),  # NCCL's
    ],
)
def test_what_ranks_exchange_in_a_step(ranks, running, each):
    config = {"num_hidden_layers": 80, "hidden_size": 8192}
    step = [
        ("_all_reduce_kernel", 160, 1600.0, 10.0),
        ("ncclDevKernel_AllGather", 1, 19.0, 0.5),
        ("nvjet", 80, 9e3, 80.0),
    ]
    kernels = [dict(zip(("name", "count", "us", "share"), row, strict=True)) for row in step]
    found = links(kernels, running, config, ranks)
    assert found["collectives_us"] == 1619 and found["sums_us"] == 1600 and found["share"] == 10.5
    assert found["bytes_sent"] == pytest.approx(160 * each) and found["sums"] == 160
    assert found["gb_per_s"] == pytest.approx(160 * each / 1600e-6 / 1e9)
    assert f"{ranks} ranks: collectives 1619 us" in line(found)


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["--workload", "W9"], "got W9"), (["--workload", "W1,W2"], "one model"), (["--max-tokens", "x"], "")],
)
def test_bad_arguments(argv, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        timeline.main(argv)
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_kineto_records_become_events(monkeypatch):
    """Only what ran on the GPU, in order."""
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def made(name, device, start, length):
        values = {"name": name, "device_type": device, "start_ns": start, "duration_ns": length}
        return SimpleNamespace(**{key: (lambda value=value: value) for key, value in values.items()})

    class Profile:
        def __init__(self, activities, acc_events):
            found = [made("b", cuda, 20, 5), made("launch", cpu, 1, 1), made("a", cuda, 10, 5)]
            self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: found))

        def start(self):
            pass

        stop = start

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with recorded() as events:
        assert events == []
    assert events == [Event("a", 10, 15), Event("b", 20, 25)]
