"""Narrow weights: 16-bit weights as a byte or half a byte an element with scales, and back.

A product of few rows takes as long as its weights take to be read, so half the bytes are half the time. The numbers are
widened where they are multiplied; activations stay as they are (weight-only quantization). float8: Micikevicius et al.,
"FP8 Formats for Deep Learning" (2022); scales by row: Dettmers et al., "LLM.int8()" (2022); by blocks of 128 x 128:
DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024); four bits in groups of a row: Frantar et al., "GPTQ" (2022); floats
of four bits: OCP Microscaling Formats (MX) Specification v1.0 (2023), section 5.3.3.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dense.arguments import NOT_SCALED, Scaled, columns_of_unit, half_unit, scales_for_kernel
from tritonllm.kernels.dense.weight import (
    BYTE_SCALES,
    FP4,
    FP8,
    INT4,
    INT8,
    NARROW,
    PACKED,
    PLAIN,
    Groups,
    Weight,
    format_of,
    load_tile,
    tile_at,
)
from tritonllm.kernels.dense.widen import read_scales, widen_bytes, widen_floats4, widen_nibbles, widens_in_place
from tritonllm.kernels.runtime.checks import FLOATS, check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.float8 import require_float8
from tritonllm.kernels.runtime.registry import register_op, with_reference

LARGEST = {FP8: 448.0, INT8: 127.0, INT4: 7.0, FP4: 6.0}
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by its lower three bits
ZERO = 8  # of four bits without zero points
SMALLEST = 2.0**-100  # a group whose largest magnitude is below counts as if it were this: its scale is not 0
BY_ROW = Groups()
_BLOCK_N, _BLOCK_K = 8, 512


def _spread(scales: torch.Tensor, groups: Groups, n: int, k: int) -> torch.Tensor:
    """The scale of each element, a view of ``[n, k]`` or a copy."""
    rows = scales if groups.rows == 1 else scales.repeat_interleave(groups.rows, dim=0)[:n]
    return rows.expand(n, k) if groups.columns == 0 else rows.repeat_interleave(groups.columns, dim=1)[:, :k]


def _largest(weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The largest magnitude of each group, float32."""
    (n, k), (down, across) = weight.shape, groups.shape(*weight.shape)
    rows, columns = groups.rows, groups.columns or k
    whole = torch.nn.functional.pad(weight.abs(), (0, across * columns - k, 0, down * rows - n))
    return whole.view(down, rows, across, columns).amax((1, 3)).float()


