"""How every layer allocates its weights, and holds those of products in any format."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from tritonllm.kernels import widen_weight
from tritonllm.kernels.dense.weight import NARROW, Groups, Weight


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@contextmanager
def deferred() -> Iterator[None]:
    """Inside the block, weights of products have no memory: a loader gives it to each when it knows the format."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def product_weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """As :func:`empty_parameter`; inside :func:`deferred` on the meta device."""
    return empty_parameter(*shape, dtype=dtype, device=torch.device("meta") if _deferred.get() else device)


class HoldsWeights(nn.Module):
    """A module with weights of products, whose parts are its parameters: ``name``, and of a narrow one ``name_scales``,
    ``name_zeros`` and ``name_row_scales``."""

    def __init__(self) -> None:
        super().__init__()
        self._formats: dict[str, tuple[str, Groups, bool]] = {}

    def hold(self, name: str, to: torch.Tensor | Weight) -> None:
        """Multiply by this weight from here on. By a narrow one on the CPU, whose products read wide weights, by its
        numbers times their scales."""
        of = to if isinstance(to, Weight) else Weight(to)
        wide: torch.Tensor | None = getattr(self, name, None)
        if wide is not None and wide.is_cpu and of.format in NARROW and self._formats[name][0] not in NARROW:
            for place, one in ((wide, of),) if wide.dim() == 2 else zip(wide, of.each(), strict=True):
                place.copy_(widen_weight(one, wide.dtype))
            return
        of_scales = (f"{name}_scales", of.scales), (f"{name}_zeros", of.zeros), (f"{name}_row_scales", of.row_scales)
        for part, value in ((name, of.data), *of_scales):
            parameter = None if value is None else nn.Parameter(value, requires_grad=False)
            if part in self._parameters:
                self._parameters[part] = parameter
            else:
                self.register_parameter(part, parameter)
        self._formats[name] = of.format, of.groups, of.rounds_rows

    @property
    def held_names(self) -> tuple[str, ...]:
        """The names of its weights."""
        return tuple(self._formats)

    def held(self, name: str) -> Weight:
        """The weight as products take it."""
        format, groups, rounds_rows = self._formats[name]
        scales, zeros, row_scales = (getattr(self, f"{name}_{part}") for part in ("scales", "zeros", "row_scales"))
        return Weight(getattr(self, name), scales, format, groups, zeros, row_scales, rounds_rows)
