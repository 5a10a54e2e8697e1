"""How far a kernel may be from its reference: one measure and one table, for the tests, the tuner and the benchmarks.

The error of an output is ||out - ref|| / ||ref|| against a float32 (or float64) reference on the same inputs.
"""

import torch

# One rounding of the output costs eps/sqrt(3) (2e-4 in float16, 2e-3 in bfloat16); the rest is for the roundings
# between matrix products, whose operands have the input's dtype. float32 products are exact float32 ("ieee").
RELATIVE_ERROR = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2, torch.float8_e4m3fn: 4e-2}


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||; infinite for NaN, 0 for two empty or two all-zero tensors.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != ref.shape:
        raise ValueError(f"out must have the shape of its reference, {list(ref.shape)}, got {list(out.shape)}")
    a, b = out.double(), ref.double()
    same_infinities = torch.isinf(b) & (a == b)
    a, b = a.masked_fill(same_infinities, 0), b.masked_fill(same_infinities, 0)
    error, size = float((a - b).norm()), float(b.norm())
    if error != error:
        return float("inf")
    return error / size if size else (0.0 if error == 0 else float("inf"))
