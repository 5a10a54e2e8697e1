"""The trainer of EAGLE heads from end to end, some seconds long: what it writes drafts better than chance."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("method", "layer", "others"), [("eagle", "layers.0.", 1), ("eagle3", "midlayer.", 4)])
def test_a_head_that_was_trained_for_some_steps(tmp_path, method, layer, others):
    command = [sys.executable, str(ROOT / "examples" / "train_eagle_head.py"), "--out", str(tmp_path / "head")]
    command += ["--steps", "24", "--documents", "30", "--method", method]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}  # this checkout's package, wherever another is installed from
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    losses = [float(text) for text in re.findall(r"cross-entropy ([\d.]+)", run.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] - 1  # first step and last
    right = re.search(r"drafts that are right, greedy, at each place: (\d+)%, \d+%, \d+%", run.stdout)
    assert right is not None and int(right[1]) >= 9  # 17; one that saw what it is to tell while it learned: 5
    names = load_file(tmp_path / "head" / "model.safetensors").keys()
    assert "fc.weight" in names and sum(not name.startswith(layer) for name in names) == others