def quantize_weight(
    weight: torch.Tensor, format: str, groups: Groups = BY_ROW, *, largest: torch.Tensor | None = None
) -> Weight:
    """A weight in a narrow format, each number rounded to the nearest; in plain torch, on the weight's device.

    Scales of ``"fp8"`` and ``"fp4"`` are powers of two: floats are as exact with these as with any, up to the smallest
    numbers of a group, and widened numbers are exact in bfloat16, so that all products of a weight have the same
    factors. ``"fp4"`` in groups of 32 columns is MXFP4.

    Args:
        weight: ``[N, K]`` float16, bfloat16 or float32.
        format: ``"fp8"`` (float8_e4m3fn, up to 448), ``"int8"`` (-127 to 127), ``"int4"`` (-7 to 7) or ``"fp4"`` (E2M1,
            up to 6); of the last two K is in whole :func:`units <unit_of>`.
        groups: what shares a scale; by default each row has one.
        largest: ``groups.shape(N, K)`` float32, the largest magnitude of each group, where the weight is a part of one;
            by default its own.

    Raises:
        ValueError: another format, groups or a K that do not fit, or numbers that are not finite.
    """
    require(format in NARROW, f"format must be one of {', '.join(NARROW)}, got {format!r}")
    check_tensor("weight", weight, (None, None))
    check_groups(groups)
    n, k = weight.shape
    check_columns("weight", format, groups, k)
    if not weight.numel():
        data = weight.new_empty(n, k // 2 if format in PACKED else k, dtype=NARROW[format])
        return Weight(data, _stored(weight.new_ones(groups.shape(n, k)).float(), format), format, groups)
    largest = _largest(weight, groups) if largest is None else largest
    check_tensor("largest", largest, groups.shape(n, k), dtype=torch.float32, like=weight)
    require(bool(torch.isfinite(largest).all()), "weight must be finite: a narrow format has no place for NaN and inf")
    scales = largest.clamp(min=SMALLEST) / LARGEST[format]
    if format in (FP8, FP4):
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    numbers = (weight.float() / _spread(scales, groups, n, k)).clamp(-LARGEST[format], LARGEST[format])
    if format == INT4:
        return Weight(pack_nibbles((numbers.round() + ZERO).to(torch.uint8), groups), scales, format, groups)
    if format == FP4:
        return Weight(pack_nibbles(e2m1_codes(numbers), groups), _stored(scales, format), format, groups)
    return Weight((numbers.round() if format == INT8 else numbers).to(NARROW[format]), scales, format, groups)


def _stored(scales: torch.Tensor, format: str) -> torch.Tensor:
    """Scales that are powers of two, float32, as the format has them."""
    return aligned(scales.to(torch.float8_e8m0fnu)) if format == FP4 else scales


def aligned(scales: torch.Tensor) -> torch.Tensor:
    """Scales of a byte ``[..., groups]``, copied so that rows begin at multiples of 8 bytes: kernels then read those of
    a tile at once."""
    *rows, count = scales.shape
    bytes_ = torch.zeros(*rows, -(-count // 8) * 8, dtype=torch.uint8, device=scales.device)[..., :count]
    return bytes_.copy_(scales.view(torch.uint8)).view(scales.dtype)


def e2m1_codes(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 of each number (float32), of two the even one, as uint8 from 0 to 15; beyond 6 that of 6."""
    sizes = numbers.abs().clamp(max=MAGNITUDES[-1])
    octave = (sizes >= 2).float() + (sizes >= 4)  # in which steps are 0.5, 1 and 2, and codes even where these are
    codes = torch.round(sizes * torch.exp2(1 - octave)) + 2 * octave
    return (codes + 8 * (numbers < 0)).to(torch.uint8)


def e2m1_values(device: torch.device) -> torch.Tensor:
    """``[16]`` float32: what the bits of a 4-bit float stand for."""
    return torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32, device=device)


def unit_of(groups: Groups) -> int:
    """The columns of a weight of four bits that are packed together (:mod:`tritonllm.kernels.dense.weight`)."""
    return columns_of_unit(groups.columns)


def pack_nibbles(numbers: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The data of a weight in the format ``"int4"`` or ``"fp4"``.

    Args:
        numbers: ``[..., K]`` uint8 from 0 to 15, K in whole :func:`units <unit_of>`.
        groups: what shares a scale.

    Returns:
        ``[..., K / 2]`` uint8.
    """
    low, high = numbers.unflatten(-1, (-1, 2, unit_of(groups) // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_nibbles(data: torch.Tensor, groups: Groups) -> torch.Tensor:
    """What :func:`pack_nibbles` has packed."""
    units = data.unflatten(-1, (-1, unit_of(groups) // 2))
    return torch.stack((units & 15, units >> 4), -2).flatten(-3)


def in_finer_groups(weight: Weight, columns: int) -> Weight:
    """The same numbers with groups of fewer columns, each with the scale and zero point of the one that it is of.

    Args:
        weight: narrow, ``[N, K]`` or of experts ``[E, N, K]``, in groups of columns.
        columns: divides ``weight.groups.columns``.
    """
    groups, count = weight.groups._replace(columns=columns), -(-weight.columns // columns)

    def of_each(parts: torch.Tensor | None) -> torch.Tensor | None:
        if parts is None:
            return None
        bits = parts.view(torch.uint8) if parts.itemsize == 1 else parts  # a GPU gathers no float8
        spread = bits.repeat_interleave(weight.groups.columns // columns, -1)[..., :count].contiguous()
        return aligned(spread.view(parts.dtype)) if weight.format == FP4 else spread

    data = weight.data
    if weight.format in PACKED:
        data = torch.empty_like(data)
        for place, one in zip(data, weight.data, strict=True):  # a matrix, or a row
            place.copy_(pack_nibbles(unpack_nibbles(one, weight.groups), groups))
    return weight._replace(data=data, scales=of_each(weight.scales), zeros=of_each(weight.zeros), groups=groups)


def check_columns(name: str, format: str, groups: Groups, k: int) -> None:
    """Check that a weight of four bits has whole units of columns, and of ``"int4"`` units of 32 or more.

    Raises:
        ValueError: it has not.
    """
    few = format == INT4 and groups.columns == 16
    require(not few, "groups.columns must be 0 (all) or 32 or more for the format 'int4'")
    fits = format not in PACKED or k % unit_of(groups) == 0
    require(fits, f"{name} must have a multiple of {unit_of(groups)} columns in the format {format!r}, got {k}")


def check_groups(groups: Groups) -> None:
    """Check that kernels take these groups.

    Raises:
        ValueError: no rows, or columns that are no power of two from 16 to 4096.
    """
    columns = groups.columns
    require(groups.rows >= 1, f"groups.rows must be 1 or more, got {groups.rows}")
    fits = columns == 0 or (16 <= columns <= 4096 and columns & (columns - 1) == 0)
    require(fits, f"groups.columns must be 0 (all) or a power of two from 16 to 4096, got {columns}")


def check_narrow(name: str, weight: Weight, k: int, x: torch.Tensor, *, stacked: bool = False) -> None:
    """Check a weight ``[N, k]`` in a narrow format, or several ``[E, N, k]`` that are ``stacked``, on the device of
    ``x``.

    Raises:
        ValueError: a shape, dtype, format or device that does not fit; float8 on a chip that cannot convert it.
    """
    require(
        weight.format in NARROW, f"{name} must be a plain or a narrow weight, got one of the format {weight.format!r}"
    )
    check_groups(weight.groups)
    check_columns(name, weight.format, weight.groups, k)
    columns = k // 2 if weight.format in PACKED else k
    wanted = ("E", "N", columns) if stacked else ("N", columns)
    check_tensor(f"{name}.data", weight.data, wanted, dtype=NARROW[weight.format], like=x)
    require(weight.scales is not None, f"{name}.scales must be there for the format {weight.format!r}")
    assert weight.scales is not None
    shape = (*weight.data.shape[:-2], *weight.groups.shape(weight.data.shape[-2], k))
    of_scales = tuple(BYTE_SCALES) if weight.format == FP4 else FLOATS
    check_tensor(f"{name}.scales", weight.scales, shape, dtype=of_scales, like=x)
    if weight.zeros is not None:
        require(weight.format == INT4, f"{name}.zeros must be None for the format {weight.format!r}")
        check_tensor(f"{name}.zeros", weight.zeros, shape, dtype=torch.uint8, like=x)
        same = weight.zeros.stride()[:-1] == weight.scales.stride()[:-1]
        require(same, f"{name}.zeros must have the strides of {name}.scales")
    if weight.row_scales is not None:
        require(weight.format == FP4, f"{name}.row_scales must be None for the format {weight.format!r}")
        check_tensor(f"{name}.row_scales", weight.row_scales, weight.data.shape[:-1], dtype=torch.float32, like=x)
    if weight.format == FP8:
        require_float8(name, x.device, "use int8")
    if weight.rounds_rows:
        fits = weight.format in (FP8, INT8) and weight.groups.columns == 0 and not stacked
        require(fits, f"{name}.rounds_rows is of a product of 'fp8' or 'int8' whose groups have all columns")


def narrow_key(weight: torch.Tensor, scaled: Scaled) -> dict[str, int | str]:
    """What of a narrow weight decides the kernel, beside its shape."""
    assert scaled.scales is not None
    return {"format": format_of(weight, scaled.scales), "group": scaled.group_columns}


@triton.jit
def _widen_kernel(
    data_ptr,  # [N, K]; [N, K / 2] if HALF
    scales_ptr,  # [N / GROUP_N, K / GROUP_K]
    zeros_ptr,  # likewise, or None
    row_scales_ptr,  # [N], or None
    out_ptr,  # [N, K]
    N,
    K,
    stride_data,
    stride_scales,
    stride_out,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,  # 0: a group has all columns
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
    SCALES: tl.constexpr,  # what bytes of scales are: of floats of four bits; None: numbers
    IN_PLACE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile."""
    wait_for_previous(PDL)
    b_row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    b_row = tl.minimum(b_row, N - 1)  # rows beyond the last are written again, with what they have
    b_byte = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    b_k = b_byte // HALF * (2 * HALF) + b_byte % HALF if HALF else b_byte
    m_k = None if EVEN_K else b_k < K
    b_bytes = load_tile(tile_at(data_ptr, b_row, b_byte, stride_data), 0, m_k, "evict_first")
    b_group = tl.minimum(b_k, K - 1) // GROUP_K if GROUP_K else 0  # both halves are of one group
    b_scale = read_scales(tl.load(tile_at(scales_ptr, b_row // GROUP_N, b_group, stride_scales)), SCALES)
    if row_scales_ptr is not None:
        b_scale *= tl.load(row_scales_ptr + b_row)[:, None]
    p_out = tile_at(out_ptr, b_row, b_k, stride_out)
    if HALF:
        if SCALES is not None:
            b_numbers, b_high = widen_floats4(b_bytes, tl.full([1, 1], 1.0, tl.float32), tl.float32, IN_PLACE)
        else:
            b_zero = tl.full([1, 1], 8.0, tl.float32)
            if zeros_ptr is not None:
                b_zero = tl.load(tile_at(zeros_ptr, b_row // GROUP_N, b_group, stride_scales)).to(tl.float32)
            b_numbers, b_high = widen_nibbles(b_bytes, b_zero, tl.float32, IN_PLACE)
        let_next_start(PDL)
        tl.store(p_out + HALF, (b_high * b_scale).to(out_ptr.dtype.element_ty), mask=m_k)
    else:
        b_numbers = widen_bytes(b_bytes, tl.float32, IN_PLACE)
        let_next_start(PDL)
    tl.store(p_out, (b_numbers * b_scale).to(out_ptr.dtype.element_ty), mask=m_k)


def _widen_reference(data: torch.Tensor, out: torch.Tensor, scaled: Scaled) -> None:
    assert scaled.scales is not None
    groups = Groups(scaled.group_rows, scaled.group_columns)
    scales = _spread(scaled.scales.float(), groups, *out.shape)
    if scaled.row_scales is not None:
        scales = scales * scaled.row_scales[:, None]
    if data.dtype != torch.uint8:
        numbers = data.float()
    elif scaled.scales.dtype in BYTE_SCALES:
        numbers = e2m1_values(data.device)[unpack_nibbles(data, groups).int()]
    elif scaled.zeros is None:
        numbers = unpack_nibbles(data, groups).float() - ZERO
    else:
        numbers = unpack_nibbles(data, groups).float() - _spread(scaled.zeros, groups, *out.shape)
    out.copy_(numbers * scales)


@register_op(mutates=("out",), reference=_widen_reference)
def _widen(data: torch.Tensor, out: torch.Tensor, scaled: Scaled) -> None:
    (n, k), (scales, kind) = out.shape, scales_for_kernel(scaled)
    if not data.numel():
        return
    assert scales is not None
    _widen_kernel[(triton.cdiv(data.shape[1], _BLOCK_K), triton.cdiv(n, _BLOCK_N))](
        *(data, scales, scaled.zeros, scaled.row_scales, out),
        *(n, k, data.stride(0), scales.stride(0), out.stride(0)),
        GROUP_N=scaled.group_rows,
        GROUP_K=scaled.group_columns,
        EVEN_K=data.shape[1] % _BLOCK_K == 0,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        HALF=half_unit(data, scaled),
        SCALES=kind,
        IN_PLACE=widens_in_place(data.device),
        num_warps=4,
        **dependent_launch(out.device),
    )


def scales_of(weight: Weight) -> Scaled:
    """What kernels take of a weight beside its numbers."""
    if weight.scales is None:
        return NOT_SCALED
    return Scaled(weight.scales, *weight.groups, weight.zeros, weight.row_scales, weight.rounds_rows)


def columns_of(data: torch.Tensor) -> int:
    """K of a weight with this data."""
    return data.shape[1] * (2 if data.dtype == torch.uint8 else 1)


def widen_numbers(data: torch.Tensor, scaled: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """:func:`widen_weight` of what is known to fit."""
    out = torch.empty(len(data), columns_of(data), dtype=dtype, device=data.device)
    _widen(data, out, *scaled)
    return out


def widen_weight(weight: Weight, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The numbers of a weight times their scales, ``[N, K]``; those of a plain weight as they are.

    Args:
        weight: in the format ``"plain"``, ``"fp8"``, ``"int8"``, ``"int4"`` or ``"fp4"``.
        dtype: float16, bfloat16 or float32, to which each is rounded.
        out: ``[N, K]`` of that dtype to write into; by default a new tensor.

    Raises:
        ValueError: a shape, dtype, format or device that does not fit.
    """
    if weight.format == PLAIN:
        return weight.data.to(dtype) if out is None else out.copy_(weight.data)
    shape = len(weight.data), weight.columns
    check_narrow("weight", weight, shape[1], weight.data)
    out = torch.empty(shape, dtype=dtype, device=weight.data.device) if out is None else out
    check_tensor("out", out, shape, dtype=dtype, like=weight.data)
    _widen(weight.data, out, *scales_of(weight))
    return out


widen_weight_ref = with_reference(widen_weight)
