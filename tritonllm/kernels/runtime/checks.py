"""Argument checks of the public kernel functions: a ``ValueError`` that names the argument, before any launch."""

from collections.abc import Sequence

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_tensor(
    name: str,
    t: torch.Tensor,
    shape: Sequence[int | str | None],
    *,
    dtype: torch.dtype | Sequence[torch.dtype] | None = FLOATS,
    like: torch.Tensor | None = None,
) -> None:
    """Check one tensor argument.

    Args:
        name: the argument's name, for the message.
        t: the tensor.
        shape: one entry per dimension: a number it must equal, or a letter (or ``None``) that takes any size.
        dtype: the dtype or dtypes allowed; ``None`` allows all.
        like: a tensor whose device ``t`` must share.

    Raises:
        ValueError: if a dimension, the dtype or the device differs, the last dimension is not contiguous, or autograd
            would record the call: no operation has a backward pass.
    """
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    sizes = t.shape  # each access makes a new one
    fits = len(sizes) == len(shape)
    for have, want in zip(sizes, shape, strict=False):  # a loop: half the time of a generator
        if have != want and isinstance(want, int):
            fits = False
    if not fits:
        wanted = ", ".join("*" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(sizes)}")
    if dtype is not None and t.dtype is not dtype:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if t.dtype not in allowed:
            fix = "" if t.is_floating_point() else _conversion(name, allowed)
            raise ValueError(f"{name} must be {' or '.join(str(d) for d in allowed)}, got {t.dtype}{fix}")
    if like is not None and t.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {t.device}")
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but this is inference only: wrap the call in torch.no_grad() or detach it"
        )
    check_last_contiguous(name, t)


def _conversion(name: str, allowed: Sequence[torch.dtype]) -> str:
    """How to make integers of another size those that are allowed; nothing where floats are."""
    if len(allowed) != 1 or allowed[0].is_floating_point:
        return ""
    return f": use {name}.to({allowed[0]})"


def check_last_contiguous(name: str, t: torch.Tensor) -> None:
    # the stride first: it settles most tensors
    if t.dim() and t.stride(-1) != 1 and t.shape[-1] > 1 and t.numel():
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tuple(t.stride())}")


def check_scaled(scale: float, residual: torch.Tensor | None) -> None:
    if residual is None and scale != 1.0:
        raise ValueError(f"scale={scale} needs residual: it multiplies what is added to that")


def check_same_dtype(name: str, t: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if t.dtype != other.dtype:
        raise ValueError(f"{name} must have the dtype of {other_name} ({other.dtype}), got {t.dtype}")


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether all tensors begin at a multiple of 16 bytes, which asynchronous copies need.

    torch's compiler traces without addresses: it is told that they do. What it allocates does, and so do the weights.
    """
    return torch.compiler.is_compiling() or all(t.data_ptr() % 16 == 0 for t in tensors)
