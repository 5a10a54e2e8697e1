"""docs/results.md: it is what the committed files say, newer results win, and days are kept apart."""

import copy
import json

import pytest

from bench import report
from bench.reports import RESULTS, number

BLOCK = f"# Kernels\n{report.BEGIN}{report.END}"
OURS = {
    "machine": {"gpu": "NVIDIA H200", "torch": "2.0"},
    "engine": {"name": "tritonllm", "version": "1"},
    "commit": "abc",
    "date": "2026-01-02T03:04:05+00:00",
    "ceilings": {},
    "rows": [
        {"workload": "W1", "model": "m", "kind": "throughput", "value": 500.0, "unit": "output tok/s", "listed": 250.0},
        {"workload": "W3a", "model": "m", "kind": "latency", "value": 4.0, "unit": "ms/token", "listed": 5.0},
        {"workload": "start warm", "model": "m", "kind": "start", "value": 9.0, "unit": "s", "listed": 90.0},
        {"workload": "W5", "model": "m", "failed": "no memory"},
    ],
}


def case(us, **more):
    return {"group": "K7", "case": "linear M1", "us": us, "percent": 50.0, "error": 0.0, "torch_us": 30.0} | more


FAILED = {"group": "K7", "case": "linear M2", "failed": "wrong"}


def kernels(day, *cases):
    return {**{key: OURS[key] for key in ("machine", "commit")}, "date": f"2026-01-0{day}", "cases": list(cases)}


def written(tmp_path, **files):
    """docs/results.md and docs/kernels.md of these results files."""
    results, docs = tmp_path / "results", tmp_path / "docs"
    results.mkdir(exist_ok=True)
    docs.mkdir(exist_ok=True)
    for name, data in files.items():
        (results / f"{name}.json").write_text(json.dumps(data))
    (docs / "kernels.md").write_text(BLOCK)
    assert report.main(["--results", str(results), "--docs", str(docs)]) == 0
    assert report.main(["--results", str(results), "--docs", str(docs), "--check"]) == 0
    return (docs / "results.md").read_text(), (docs / "kernels.md").read_text()


def test_the_committed_pages_are_what_the_files_say(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["attention", "engine", "kernels"])
def test_every_newest_result_is_on_the_page(name):
    page = (report.DOCS / "results.md").read_text(encoding="utf-8")
    files = report.of_kind(report.read(RESULTS), name)
    assert files and all(f"(../bench/results/{file.name})" in page for file in files if name in ("engine", "attention"))
    for row in files[0].data["rows"] if name in ("engine", "attention") else report.cases(files):
        assert f"**{number(row.get('value', row.get('us')))}**" in page


def test_the_newer_of_two_results_is_shown(tmp_path):
    page, summary = written(tmp_path, a=kernels(2, case(10.0)), b=kernels(3, case(20.0), FAILED))
    assert "| linear M1 | **20** |" in page and "**10**" not in page and "a.json" not in page
    assert "| linear M2 | failed |" in page
    assert "1.50x (1 of 1)" in summary and summary.endswith(report.END)


def test_the_newest_run_of_each_workload_and_gpu_is_shown(tmp_path):
    older = copy.deepcopy(OURS) | {"date": "2026-01-01T00:00:00", "commit": "old"}
    older["rows"][0]["value"], older["rows"][3] = 70.0, OURS["rows"][1] | {"workload": "W5", "value": 7.0}
    oldest = copy.deepcopy(OURS) | {"date": "2025-12-31T00:00:00", "commit": "oldest"}
    other = copy.deepcopy(oldest) | {"machine": {"gpu": "NVIDIA H100"}, "commit": "another chip"}
    page, _ = written(tmp_path, a=OURS, b=older, c=oldest, d=other)
    runs = [f"[{data['date'][:10]} {data['commit'][:7]}](../bench/results/" for data in (OURS, older, oldest, other)]
    assert [run in page for run in runs] == [True, True, False, True]
    assert "| W5 | no memory |" in page and "**7**" in page  # what failed hides nothing
    assert "**70**" not in page and page.count("| W1 m |") == 2  # one of each GPU
    assert "Older runs: [c.json](../bench/results/c.json) (2025-12-31)." in page


def test_what_determinism_costs_stands_by_itself(tmp_path):
    other = copy.deepcopy(OURS) | {"options": {"deterministic": True}, "date": f"{OURS['date'][:10]}T23:59:59+00:00"}
    other["rows"][0]["value"], other["rows"][1]["value"] = 400.0, 5.0
    page, _ = written(tmp_path, a=OURS, b=other)
    assert "1.25 to 2.00 times as fast" in page  # the newest run of the claim is that without it
    _, _, own = page.partition("## Bits that do not depend on the batch")
    assert "| W1 m | **400** output tok/s |  | 500 | 20% fewer a second |" in own
    assert "| W3a m | **5** ms/token |  | 4 | 25% more time |" in own
    assert "| W5 | no memory |" in own and page.count("**400**") == 1
    nearer = copy.deepcopy(OURS) | {"date": f"{OURS['date'][:10]}T23:00:00+00:00"}
    nearer["rows"][0]["value"] = 800.0
    for names in ("abc", "cba"):  # whatever the files are called
        page, _ = written(tmp_path, **dict(zip(names, (OURS, other, nearer), strict=True)))
        assert "| W1 m | **400** output tok/s |  | 800 | 50% fewer a second |" in page


