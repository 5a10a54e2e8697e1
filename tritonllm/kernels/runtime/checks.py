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
        ValueError: if a dimension, the dtype or the device differs, or the last dimension is not contiguous.
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
    if dtype is not None and t.dtype is not dtype and (isinstance(dtype, torch.dtype) or t.dtype not in dtype):
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else dtype
        raise ValueError(f"{name} must be {' or '.join(str(d) for d in allowed)}, got {t.dtype}")
    if like is not None and t.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {t.device}")
    # the stride first: it settles most tensors
    if sizes and t.stride(-1) != 1 and sizes[-1] > 1 and t.numel():
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tuple(t.stride())}")


def check_same_dtype(name: str, t: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    if t.dtype != other.dtype:
        raise ValueError(f"{name} must have the dtype of {other_name} ({other.dtype}), got {t.dtype}")
