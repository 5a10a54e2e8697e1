"""The engine's benchmark and timeline on a GPU, each in a process of its own, at the smallest workload."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.engine_workloads import WORKLOADS, checksum, requests

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
# Beside whatever else is on the GPU; and a start with few sizes to compile and capture takes half as long.
SMALL = ["--options", '{"num_blocks": 512, "max_num_seqs": 4, "max_num_batched_tokens": 512}']


def result_of(module, out, *more):
    command = [sys.executable, "-m", module, "--out", str(out), *SMALL, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text()), done.stdout


def test_batch_1(tmp_path):
    more = ["--workload", "W3a", "--repeats", "2", "--ceilings", "measured"]
    report, printed = result_of("bench.engine", tmp_path / "engine.json", *more)
    (row,) = report["rows"]
    assert row["checksum"] == checksum(requests(WORKLOADS["W3a"])) and len(row["values"]) == 2
    assert row["kernels_compiled"] == 0
    assert 0 < row["percent"] < 100 and row["unit"] == "ms/token"
    assert report["machine"]["gpu"].startswith("NVIDIA") and report["ceilings"]["copy_gb_per_s"] > 100
    assert "W3a" in printed and "0 rows failed" in printed


def test_timeline(tmp_path):
    more = ["--workload", "W3a", "--max-tokens", "40"]
    report, printed = result_of("bench.timeline", tmp_path / "timeline.json", *more)
    (timeline,) = report["timelines"]
    assert timeline["steps"] >= 10 and timeline["events"] == len(timeline["sequence"]) > 28
    assert 0 < timeline["busy_percent"] <= 100 and timeline["recorded_step_us"] > 100
    assert any(kernel["per_layer"] == 1 for kernel in timeline["kernels"])
    assert sum(kernel["count"] for kernel in timeline["kernels"]) == timeline["events"]
    assert 0 < timeline["idle"]["idle_percent"] < 100
    assert "GPU busy" in printed
