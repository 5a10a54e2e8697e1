"""Bars and listed figures: what is drawn, from results that are made up and from those that are committed."""

import json
import sys

import pytest

from bench import drawing, plot, tables
from bench.cases import CASES
from bench.drawing import Bar, Row
from bench.reports import GROUPS, LISTED, RESULTS, kind_of

pytestmark = pytest.mark.long

WHERE = {
    "machine": {"gpu": "NVIDIA Test"},
    "commit": "abc",
    "date": "2026-01-02T03:04:05+00:00",
    "ceilings": {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 700.0},
}
KERNELS = {
    **WHERE,
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
    **WHERE,
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


def figure(report, groups=tuple(GROUPS)):
    return drawing.draw(report, groups)


def bars_of(axes):
    """The lengths of a panel's bars, from above."""
    return [bar.get_width() for bar in axes.patches]


def texts(figure):
    found = [text.get_text() for axes in figure.axes for text in (*axes.texts, *axes.get_yticklabels())]
    return [*found, *(axes.get_title(loc="left") for axes in figure.axes), figure.get_suptitle()]


def test_bars_of_kernels():
    drawn = figure(KERNELS)
    assert [bars_of(axes) for axes in drawn.axes] == [
        [80, pytest.approx(20), pytest.approx(800 / 14.7), 0],  # ours, torch, the listed peer; the one that failed
        [90, pytest.approx(4500 / 50.6)],
    ]
    shown = texts(drawn)
    for said in ("80%  10 us", "20%  torch 40", "54%  vLLM Triton 14.7, ours 1.47x", "0%  failed"):
        assert said in shown
    assert {case["case"] for case in KERNELS["cases"]} <= set(shown)
    assert {"K3  Norm, rotary embedding, activation, KV store", "K6  Rejection sampling"} <= set(shown)
    assert "NVIDIA Test, commit abc, 2026-01-02; floor: copies at 4000 GB/s" in shown[-1]
    assert [text.get_text() for text in drawn.legends[0].get_texts()][-1] == "best listed peer, another day"


def test_only_some_groups(capsys):
    shown = texts(figure(KERNELS, ["K6"]))
    assert not any("store_kv" in text for text in shown) and "90%  50 us" in shown
    with pytest.raises(SystemExit):
        plot.main(["x.json", "-o", "y.svg", "--only", "K9"])
    assert "got K9" in capsys.readouterr().err


@pytest.mark.smoke
def test_bars_of_the_engine():
    drawn = figure(ENGINE)
    (axes,) = drawn.axes
    assert bars_of(axes) == [50, 25, 25]  # W1 and its peer, W3a; the start and the failed one have no floor
    assert [line.get_xdata()[0] for line in axes.lines] == [80, 50]  # the aims
    shown = texts(drawn)
    assert "25%  vLLM 0.24.0 250, ours 2.00x" in shown and "25%  4 ms/token" in shown
    assert not any("W5" in text or "start cold" in text for text in shown)


def test_a_floor_that_reads_shared_keys_once_is_the_one_drawn():
    row = ENGINE["rows"][1] | {"workload": "W4", "kind": "prefix", "floor": 400.0, "floor_shared_reads": 2000.0}
    assert bars_of(figure(ENGINE | {"rows": [row]}).axes[0]) == [25, 12.5]


def test_bars_beyond_the_floor_end_before_their_labels():
    drawn = drawing.bars("t", {"p": [Row("r", [Bar("listed", 400.0, "x")], goal=90.0)]}, {"listed": "l"})
    assert bars_of(drawn.axes[0]) == [drawing.MOST] and drawing.MOST < drawing.LABELS_AT
    assert "400%  x" in texts(drawn)


def swept(group, batch, length, **rest):
    return {"group": group, "precision": "bf16", "batch": batch, "length": length} | rest


def test_the_sweep_shows_every_size_in_its_place():
    cases = [
        swept("K1", 1, 128, us=2.0, percent=3.2),
        swept("K1", 256, 32768, us=8000.0, percent=104.0),
        swept("K1", 256, 32768, us=4100.0, percent=50.0, precision="fp8"),  # not drawn
        swept("K2", 4, 64, failed="error 0.5 > 0.01"),
    ]
    decode, prefill, scale = figure(WHERE | {"sweep": cases}).axes
    columns, rows = ([label.get_text() for label in axis.get_ticklabels()] for axis in (decode.xaxis, decode.yaxis))
    assert columns == ["128", "32k"] and rows == ["1", "256"]
    assert [(text.get_position(), text.get_text()) for text in decode.texts] == [((0, 0), "3"), ((1, 1), "104")]
    values = decode.collections[0].get_array()  # what the colours are made of
    assert values[0, 0] == 3.2 and values[1, 1] == 104 and values.mask.tolist() == [[False, True], [True, False]]
    assert [text.get_text() for text in prefill.texts] == ["failed"]
    assert (decode.get_title(), prefill.get_title(), scale.get_ylabel()) == (
        "Paged decode",
        "Causal prefill",
        "floor / time, percent",
    )


def test_a_timeline_is_drawn_to_scale():
    names = ["norm", "product"] * 3
    sequence = [{"name": name, "us": us, "gap_us": 1.0} for name, us in zip(names, (2.0, 7.0) * 3, strict=True)]
    kernels = [{"name": name, "count": 3, "us": us, "share": us} for name, us in (("product", 21.0), ("norm", 6.0))]
    numbers = {"step_us": 30.0, "recorded_step_us": 33.0, "events": 6, "busy_percent_alone": 90.0, "busy_percent": 82.0}
    timeline = {"workload": "W1", "running": 4, "kernels": kernels, "sequence": sequence, **numbers}
    step, layer = figure(WHERE | {"timelines": [timeline]}).axes
    boxes = [path.get_extents() for path in step.collections[0].get_paths()]
    assert [(box.x0, box.x1) for box in boxes[:3]] == [(0, 2), (3, 10), (11, 13)] and step.get_xlim() == (0, 33)
    assert len(layer.collections[0].get_paths()) == 2


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (KERNELS | {"cases": []}, "run python -m bench.kernels"),
        (ENGINE | {"rows": []}, "run python -m bench.engine"),
        (WHERE | {"sweep": []}, "run python -m bench.attention without --quick"),
        ({"timelines": []}, "run python -m bench.timeline"),
        ({}, "not the results of"),
    ],
)
def test_nothing_to_draw(report, says, tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert plot.main([str(tmp_path / "r.json"), "-o", str(tmp_path / "r.svg")]) == 1
    assert says in capsys.readouterr().err


def test_without_matplotlib_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    (tmp_path / "r.json").write_text(json.dumps(KERNELS))
    monkeypatch.delitem(sys.modules, "bench.drawing", raising=False)
    monkeypatch.delattr("bench.drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main([str(tmp_path / "r.json"), "-o", str(tmp_path / "r.svg")]) == 1
    assert "pip install -e '.[dev]'" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_can_be_drawn(path, tmp_path):
    """Twice, with the same bytes: neither the day nor chance is in the file."""
    if kind_of(json.loads(path.read_text())) in ("attention", "engine", "kernels", "timeline"):
        outs = [tmp_path / "new" / name for name in ("a.svg", "b.svg")]
        for out in outs:
            assert plot.main([str(path), "-o", str(out)]) == 0
        first, second = (out.read_text() for out in outs)
        assert first == second and "<text" in first and "<dc:date>" not in first


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (ENGINE, ["| W1 m | **500** output tok/s | 1,000 (50%) | 800 missed | 250 (vLLM ", ") | 2.00x |"]),
        (ENGINE, ["| W5 | no memory |"]),
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
    layer = drawing.one_layer(step)
    assert len(layer) == 7 and sorted(row["name"] for row in layer) == sorted(names[1:8])
    assert drawing.one_layer(step[:3]) == [] == drawing.one_layer([])


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
