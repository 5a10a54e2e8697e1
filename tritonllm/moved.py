"""Old names of modules, which imports may still use: each gives the module at its new place, and a DeprecationWarning.

``tritonllm.engine``, ``tritonllm.serve`` and the package itself had files that lie in rooms now:
``tritonllm.engine.scheduler`` is ``tritonllm.engine.schedule.scheduler``.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = __name__.split(".")[0]
# By a room's old place, the folders that its files went to, the first one first; ``*`` is each room inside.
FOLDERS = {
    "": ("config", "system", "http"),
    "engine": ("engine/*", "system"),
    "serve": ("serve/engines", "serve/api", "serve/processes", "serve/ray"),
    "route": ("http",),
    "teach": ("telemetry",),
    "teach.dashboard": ("telemetry",),
}
# Files that have another name there.
NAMES = {
    "config_checks": "checks",
    "kv_transfer_config": "kv_transfer",
    "parallel_config": "parallel",
    "speculative_config": "speculative",
    "inputs": "prompts",
    "http_guard": "guard",
    "http_heads": "heads",
    "http_server": "server",
    "teach.dashboard.state": "activity_state",
}
# Files that became a part of another one, with their new place.
MERGED = {
    "engine.expert_load": "engine.loop.engine",
    "engine.launch_policy": "engine.step.step_sizes",
    "engine.sleep": "engine.loop.engine",
    "serve.engine_health": "serve.engines.async_llm",
}
PREFIXES = {"engine.kv_": "engine/transfer", "serve.ray_": "serve/ray"}  # which names there do without


def place_of(name: str) -> str | None:
    """The new name of the module ``name``, without the package's; ``None`` if there is none.

    Args:
        name: the old one, without the package's: ``engine.scheduler``.
    """
    from pathlib import Path  # every program that imports the package would pay for it

    if name in MERGED:
        return MERGED[name]
    root = Path(__file__).parent
    folder, _, file = name.rpartition(".")
    rooms, file = FOLDERS.get(folder, ()), NAMES.get(name, file)
    found = [path for room in rooms for path in root.glob(f"{room}/{file}.py")]
    for prefix, room in PREFIXES.items():
        if name.startswith(prefix):
            found += root.glob(f"{room}/{name.removeprefix(prefix)}.py")
    return ".".join(found[0].relative_to(root).with_suffix("").parts) if found else None


class MovedModules:
    """Finds what no other finder has found, under its old name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        new = place_of(name) if package == PACKAGE and name else None
        loader: Any = self  # importlib.abc's class is a third of what importing the package takes
        return None if new is None else ModuleSpec(fullname, loader, origin=f"{PACKAGE}.{new}")

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of an empty one, as what imports it allows."""
        spec = module.__spec__
        assert spec is not None and spec.origin is not None
        warnings.warn(f"{spec.name} is {spec.origin} now", DeprecationWarning, stacklevel=2)
        sys.modules[spec.name] = importlib.import_module(spec.origin)


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` by which its classes have their old names still, with a DeprecationWarning.

    Args:
        module: ``__name__``.
        names: new names, by old ones.
    """

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is {module}.{names[name]} now", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return getattr_


def install() -> None:
    """Install the finder once, behind all other finders."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
