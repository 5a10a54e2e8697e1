"""Imports go down the layers only (docs/design.md), never in a circle, and from one wing of kernels/ into another only
through what that one opens; and only tritonllm/env.py reads the environment.

Reads the sources, runs none of them. An import inside a function or under TYPE_CHECKING counts like any other.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tritonllm
from tritonllm import kernels

PACKAGE = Path(tritonllm.__file__).parent
LAYER = {
    "version": 0,
    "env": 0,
    "events": 0,
    "moved": 0,
    "config": 0,
    "system": 0,
    "http": 0,
    "experts": 0,
    "testing": 0,
    "demo": 0,
    "kernels": 1,
    "dist": 1,
    "layers": 2,
    "models": 3,
    "engine": 4,
    "telemetry": 5,
    "offline": 5,
    "serve": 5,
    "route": 5,
    "teach": 5,
    "cli": 5,
    "__main__": 5,
    "as_vllm": 5,
    "": 5,  # the package itself: names that it exports come from the engine
}
DIVIDED = {"kernels", "engine", "serve"}  # each folder inside is a room of its own
# Parts that use less than their layer may: the highest layer that they import, themselves aside. They import no torch.
REACH = {
    "route": 0,
    "experts": 0,
    "config": 0,
    "system": 0,
    "http": 0,
}  # they start at once, on a machine without a GPU
FOUNDATIONS = {"runtime", "hopper"}  # wings of kernels/ that are open to the others
# Imports that close a circle, and what will remove them.
CIRCLES: dict[tuple[str, str], str] = {}
# The scheduler and what it stands on can be tested, and read, without a tensor.
NO_TORCH = {
    "engine.schedule",  # all of it
    "engine.cache.layer_copies",
    "engine.data.asleep",
    "engine.data.control",
    "engine.data.copy_batches",
    "engine.data.edits",
    "engine.data.plan",
    "engine.data.pooled_spans",
    "engine.data.request",
    "engine.data.step",
    "engine.data.step_inputs",
    "engine.grammar.grammar",
    "engine.grammar.json_schema",
    "engine.start.kv_start",
    "engine.step.builder",
    "engine.step.decode_inputs",
    "engine.step.dummy_step",
    "engine.step.room_sizes",
    "engine.step.seats",
    "engine.step.shared_prefix",
    "engine.transfer.connector",
    "engine.transfer.file_store",
    "engine.transfer.files",
    "engine.transfer.folder",
    "engine.transfer.ipc",
    "engine.transfer.ipc_memory",
    "engine.transfer.ipc_opened",
    "engine.transfer.kept",
    "engine.transfer.nixl",
    "engine.transfer.nixl_agent",
    "engine.transfer.nixl_reader",
    "engine.transfer.params",
    "engine.transfer.peer",
    "engine.transfer.peer_client",
    "engine.transfer.peer_server",
    "engine.transfer.plane",
    "engine.transfer.settings",
    "engine.transfer.transfer",
    "engine.transfer.wire",
    "engine.transfer.workers",
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


def module_of(name: str) -> str:
    """The module that ``tritonllm.x.y.name`` is imported from: ``x.y``, or ``x.y.name`` if that is one."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def home_of(name: str) -> str:
    """As :func:`module_of`, but of what ``tritonllm.kernels`` exports the file that an access imports."""
    *path, last = name.split(".")
    if path != ["tritonllm", "kernels"] or last not in kernels.__all__:
        return module_of(name)
    return f"kernels.{kernels._HELPERS.get(last) or kernels._HOME[last.removesuffix('_ref')]}"


def wing_of(module: str) -> str:
    """The wing of kernels/ that a module lies in, or ``""``."""
    part, _, rest = module.partition(".")
    return rest.split(".")[0] if part == "kernels" else ""


def room_of(module: str) -> str:
    """The room that a module lies in: its folder, or ``""`` for the package itself."""
    part, *rest = module.split(".")
    if part in DIVIDED and rest and (PACKAGE / part / rest[0]).is_dir():
        return f"{part}.{rest[0]}"
    return part


