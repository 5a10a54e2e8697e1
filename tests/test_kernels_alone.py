"""The kernels need torch, Triton and numpy; what else the package depends on is for the engine (README.md)."""

import os
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
NEEDED = {"torch", "triton", "numpy"}
PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Missing())
import tritonllm, tritonllm.kernels as kernels
for name in kernels.__all__:
    getattr(kernels, name)
import torch
assert kernels.rms_norm(torch.ones(2, 8), torch.ones(8)).shape == (2, 8)
try:
    tritonllm.LLM
except ModuleNotFoundError as error:
    print(error)
"""


def test_nothing_else_is_imported():
    project = tomllib.loads(PROJECT.read_text())["project"]
    listed = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    missing = {Requirement(line).name.replace("-", "_") for line in listed} - NEEDED
    assert "transformers" in missing
    program = f"MISSING = {sorted(missing)}\n{PROGRAM}"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No module named" in done.stdout  # what is blocked is missed where it is needed
