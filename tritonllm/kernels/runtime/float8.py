"""Rows as float8 (e4m3) or int8 with a float32 scale each: what the kernels that quantise on the way out share.

A row's scale maps its largest magnitude to the largest number, 448 or 127: ``x`` is about ``q.float() * scale``.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.chip import chip_of

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
LARGEST_INT8 = 127.0
SMALLEST_ROW = 1e-30  # a row whose largest magnitude is below counts as if it were this: its inverse is finite
_INVERSE_LARGEST: tl.constexpr = tl.constexpr(1.0 / LARGEST)
_INVERSE_LARGEST_INT8: tl.constexpr = tl.constexpr(1.0 / LARGEST_INT8)
_TO_WHOLE: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # whole numbers are the steps of float32 there
_SMALLEST_ROW: tl.constexpr = tl.constexpr(SMALLEST_ROW)


def has_float8(device: torch.device) -> bool:
    """Whether the chip behind ``device`` converts e4m3: NVIDIA's from compute capability 8.9 on; without a chip, torch
    and the interpreter do."""
    chip = chip_of(device)
    return chip is None or (isinstance(chip.arch, int) and chip.arch >= 89)


def require_float8(what: str, device: torch.device, instead: str) -> None:
    """Raise if ``what``, which is float8, is on a GPU that cannot convert it; ``instead`` says what to do then.

    Raises:
        ValueError: it is.
    """
    chip = chip_of(device) if device.type == "cuda" else None
    if chip is not None and not has_float8(device):
        arch = f"{chip.arch // 10}.{chip.arch % 10}" if isinstance(chip.arch, int) else chip.arch
        raise ValueError(
            f"{what} is float8, which needs a GPU of compute capability 8.9 or more, this one has {arch}: {instead}"
        )


@triton.jit
def row_scale(b_largest, dtype: tl.constexpr):
    """``(scale, 1 / scale)`` of rows with these largest magnitudes, float32, which become float8 or int8."""
    INVERSE: tl.constexpr = _INVERSE_LARGEST_INT8 if dtype == tl.int8 else _INVERSE_LARGEST
    b_scale = tl.maximum(b_largest, _SMALLEST_ROW) * INVERSE
    return b_scale, tl.div_rn(1.0, b_scale)


@triton.jit
def round_to(b_x, dtype: tl.constexpr):
    """The nearest numbers of float8 or int8, of a tie the even one."""
    if dtype == tl.int8:
        b_x = (b_x + _TO_WHOLE) - _TO_WHOLE
    return b_x.to(dtype)


def quantize_reference(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    """Rows ``x[..., N]`` into ``q[..., N]`` float8_e4m3fn or int8 and ``scale[...]`` float32.

    A product and a reciprocal, as in the kernels: torch divides by a number in one way on the CPU, in another on a GPU.
    """
    largest = x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1).clamp(min=SMALLEST_ROW)
    most = LARGEST_INT8 if q.dtype == torch.int8 else LARGEST
    scale = scale.view(largest.shape).copy_(largest * (1.0 / most))
    numbers = (x.float() * scale.reciprocal()[..., None]).clamp(-most, most)
    q.copy_(numbers.round() if q.dtype == torch.int8 else numbers.to(DTYPE))


def empty_rows(x: torch.Tensor, n: int, dtype: torch.dtype = DTYPE) -> tuple[torch.Tensor, torch.Tensor]:
    """New ``(q[..., n], scale[...])`` for rows of the shape of ``x[..., *]``.

    Raises:
        ValueError: float8 on a GPU without it.
    """
    if dtype == DTYPE:
        require_float8("what is made of x", x.device, "do not quantize there")
    q = torch.empty((*x.shape[:-1], n), dtype=dtype, device=x.device)
    return q, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