def jumps(module: str, name: str) -> bool:
    """Whether ``module`` in a wing of kernels/ imports ``name`` from another's inside; runtime/ may use no other."""
    target = module_of(name)
    wing, other = wing_of(module), wing_of(target)
    if not wing or not other or wing == other:
        return False
    return wing == "runtime" or (other not in FOUNDATIONS and target != f"kernels.{other}")


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules each of which imports the one before it, the first and the last the same; empty if there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


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
        reach = REACH.get(part, LAYER[part])
        if top == "tritonllm" and part_of(name) != part and reach < LAYER[part_of(name)] <= LAYER[part]:
            found.append(f"{module}:{line}: imports {name}, which is beyond its reach")
        if top == "tritonllm" and jumps(module, name):
            found.append(f"{module}:{line}: imports {name}, which that wing does not open to others")
        if (module in NO_TORCH or room_of(module) in NO_TORCH or part in REACH) and top in ("torch", "transformers"):
            found.append(f"{module}:{line}: imports {top}")
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


def at_once(tree: ast.Module) -> Iterator[ast.stmt]:
    """The imports that an import of the module runs: not those of functions and type checkers."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not (
                isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            ):
                waiting.append(node)


def loaded_with(module: str) -> set[str]:
    """The modules of the package that an import of this one runs (packages above them aside)."""
    found, waiting = set(), {module}
    while waiting:
        found.add(module := waiting.pop())
        path = MODULES[module]
        body = ast.Module(list(at_once(ast.parse(path.read_text()))), [])
        names = [name for _, name in imported(body, module, path.name == "__init__.py")]
        waiting |= {home_of(name) for name in names if name.split(".")[0] == "tritonllm"} - found
    return found


def test_what_answers_http_loads_no_engine():
    """The API process has one in a process beside it: kernels and models would only be time and 70 MB of its memory."""
    loaded = loaded_with("serve.processes.run")
    assert {"serve.api.app", "serve.engines.async_llm", "serve.engines.engine_client", "engine.data.outputs"} <= loaded
    assert not {module for module in loaded if module.split(".")[0] in ("kernels", "layers", "models")}
    assert "engine.loop.engine" in loaded_with("serve.engines.engine_process")


def imports_of_all() -> dict[str, set[str]]:
    """The modules that each module imports itself (packages above them aside)."""
    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        names = [name for _, name in imported(ast.parse(path.read_text()), module, path.name == "__init__.py")]
        found[module] = {home_of(name) for name in names if name.split(".")[0] == "tritonllm"} - {module}
    return found


def test_imports_go_in_no_circle():
    imports = imports_of_all()
    for module, other in CIRCLES:
        imports[module].discard(other)
    assert circle(imports) == []


def test_rooms_go_in_no_circle():
    rooms: dict[str, set[str]] = {}
    for module, others in imports_of_all().items():
        rooms.setdefault(room_of(module), set()).update(room_of(other) for other in others)
    for room, others in rooms.items():
        others.discard(room)
    assert circle(rooms) == []
    assert {"engine.schedule", "serve.api", "kernels.attention", "telemetry"} <= rooms.keys()


def test_every_room_says_what_it_is_for():
    packages = list(PACKAGE.rglob("__init__.py"))
    assert [path for path in packages if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_circles_are_still_there():
    for module, other in CIRCLES:
        imports = imports_of_all()
        for importer, target in CIRCLES.keys() - {(module, other)}:
            imports[importer].discard(target)
        assert {module, other} <= set(circle(imports)), "no circle any more: take it out of CIRCLES"


@pytest.mark.parametrize(
    ("imports", "found"),
    [
        ({"a": {"b"}, "b": {"a"}}, {"a", "b"}),
        ({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}, {"a", "b", "c"}),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, set()),
        ({}, set()),
    ],
)
def test_finds_circles(imports, found):
    assert set(circle(imports)) == found


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("tritonllm.kernels.rms_norm_ref", "kernels.elementwise.norm"),
        ("tritonllm.kernels.WORKSPACE_SIZE", "kernels.attention.decode"),
        ("tritonllm.kernels.runtime.tuning", "kernels.runtime.tuning"),
        ("tritonllm.kernels.runtime.tuning.Config", "kernels.runtime.tuning"),
        ("tritonllm.kernels.sampling.keep", "kernels.sampling"),
        ("tritonllm.env", "env"),
        ("tritonllm.LLM", ""),
    ],
)
def test_finds_what_an_import_reads(name, home):
    assert home_of(name) == home


def test_no_operation_is_called_like_a_wing():
    """Importing the wing would put the package in its place."""
    assert not set(kernels.__all__) & {wing_of(module) for module in MODULES}


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("kernels.elementwise.norm", "from tritonllm.engine.loop.engine import LLMEngine", "layer above"),
        ("kernels.elementwise.norm", "from tritonllm import layers", "layer above"),
        ("kernels.elementwise.norm", "def f():\n    import tritonllm.models.spec", "layer above"),
        ("kernels.elementwise.norm", "from ...layers import linear", "layer above"),
        ("kernels.elementwise.norm", "import numpy", "only torch and triton"),
        ("models.spec", "from tritonllm import LLM", "layer above"),
        ("env", "from tritonllm.kernels import rms_norm", "layer above"),
        ("engine.loop.engine", "from tritonllm.cli import main", "layer above"),
        ("engine.schedule.scheduler", "import torch.nn", "imports torch"),
        ("engine.data.request", "from torch import Tensor", "imports torch"),
        ("engine.step.runner", "import os\nos.environ['A'] = '1'", "only env.py"),
        ("cli", "from os import getenv", "only env.py"),
        ("newcomer", "", "has no layer"),
        ("route.app", "from tritonllm.serve.api.errors import APIError", "beyond its reach"),
        ("route.app", "def f():\n    from tritonllm.kernels import rms_norm", "beyond its reach"),
        ("http.ask", "import torch", "imports torch"),
        ("kernels.speculative.judge", "from tritonllm.kernels.sampling.common import keep", "not open to others"),
        ("kernels.speculative.judge", "from tritonllm.kernels.sampling import common", "not open to others"),
        ("kernels.speculative.judge", "def f():\n    import tritonllm.kernels.sampling.draw", "not open to others"),
        ("kernels.attention.sm90.rows", "from ...dense.sm90 import tiles", "not open to others"),
        ("kernels.hopper.product", "from tritonllm.kernels.moe.grouping import ExpertBlocks", "not open to others"),
        ("kernels.runtime.checks", "from tritonllm.kernels.elementwise import rms_norm", "not open to others"),
    ],
)
def test_finds(module, source, complaint):
    (found,) = violations(source, module)
    assert complaint in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "kernels.elementwise.norm",
            "import math\nimport torch\nfrom tritonllm import env\nfrom tritonllm.kernels.runtime.checks import x",
        ),
        ("kernels.runtime.registry", "from .checks import require\nfrom . import tuning"),
        ("kernels.attention.decode", "from .sm90 import decode\nfrom tritonllm.kernels.attention.portable import few"),
        ("kernels.dense.sm90.gated", "from tritonllm.kernels.hopper.product import product"),
        ("kernels.speculative.judge", "from tritonllm.kernels.sampling import keep\nfrom ..runtime import tuning"),
        ("kernels.moe.experts", "from tritonllm.kernels import linear, rms_norm_ref"),
        ("layers.linear", "from tritonllm.kernels.dense.linear import MAX_M"),
        ("engine.step.runner", "import numpy, torch\nfrom tritonllm.models.spec import ModelSpec"),
        ("cli", "from tritonllm import LLM, __version__"),
        ("env", "import os\nos.environ.get('A')"),
        ("route.app", "from tritonllm import env\nfrom tritonllm.route.pool import Pool\nimport aiohttp"),
        ("cli.route", "from tritonllm.route.config import RouterConfig"),
    ],
)
def test_allows(module, source):
    assert violations(source, module) == []


def test_each_class_has_a_name_of_its_own():
    """Names of one package that mean two things cost a reader more than a longer one."""
    homes: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}