def test_another_day_is_named(tmp_path):
    page, _ = written(tmp_path, a=OURS)
    assert "In 2 engine workloads on one NVIDIA H200, tritonllm is 1.25 to 2.00 times as fast as vLLM" in page
    assert "of another day (2026-11-20)" in page and "(vLLM 0.24.0, 2026-11-20) |" in page


def test_figures_of_one_kind_of_gpu_are_not_put_beside_another(tmp_path):
    page, _ = written(tmp_path, a=copy.deepcopy(OURS) | {"machine": {"gpu": "NVIDIA H100"}})
    assert "times as fast" not in page and "| W1 m | **500** output tok/s | [2026" in page
    assert "vLLM" not in page.partition("## Engine")[2]


@pytest.mark.parametrize(
    ("day", "gpu", "together"), [(2, "NVIDIA H200", True), (3, "NVIDIA H200", False), (2, "X", False)]
)
def test_the_same_day_and_gpu_are_compared_directly(tmp_path, day, gpu, together):
    theirs = copy.deepcopy(OURS) | {"engine": {"name": "vllm", "version": "9"}, "date": f"2026-01-0{day}T09:00:00"}
    theirs["machine"]["gpu"] = gpu
    theirs["rows"] = [row | {"value": 400.0} for row in theirs["rows"][:1]]
    page, _ = written(tmp_path, a=OURS, b=theirs)
    assert ("is 1.25 to 1.25 times as fast as vLLM 9, measured on the same day." in page) == together
    assert ("(vLLM 9, same day) |" in page) == together and "## vLLM, measured here" in page


def test_a_run_of_ones_own_is_not_published(tmp_path):
    page, _ = written(tmp_path, engine=OURS)
    assert "abc" not in page


def test_check_fails_on_a_page_that_is_old(tmp_path, capsys):
    written(tmp_path, a=OURS)
    (tmp_path / "docs" / "results.md").write_text("something else")
    assert report.main(["--results", str(tmp_path / "results"), "--docs", str(tmp_path / "docs"), "--check"]) == 1
    assert "run python -m bench.report" in capsys.readouterr().err
    assert (tmp_path / "docs" / "results.md").read_text() == "something else"


def test_a_page_without_markers():
    with pytest.raises(ValueError, match="no block between"):
        report.filled("nothing", "x")


def test_runs_of_several_gpus_stand_apart_without_the_figures_of_others(tmp_path):
    """Two stages are two GPUs, too; the H200's aims and floors are of no other kind of GPU."""
    row = {"workload": "W2", "model": "m", "kind": "throughput", "value": 500.0, "unit": "output tok/s", "floor": 9.0}
    options = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "max_num_seqs": 8}, {}]
    machines = [{"gpu": "NVIDIA H200"}, {"gpu": "NVIDIA H100"}, {"gpu": "NVIDIA H100"}]
    files = {
        f"engine-{i}": OURS | {"options": o, "machine": m, "ceilings_are": "listed", "rows": [row | {"percent": 5.0}]}
        for i, (o, m) in enumerate(zip(options, machines, strict=True))
    }
    page, _ = written(tmp_path, **files)
    alone, two = page.split("## Engine on two GPUs")
    assert "engine-2" in alone and "engine-0" not in alone and "engine-1" not in alone
    assert "`tensor_parallel_size=2`" in two and "19,500 missed" in two and "25,980" in two
    assert "`pipeline_parallel_size=2`, `max_num_seqs=8`" in two and two.count("missed") == 1
    assert "9 (5%)" not in page


def test_sums_over_gpus(tmp_path):
    rows = [
        ("one-shot", 4096, {"median_us": 2.5}),
        ("NCCL", 4096, {"failed": "hung"}),
        ("one-shot", 8192, {"median_us": 3}),
    ]
    report = {**{key: OURS[key] for key in ("machine", "date")}, "commit": None, "ranks": 2}
    report["sums"] = [{"variant": variant, "nbytes": nbytes, **found} for variant, nbytes, found in rows]
    page, _ = written(tmp_path, sums=report)
    assert "| bytes | one-shot | NCCL |" in page and "| 4,096 | 2.5 | failed |" in page and "| 8,192 | 3 |  |" in page
    assert "commit" not in page.split("## Sums over GPUs")[1]


def test_rows_to_experts(tmp_path):
    rows = [
        ("ours", 2, 8, {"median_us": 3.5}),
        ("NCCL", 2, 8, {"failed": "hung"}),
        ("ours", 4, 1024, {"median_us": 20}),
    ]
    report = {**{key: OURS[key] for key in ("machine", "date")}, "commit": None, "top_k": 8}
    report["ways"] = [
        {"variant": variant, "columns": 2048, "ranks": ranks, "rows": count, **found}
        for variant, ranks, count, found in rows
    ]
    page, _ = written(tmp_path, ways=report)
    assert "| columns | ranks | rows of each | ours | NCCL |" in page and "8 experts of each row" in page
    assert "| 2,048 | 2 | 8 | 3.5 | failed |" in page and "| 2,048 | 4 | 1,024 | 20 |  |" in page
