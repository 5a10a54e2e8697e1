"""Comparisons of an output with its reference, by the measure and the tolerances of `tritonllm.testing`."""

import torch

from tritonllm.testing import RELATIVE_ERROR, relative_error

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def assert_close(out: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype | None = None, what: str = "out") -> None:
    """Fail unless `out` is within the tolerance of `dtype` (default: its own) of `ref`."""
    error, limit = relative_error(out, ref), RELATIVE_ERROR[dtype or out.dtype]
    assert error <= limit, f"{what}: relative error {error:.3g} > {limit:.3g} ({dtype or out.dtype})"


def assert_logs_close(out: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype, what: str = "lse") -> None:
    """The same for logarithms. An error in one is a relative error of the number whose logarithm it is, however close
    to 0 the logarithm; so those below 1 count as 1."""
    m_finite = ref.isfinite()
    assert torch.equal(out[~m_finite], ref[~m_finite]), f"{what}: infinite in other places"
    size = ref[m_finite].abs().clamp(min=1)
    error = float((out[m_finite] - ref[m_finite]).norm() / size.norm()) if len(size) else 0.0
    limit = RELATIVE_ERROR[dtype]
    assert error <= limit, f"{what}: error {error:.3g} > {limit:.3g} ({dtype})"


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output that cannot pass a check unless all of it is written: NaN, or the lowest integer."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full(shape, value, dtype=dtype, device=device)


def with_row_padding(t: torch.Tensor, padding: int) -> torch.Tensor:
    """The same values as a view whose rows are `padding` elements apart: contiguous in the last dimension only, and
    what lies between the rows must not be read."""
    wide = poisoned(*t.shape[:-1], t.shape[-1] + padding, dtype=t.dtype, device=t.device)
    view = wide[..., : t.shape[-1]]
    view.copy_(t)
    return view


def relative_errors(out: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """The relative error of each row."""
    return (out - ref).norm(dim=-1) / ref.norm(dim=-1)


def median_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """The relative error of the median row."""
    return float(relative_errors(out, ref).median())
