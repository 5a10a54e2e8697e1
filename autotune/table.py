"""Tables of tuned configurations: written with their provenance, and checked against the kernels as they are now."""

import datetime
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

from autotune.ops import Tunable
from autotune.revision import commit
from tritonllm.kernels.runtime import tuning

LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg"})  # any launch takes these


def kernel_sources(*modules: ModuleType) -> dict[str, str]:
    """The modules' Triton functions and those that they call, by name."""
    sources: dict[str, str] = {}
    todo = [value for module in modules for value in vars(module).values() if isinstance(value, JITCallable)]
    while todo:
        function = todo.pop()
        name = f"{function.fn.__module__}.{function.fn.__qualname__}"
        if name not in sources:
            sources[name] = function.src
            used = (function.fn.__globals__.get(used) for used in function.fn.__code__.co_names)
            todo += [value for value in used if isinstance(value, JITCallable)]
    return sources


def kernel_hash(*modules: ModuleType) -> str:
    """Hash of the :func:`kernel_sources` and of nothing else: docstrings elsewhere, checks and references may change,
    and files may move, without making a table stale."""
    sources = sorted(kernel_sources(*modules).values())
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def hash_of(tunable: Tunable) -> str:
    """:func:`kernel_hash` of all that the operation launches."""
    return kernel_hash(tunable.module, *tunable.also)


def build(tunable: Tunable, machine: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A table in the format of :mod:`tritonllm.kernels.runtime.tuning`."""
    return {
        "op": tunable.op,
        "gpu": machine["gpu"],
        "arch": machine["arch"],
        "processors": machine["processors"],
        "memory_gib": machine["memory_gib"],
        "triton": machine["triton"],
        "torch": machine["torch"],
        "kernel_hash": hash_of(tunable),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "entries": list(entries),
    }


def write(table: Mapping[str, Any], folder: Path) -> Path:
    """Write ``<folder>/<gpu>/<op>.json``, one entry a line, so that a diff shows what changed."""
    path = folder / tuning.gpu_slug(table["gpu"]) / f"{table['op']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in table.items() if name != "entries"]
    entries = ",\n".join(f"    {json.dumps(entry)}" for entry in table["entries"])
    path.write_text("\n".join(["{", *head, '  "entries": [', entries, "  ]", "}"]) + "\n")
    return path


def check_folder(folder: Path) -> None:
    """Raises:
    OSError: no table can be written there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def tuned(folder: Path, gpu: str, op: str) -> list[tuple[tuning.Key, tuning.Config]]:
    """What a GPU's table names for each key, to be measured first when the operation is tuned again."""
    path = folder / tuning.gpu_slug(gpu) / f"{op}.json"
    if not path.exists():
        return []
    entries = json.loads(path.read_text())["entries"]
    return [(entry["key"], entry["config"]) for entry in entries if "config" in entry]


def problems(table: Mapping[str, Any], tunable: Tunable) -> list[str]:
    """What is wrong with a table: kernels that changed since, and names that its operation does not know."""
    found = []
    if table["kernel_hash"] != hash_of(tunable):
        found.append(f"the kernels changed since {table['date']}: tune again")
    for entry in table["entries"]:
        try:
            config = entry.get("config") or tunable.default(**entry["key"])
            known = tunable.alike(entry["key"], config)
        except TypeError as error:
            found.append(f"key {entry['key']}: {error}")
            continue
        unknown = sorted(config.keys() - known.keys() - LAUNCH_OPTIONS)
        missing = sorted(known.keys() - config.keys() - LAUNCH_OPTIONS)
        found += [f"key {entry['key']}: unknown {name}" for name in unknown]
        found += [f"key {entry['key']}: no {name}" for name in missing]
    return found


def check(folder: Path, load: Callable[[str], Tunable]) -> list[str]:
    """Everything wrong with the tables under a folder, each with the table's path.

    Args:
        load: an operation by its name; raises :class:`KeyError` if there is none.
    """
    paths = sorted(folder.glob("*/*.json"))
    found = [] if paths else [f"{folder}: there is no table in a folder of it"]
    for path in paths:
        table = json.loads(path.read_text())
        try:
            tunable = load(table["op"])
        except KeyError:
            found.append(f"{path.relative_to(folder)}: there is no operation {table['op']}: remove the table")
            continue
        found += [f"{path.relative_to(folder)}: {what}" for what in problems(table, tunable)]
    return found
