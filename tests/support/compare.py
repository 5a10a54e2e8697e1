"""The one place for tolerances, and the comparison that uses them.

The error of an output is ||out - ref|| / ||ref|| against a float32 (or float64) reference on the same inputs.
"""

import torch

# One rounding of the output costs eps/sqrt(3) (2e-4 in float16, 2e-3 in bfloat16); the rest is for the roundings
# between matrix products, whose operands have the input's dtype. float32 products are exact float32 ("ieee").
RELATIVE_ERROR = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||; infinite for NaN, 0 for two empty or two all-zero tensors."""
    assert out.shape == ref.shape, f"shape {tuple(out.shape)} != {tuple(ref.shape)}"
    a, b = out.double(), ref.double()
    same_infinities = torch.isinf(b) & (a == b)
    a, b = a.masked_fill(same_infinities, 0), b.masked_fill(same_infinities, 0)
    error, size = float((a - b).norm()), float(b.norm())
    if error != error:
        return float("inf")
    return error / size if size else (0.0 if error == 0 else float("inf"))


def assert_close(out: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype | None = None, what: str = "out") -> None:
    """Fail unless `out` is within the tolerance of `dtype` (default: its own) of `ref`."""
    error, limit = relative_error(out, ref), RELATIVE_ERROR[dtype or out.dtype]
    assert error <= limit, f"{what}: relative error {error:.3g} > {limit:.3g} ({dtype or out.dtype})"


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output that cannot pass a check unless all of it is written: NaN, or the lowest integer."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype, device=device)


def with_row_padding(t: torch.Tensor, padding: int) -> torch.Tensor:
    """The same values as a view whose rows are `padding` elements apart: contiguous in the last dimension only."""
    wide = t.new_empty(*t.shape[:-1], t.shape[-1] + padding)
    view = wide[..., : t.shape[-1]]
    view.copy_(t)
    return view
