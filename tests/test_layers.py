"""Imports go down the layers only (docs/design.md), and only tritonllm/env.py reads the environment.

Reads the sources, runs none of them. An import inside a function or under TYPE_CHECKING counts like any other.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tritonllm

PACKAGE = Path(tritonllm.__file__).parent
LAYER = {
    "version": 0,
    "env": 0,
    "events": 0,
    "config": 0,
    "sampling_params": 0,
    "testing": 0,
    "demo": 0,
    "kernels": 1,
    "layers": 2,
    "models": 3,
    "engine": 4,
    "server": 5,
    "teach": 5,
    "cli": 5,
    "__main__": 5,
    "": 5,  # the package itself: names that it exports come from the engine
}
# The scheduler and what it stands on can be tested, and read, without a tensor.
NO_TORCH = {
    "engine.block_pool",
    "engine.builder",
    "engine.edits",
    "engine.plan",
    "engine.prefix_cache",
    "engine.request",
    "engine.scheduler",
    "engine.seats",
    "engine.shared_prefix",
    "engine.step",
    "engine.waiting_queue",
    "layers.regime",
    "layers.segments",
}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """``(line, full dotted name)`` of every import; of ``from a import b``, ``a.b``."""
    here = ["tritonllm", *module.split(".")] if module else ["tritonllm"]
    parents = here if is_package else here[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def part_of(name: str) -> str:
    """The part of the package that ``tritonllm.x.y`` names: ``x``, or ``""`` for what the package itself exports."""
    part = name.split(".")[1] if "." in name else ""
    return part if part in LAYER or part in MODULES else ""


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What ``module`` (dotted, without ``tritonllm.``) does that its place does not allow, one line each."""
    tree = ast.parse(source)
    part = module.split(".")[0]
    if part not in LAYER:
        return [f"{module}: {part} has no layer; add it to LAYER"]
    found = []
    for line, name in imported(tree, module, is_package):
        top = name.split(".")[0]
        if top == "tritonllm" and LAYER[part_of(name)] > LAYER[part]:
            found.append(f"{module}:{line}: imports {name}, which is in a layer above")
        if module in NO_TORCH and top == "torch":
            found.append(f"{module}:{line}: imports torch")
        if part == "kernels" and top not in {"tritonllm", "torch", "triton", *sys.stdlib_module_names}:
            found.append(f"{module}:{line}: imports {top}; a kernel needs only torch and triton")
        if module != "env" and name in {"os.environ", "os.getenv"}:
            found.append(f"{module}:{line}: reads the environment; only env.py does")
    for node in ast.walk(tree):
        if module != "env" and isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}:
            found.append(f"{module}:{node.lineno}: reads the environment; only env.py does")
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_module_keeps_to_its_layer(module):
    path = MODULES[module]
    assert violations(path.read_text(), module, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("kernels.norm", "from tritonllm.engine.llm import LLM", "layer above"),
        ("kernels.norm", "from tritonllm import layers", "layer above"),
        ("kernels.norm", "def f():\n    import tritonllm.models.spec", "layer above"),
        ("kernels.norm", "from ..layers import linear", "layer above"),
        ("kernels.norm", "import numpy", "only torch and triton"),
        ("models.spec", "from tritonllm import LLM", "layer above"),
        ("env", "from tritonllm.kernels import rms_norm", "layer above"),
        ("engine.llm", "from tritonllm.cli import main", "layer above"),
        ("engine.scheduler", "import torch.nn", "imports torch"),
        ("engine.request", "from torch import Tensor", "imports torch"),
        ("engine.runner", "import os\nos.environ['A'] = '1'", "only env.py"),
        ("cli", "from os import getenv", "only env.py"),
        ("newcomer", "", "has no layer"),
    ],
)
def test_finds(module, source, complaint):
    (found,) = violations(source, module)
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "kernels.norm",
            "import math\nimport torch\nfrom tritonllm import env\nfrom tritonllm.kernels.checks import x",
        ),
        ("kernels.norm", "from .checks import require\nfrom . import tuning"),
        ("engine.runner", "import numpy, torch\nfrom tritonllm.models.spec import ModelSpec"),
        ("cli", "from tritonllm import LLM, __version__"),
        ("env", "import os\nos.environ.get('A')"),
    ],
)
def test_allows(module, source):
    assert violations(source, module) == []
