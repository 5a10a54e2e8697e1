"""The trainer of EAGLE heads from end to end, some seconds long: what it writes drafts better than chance."""

import importlib
import re
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.checkout import environment

ROOT = Path(__file__).parents[2]


def run_apart(options):
    """As a user does."""
    command = [sys.executable, str(ROOT / "examples" / "train_eagle_head.py"), *options]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def run_here(options):
    """In this process, which has imported nearly all of it: half of the time of such a short training."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as said:
        patch.syspath_prepend(ROOT / "examples")
        importlib.import_module("train_eagle_head").main(options)
    return said.getvalue()


@pytest.mark.parametrize(
    ("method", "run", "layer", "others"), [("eagle", run_apart, "layers.0.", 1), ("eagle3", run_here, "midlayer.", 4)]
)
@pytest.mark.long
def test_a_head_that_was_trained_for_some_steps(tmp_path, method, run, layer, others):
    said = run(["--out", str(tmp_path / "head"), "--steps", "24", "--documents", "30", "--method", method])
    losses = [float(text) for text in re.findall(r"cross-entropy ([\d.]+)", said)]
    assert len(losses) == 2 and losses[1] < losses[0] - 1  # first step and last
    right = re.search(r"drafts that are right, greedy, at each place: (\d+)%, \d+%, \d+%", said)
    assert right is not None and int(right[1]) >= 9  # 17; one that saw what it is to tell while it learned: 5
    names = load_file(tmp_path / "head" / "model.safetensors").keys()
    assert "fc.weight" in names and sum(not name.startswith(layer) for name in names) == others
