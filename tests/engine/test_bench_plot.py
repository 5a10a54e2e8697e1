"""Bars and listed figures: what is drawn, from results that are made up and from those that are committed."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import plot, plot_bars, plot_timeline, tables
from bench.cases import CASES
from bench.plot_bars import LISTED, Bar, Row

RESULTS = Path(plot.__file__).parent / "results"
SVG = "{http://www.w3.org/2000/svg}"
KERNELS = {
    "machine": {"gpu": "NVIDIA Test"},
    "commit": "abc",
    "date": "2026-01-02T03:04:05+00:00",
    "ceilings": {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 700.0},
    "cases": [
        {
            "group": "K3",
            "case": "store_kv T4096 K8 D128",
            "us": 10.0,
            "floor_us": 8.0,
            "percent": 80.0,
            "torch_us": 40.0,
        },
        {"group": "K3", "case": "store_kv T1 K8 D128", "failed": "error 0.5 > 0.01"},
        {
            "group": "K6",
            "case": "rejection_sample B64 G4 V151936 greedy",
            "us": 50.0,
            "floor_us": 45.0,
            "percent": 90.0,
        },
    ],
}
ENGINE = {
    **{key: KERNELS[key] for key in ("machine", "commit", "date", "ceilings")},
    "engine": {"name": "tritonllm", "version": "1.2"},
    "rows": [
        {"workload": "start cold", "model": "m", "kind": "start", "value": 9.0, "unit": "s", "goal": 15},
        {
            "workload": "W1",
            "model": "m",
            "kind": "throughput",
            "value": 500.0,
            "unit": "output tok/s",
            "floor": 1000.0,
            "listed": 250.0,
            "times_better_than_listed": 2.0,
            "goal": 800.0,
        },
        {
            "workload": "W3a",
            "model": "m",
            "kind": "latency",
            "value": 4.0,
            "unit": "ms/token",
            "floor": 1.0,
            "goal": 2.0,
        },
        {"workload": "W5", "model": "m", "failed": "no memory"},
    ],
}


def drawn(tmp_path, report, *more):
    """The texts of the plot, and its elements."""
    source, out = tmp_path / "results.json", tmp_path / "new" / "plot.svg"
    source.write_text(json.dumps(report))
    assert plot.main([str(source), "-o", str(out), *more]) == 0
    root = ET.parse(out).getroot()
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter(f"{SVG}rect"):
        if box.get("x"):
            assert float(box.get("x")) >= 0 and float(box.get("x")) + float(box.get("width")) <= width
            assert float(box.get("y")) + float(box.get("height")) <= height
    return [element.text for element in root.iter(f"{SVG}text")], root


def test_bars_of_kernels(tmp_path):
    shown, _ = drawn(tmp_path, KERNELS)
    assert "K3  Norm, rotary embedding, activation, KV store" in shown and "K6  Rejection sampling" in shown
    for said in ("80%  10 us", "20%  torch 40", "54%  vLLM Triton 14.7, ours 1.47x", "0%  failed", "best listed peer"):
        assert any(said in text for text in shown), said
    assert any(text.startswith("NVIDIA Test, abc, 2026-01-02; floor from copy 4000 GB/s") for text in shown)


def test_only_some_groups(tmp_path, capsys):
    shown, _ = drawn(tmp_path, KERNELS, "--only", "K6")
    assert not any("store_kv" in text for text in shown) and any("50 us" in text for text in shown)
    with pytest.raises(SystemExit):
        plot.main(["x.json", "-o", "y.svg", "--only", "K9"])
    assert "got K9" in capsys.readouterr().err


def test_bars_of_the_engine(tmp_path):
    shown, root = drawn(tmp_path, ENGINE)
    for said in ("50%  500 output tok/s", "25%  vLLM 0.24.0 250, ours 2.00x", "25%  4 ms/token", "aim"):
        assert said in shown, said
    assert "W5  m" not in " ".join(shown) and "start cold" not in " ".join(shown)
    marks = [path.get("d") for path in root.iter(f"{SVG}path") if path.get("stroke") == "#060"]
    at = plot_bars.LABELS + plot_bars.WIDTH * 0.8, plot_bars.LABELS + plot_bars.WIDTH * 0.5
    assert [float(mark[1:].split()[0]) for mark in marks[1:]] == list(at)  # the first is the legend's


def test_bars_beyond_the_floor_end_at_the_margin():
    picture = plot_bars.draw("t", "f", {"p": [Row("r", [Bar("listed", 400.0, "x")], goal=90.0)]}, {"listed": "l"})
    widths = [float(box.get("width")) for box in ET.fromstring(picture).iter(f"{SVG}rect") if box.get("x")]
    assert max(widths) == pytest.approx(plot_bars.WIDTH * 1.1, abs=0.1)


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (KERNELS | {"cases": []}, "run python -m bench.kernels"),
        (ENGINE | {"rows": []}, "run python -m bench.engine"),
        ({"timelines": []}, "run python -m bench.timeline"),
        ({}, "not the results of a benchmark"),
    ],
)
def test_nothing_to_draw(report, says, tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert plot.main([str(tmp_path / "r.json"), "-o", str(tmp_path / "r.svg")]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_can_be_drawn(path, tmp_path):
    report = json.loads(path.read_text())
    if report.keys() & {"sweep", "cases", "timelines", "rows"}:
        shown, _ = drawn(tmp_path, report)
        assert len(shown) > 10


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (ENGINE, ["| W1 m | **500** output tok/s | 1,000 (50%) | 800 missed | 250 | 2.00x |", "| W5 | no memory |"]),
        (ENGINE, ["| start cold m | **9** s |  | 15 met |  |  |", "NVIDIA Test (), commit abc, 2026-01-02."]),
        (KERNELS, ["| store_kv T4096 K8 D128 | **10** | 80% | 1.0e-03 | 40 | vLLM Triton 14.7 | 1.47x |"]),
        (KERNELS, ["K3: norm, rotary embedding, activation, kv store", "| store_kv T1 K8 D128 | failed |"]),
    ],
)
def test_tables(report, says, tmp_path, capsys):
    goals = [row | {"percent": 50.0, "goal_met": row["workload"] == "start cold"} for row in ENGINE["rows"]]
    cases = [case | {"error": 1e-3} for case in KERNELS["cases"]]
    report = report | ({"rows": goals} if "rows" in report else {"cases": cases})
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert tables.main([str(tmp_path / "r.json")]) == 0
    shown = capsys.readouterr().out
    assert all(said in shown for said in says), shown


def test_no_table(tmp_path, capsys):
    (tmp_path / "r.json").write_text("{}")
    assert tables.main([str(tmp_path / "r.json")]) == 1
    assert "not the results of bench.engine" in capsys.readouterr().err


def test_a_layer_is_found_in_a_step():
    names = ["embed", *["norm", "gemm", "attention", "gemm", "norm", "gemm", "gemm"] * 5, "head", "sample"]
    step = [{"name": name, "us": 1.0, "gap_us": 0.0} for name in names]
    layer = plot_timeline.one_layer(step)
    assert len(layer) == 7 and sorted(row["name"] for row in layer) == sorted(names[1:8])
    assert plot_timeline.one_layer(step[:3]) == [] == plot_timeline.one_layer([])


@pytest.mark.parametrize("group", ["K3", "K4", "K5", "K6"])
def test_listed_kernels_are_cases_of_the_benchmark(group):
    """A listed figure with a name of no case would never be shown."""
    listed = LISTED["kernels_us"][group]
    assert listed.keys() <= {case.problem.name for case in CASES if case.group == group}
    assert all(us > 0 for peers in listed.values() for us in peers.values())


def test_listed_products_are_cases_of_the_benchmark():
    """As far as ours are for few rows and nothing is fused into them."""
    names = {case.problem.name for case in CASES if case.group == "K7"}
    assert {f"linear M{rows} N14336 K4096" for rows in (1, 16, 64)} <= names & LISTED["kernels_us"]["K7"].keys()
