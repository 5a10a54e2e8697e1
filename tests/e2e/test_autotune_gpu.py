"""The tuner and the kernel benchmarks as a user starts them, on a GPU."""

import json

import pytest
import torch

from autotune import __main__ as autotune
from autotune import ops
from autotune.measure import Gpu
from autotune.problem import make_sets
from autotune.timing import Replay
from autotune.worker import Failed
from bench import kernels
from bench.cases import CASES
from tritonllm.kernels.runtime import tuning

pytestmark = pytest.mark.gpu


def test_tuner_writes_a_table(tmp_path):
    major, minor = torch.cuda.get_device_capability()
    kernels, tables = tmp_path / "kernels", tmp_path / "tables"
    argv = ["--op", "copy_blocks", "--jobs", "4"]
    assert autotune.main([*argv, "--compile-only", str(kernels), "--target", f"sm_{major}{minor}"]) == 0
    assert autotune.main([*argv, "--compiled", str(kernels), "--gpu-table-dir", str(tables)]) == 0
    (path,) = tables.glob("*/*.json")
    table = json.loads(path.read_text())
    assert [entry["key"] for entry in table["entries"]] == [{"elements": 8192}, {"elements": 16384}]
    assert all(entry["us"] <= entry["default_us"] and entry["tried"] > 1 for entry in table["entries"])
    assert autotune.main(["--check", "--gpu-table-dir", str(tables)]) == 0


def test_candidate_that_the_chip_refuses_leaves_the_gpu_usable():
    """Too much shared memory: an error of this candidate, not of the process."""
    tunable = ops.load("paged_decode_attention")
    names = [problem.name for problem in tunable.problems]
    index = names.index("decode B1 H16/8 D128 L6000")
    with tuning.override(tunable.op, tunable.default) as asked:
        tunable.problems[index].run(make_sets(tunable.problems[index], torch.device("cuda"), 1)[0])
    gpu, default = Gpu(), tunable.default(**asked[0])
    args = {"op": tunable.op, "problem": index, "key": asked[0], "careful": False}
    with pytest.raises(Failed, match=r"OutOfResources: .*shared memory"):
        gpu.measure(config=default | {"BLOCK_N": 256, "num_stages": 5}, **args)
    assert gpu.measure(config=default, **args) > 0


def test_replay_runs_every_set():
    sets = [torch.zeros(1000, device="cuda") for _ in range(3)]
    replay = Replay(lambda i: sets[i].add_(1), 3)
    before = [float(x[0]) for x in sets]
    assert replay.us() > 0
    rotations = {float(x[0]) - start for x, start in zip(sets, before, strict=True)}
    assert rotations == {replay.calls / 3}


def test_benchmark_writes_results(tmp_path):
    out = tmp_path / "results.json"
    assert kernels.main(["--only", "K6", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [case["case"] for case in written["cases"]] == [case.problem.name for case in CASES if case.group == "K6"]
    for case in written["cases"]:
        assert case["us"] > 0 and case["torch_us"] > 0 and case["percent"] > 0 and case["error"] <= case["limit"]
