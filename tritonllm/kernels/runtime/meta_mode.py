"""Our operators and torch's on meta tensors, which have a shape and no memory.

For our operators, meta tensors stand for tensors on a GPU: the launcher is called, and its launches are noted
(:func:`tritonllm.kernels.compile.parallel.list_kernels`). For torch's, a few lines replace torch's own shape functions:
those import sympy and torch's compiler when the first of them is called, which took 3.3 s of a start beside an H200. An
operation that is not here goes to torch, and is right as well.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tritonllm.kernels.runtime.registry import LAUNCHERS

aten = torch.ops.aten


def _empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _broadcast(*tensors: torch.Tensor) -> list[int]:
    rank = max(t.dim() for t in tensors)
    shapes = [(1,) * (rank - t.dim()) + tuple(t.shape) for t in tensors]
    return [0 if 0 in sizes else max(sizes) for sizes in zip(*shapes, strict=True)]


def _two(x: Any, y: Any, **_: Any) -> torch.Tensor:
    tensors = [t for t in (x, y) if isinstance(t, torch.Tensor)]
    return _empty(_broadcast(*tensors), torch.result_type(x, y))


def _compare(x: torch.Tensor, y: Any) -> torch.Tensor:
    return _empty(_broadcast(x, y) if isinstance(y, torch.Tensor) else x.shape, torch.bool)


def _where(condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
    tensors = [t for t in (condition, x, y) if isinstance(t, torch.Tensor)]
    return _empty(_broadcast(*tensors), torch.result_type(x, y))


def _like(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return _empty(x.shape, dtype or x.dtype)


def _itself(x: torch.Tensor, *args: Any, **_: Any) -> torch.Tensor:
    return x


def _arange(start: int, end: int | None = None, step: int = 1, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    first, last = (0, start) if end is None else (start, end)
    return _empty((max(0, -int((first - last) // step)),), dtype or torch.int64)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _empty((*x.shape[:-1], weight.shape[0]), x.dtype)


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _empty((*a.shape[:-1], b.shape[1]), dtype or a.dtype)


def _product_plus(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
    return _product(a, b)


def _into(*_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
    return out


def _embedding(weight: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor:
    return _empty((*ids.shape, weight.shape[1]), weight.dtype)


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return _empty((*x.shape[:dim], len(index), *x.shape[dim + 1 :]), x.dtype)


def _repeat(x: torch.Tensor, times: list[int]) -> torch.Tensor:
    shape = (1,) * (len(times) - x.dim()) + tuple(x.shape)
    return _empty([n * size for n, size in zip(times, shape, strict=True)], x.dtype)


# of what is contiguous: elsewhere the result has strides like its argument's
_COMPARISONS = (aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne)
_ELEMENTWISE: dict[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys((aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.__and__.Tensor), _two),
    **dict.fromkeys((aten.floor_divide.default, aten.clamp_min.default, aten.clamp_max.default), _two),
    **dict.fromkeys((aten.rsub.Scalar, aten.remainder.Scalar, aten.clamp.default), _like),
    **dict.fromkeys((aten.sigmoid.default, aten.sin.default, aten.cos.default, aten.empty_like.default), _like),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), _where),
    **{op: _compare for packet in _COMPARISONS for op in (packet.Tensor, packet.Scalar)},
}
_SHAPES: dict[Any, Callable[..., torch.Tensor]] = {
    aten.repeat.default: _repeat,
    **dict.fromkeys((aten.mul_.Tensor, aten.add_.Tensor, aten.addmm_.default, aten.copy_.default), _itself),
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys((aten.mm.default, aten.mm.dtype, aten.matmul.default), _product),
    **dict.fromkeys((aten.mm.out, aten.mm.dtype_out, aten.addmm.out), _into),
    aten.addmm.default: _product_plus,
    aten.linear.default: _linear,
    aten.embedding.default: _embedding,
    aten.index_select.default: _index_select,
}


def _facts(argument: Any) -> Any:
    """What a launcher can see of an operator's argument."""
    if isinstance(argument, torch.Tensor):
        places = argument.storage_offset() % 16  # with the dtype: what Triton asks of an address
        return argument.shape, argument.stride(), argument.dtype, places, argument.device
    return tuple(map(_facts, argument)) if isinstance(argument, (list, tuple)) else argument


class MetaMode(TorchDispatchMode):
    """Inside the context, operations on meta tensors go through this file.

    Args:
        once: one of our operators is left out if it came before with arguments of the same shapes, strides, dtypes,
            alignments and values: it would launch the same kernels, and has no output. A walk over the steps of an
            engine takes half of the time so.
    """

    def __init__(self, *, once: bool = False) -> None:
        super().__init__()
        self._once, self._made = once, set[Any]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is traced here, so torch's compiler need not be imported

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        device = kwargs.get("device") or (tensors[0].device if tensors else None)
        if device is not None and torch.device(device).type == "meta":
            if func in LAUNCHERS:
                return self._launch(func, args, kwargs)
            if func in _ELEMENTWISE and all(t.is_contiguous() for t in tensors):
                return _ELEMENTWISE[func](*args, **kwargs)
            if func in _SHAPES:
                return _SHAPES[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _launch(self, func: Any, args: Any, kwargs: Any) -> None:
        made = (func, *map(_facts, args), *kwargs, *map(_facts, kwargs.values())) if self._once else None
        if made is not None and made in self._made:
            return
        with self:  # for what the launcher calls
            LAUNCHERS[func](*args, **kwargs)
        if made is not None:
            self._made.add(made)
