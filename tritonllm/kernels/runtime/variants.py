"""The table of variants: which kernel computes an operation, on which chips, for what, and where it pays.

Rows stand beside the operation that launches them, those first that are asked first; the last one takes everything. A
kernel more, or one for a chip more, is a row more: which chip runs what is asked nowhere else.

Where a tuning table has the last word, a choice has two steps. :meth:`Variants.own_arch` says of a call whether a
kernel of this chip alone fits, which becomes a part of the configuration's key; and once for each key the first row
that pays gives the configuration, whose ``kernel`` names the row (:meth:`Variants.default_config`,
:meth:`Variants.launch`). Elsewhere :meth:`Variants.own` asks both of a call's operands.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tritonllm.kernels.runtime import chip
from tritonllm.kernels.runtime.tuning import Config

Question = Callable[..., bool] | str | None


class Variant(NamedTuple):
    """A kernel for an operation.

    Attributes:
        kernel: its name, which a configuration says.
        source: its file in ``tritonllm/kernels``.
        archs: the architectures of the chips that run it, 90 for sm_90; none: any.
        fits: whether it can compute a call, of the operands: a function, or the name of one in ``source``.
        pays: whether it is the fastest, by measurement: of what it names of the configuration's key; without a
            configuration, of the operands, as ``fits``.
        config: its configuration, of what it names of the key; None: it has no more than its name.
    """

    kernel: str
    source: str
    archs: tuple[int | str, ...] = ()
    fits: Question = None
    pays: Question = None
    config: Callable[..., Config] | None = None

    @property
    def module(self) -> Any:
        """Its source, imported when it is first asked: Gluon is not there for every GPU."""
        return _module(self.source)

    def asked(self, question: Question) -> Callable[..., bool]:
        return (getattr(self.module, question) if isinstance(question, str) else question) or _always


class Variants:
    """An operation's rows.

    Args:
        operation: its name; what else is chosen in it has a name behind a comma.
    """

    def __init__(self, operation: str, *rows: Variant) -> None:
        TABLE[operation] = self
        self.rows = rows
        self.named = {row.kernel: row for row in rows}
        self._own: dict[int | str, list[Any]] = {}  # by the chip

    def own_rows(self, device: torch.device) -> list[tuple[Variant, Callable[..., bool], Callable[..., bool]]]:
        """The rows that only chips as that behind ``device`` have, with what says whether each pays and fits."""
        found = chip.chip_of(device)
        if found is None:
            return []
        own = self._own.get(found.arch)
        if own is None:
            own = [(row, row.asked(row.pays), row.asked(row.fits)) for row in self.rows if found.arch in row.archs]
            self._own[found.arch] = own
        return own

    def own_arch(self, device: torch.device, *operands: Any) -> str:
        """``"sm90"``, say, where a kernel of the chip behind ``device`` alone fits the operands, else ``"any"``."""
        for row, _, fits in self.own_rows(device):
            if fits(*operands):
                return _name(row.archs[0])
        return "any"

    def own(self, device: torch.device, *operands: Any) -> Variant | None:
        """The first row of the chip behind ``device`` alone that pays for the operands and fits them."""
        for row, pays, fits in self.own_rows(device):
            if pays(*operands) and fits(*operands):
                return row
        return None

    def default_config(self, **key: int | str) -> Config:
        """Where no table has the key: the first row that pays (:func:`tritonllm.kernels.runtime.tuning.get_config`)."""
        there = (row for row in self.rows if not row.archs or key["arch"] in map(_name, row.archs))
        row = next(row for row in there if row.pays is None or _given(row.pays, key))
        return (_given(row.config, key) if row.config else {}) | {"kernel": row.kernel}

    def launch(self, config: Config, *args: Any) -> None:
        """Launch the kernel that the configuration names, by the ``launch`` of its file."""
        rest = {name: value for name, value in config.items() if name != "kernel"}
        self.named[config["kernel"]].module.launch(*args, rest)


TABLE: dict[str, Variants] = {}


@functools.cache
def _module(source: str) -> Any:
    return importlib.import_module(f"tritonllm.kernels.{source.removesuffix('.py').replace('/', '.')}")


def _always(*operands: Any) -> bool:
    return True


def _given(function: Any, key: Mapping[str, int | str]) -> Any:
    """The function of what it names of the key."""
    return function(**{name: key[name] for name in inspect.signature(function).parameters})


def _name(arch: int | str) -> str:
    return f"sm{arch}" if isinstance(arch, int) else arch
