"""NaN and infinity among the weights: found at loading, and not in every answer of the model."""

from collections.abc import Iterable, Mapping

import torch


def not_finite(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of the tensors that hold NaN or infinity.

    Each is read once where it is, in its own dtype; nothing of its size is written, and the device is waited for once.
    Two results of ``aminmax`` say it all, for NaN stays NaN in them: 2 ms for 2**24 weights in bfloat16 on a CPU core,
    where ``isfinite`` takes 67.
    """
    floats = {name: t for name, t in tensors.items() if t.numel() and t.is_floating_point() and t.itemsize > 1}
    if not floats:
        return set()
    bounds = torch.stack([torch.stack(torch.aminmax(t.detach())).double() for t in floats.values()])
    return {name for name, good in zip(floats, bounds.isfinite().all(-1).tolist(), strict=True) if not good}


def refuse(where: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Name the first of the tensors that has such values.

    Args:
        where: begins the message.

    Raises:
        ValueError: with their number.
    """
    for name, tensor in tensors:
        if count := tensor.numel() - int(tensor.isfinite().sum()):
            raise ValueError(
                f"{where}tensor {name} has {count} values that are NaN or infinite in "
                f"{str(tensor.dtype).removeprefix('torch.')}: download it again or take another dtype, or insist with "
                "allow_nan=True (--allow-nan)"
            )
