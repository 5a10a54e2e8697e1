"""What can be tuned: one file per table, each with a ``TUNABLE``: the problems to tune for and the space to search.

The folders are the wings of ``tritonllm.kernels``; a file's name is its table's.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from autotune.problem import Problem
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class Tunable:
    """One table of launch configurations.

    Args:
        op: the name that the launcher passes to ``tuning.get_config``.
        module: the file with the launcher and its kernels.
        default: the launcher's ``default_config``.
        problems: real sizes; each gets an entry in the table.
        space: ``space(**key)``: the configurations to try for a key, the same list each time.
        also: further files with kernels between which a configuration decides.
    """

    op: str
    module: ModuleType
    default: Callable[..., tuning.Config]
    problems: tuple[Problem, ...]
    space: Callable[..., Iterable[tuning.Config]]
    also: tuple[ModuleType, ...] = ()

    def only_for(self, key: tuning.Key, config: tuning.Config) -> Callable[..., tuning.Config]:
        """``config`` for launches with this key, the default for the others that the problem may make."""
        return lambda **asked: config if asked == key else self.default(**asked)

    def alike(self, key: tuning.Key, config: tuning.Config) -> tuning.Config:
        """A configuration known to be complete, of the kernel that ``config`` is for (where it says which)."""
        known = [self.default(**key), *self.space(**key)]
        return next((c for c in known if c.get("kernel") == config.get("kernel")), known[0])


@functools.cache
def _modules() -> dict[str, str]:
    """Each table's name, and the module that says how it is tuned."""
    found = [module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.") if not module.ispkg]
    return {name.rpartition(".")[2]: name for name in found}


def names() -> list[str]:
    return sorted(_modules())


def load(op: str) -> Tunable:
    tunable: Tunable = importlib.import_module(_modules()[op]).TUNABLE
    return tunable


def product(**choices: Iterable[Any]) -> list[tuning.Config]:
    """Every combination of the values given for each name, in order."""
    configs: list[tuning.Config] = [{}]
    for name, values in choices.items():
        options = list(values)
        configs = [config | {name: value} for config in configs for value in options]
    return configs
