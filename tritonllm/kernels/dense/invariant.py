"""Products of which a row's bits depend on that row alone, not on how many rows there are.

Floating-point sums depend on their order. The kernels of :func:`tritonllm.kernels.linear` cut a sum into as many parts
as suit the number of rows, so a row alone and the same row among others differ in their last bits (He, "Defeating
Nondeterminism in LLM Inference", Thinking Machines, 2025). Here no sum is cut: each element of the result is one chain
along K, in steps of 16, in one accumulator of float32. Which tile an element lies in changes nothing of that, so tiles
may be as large as the number of rows wants: on an H200 24 tiles, from 16 x 32 elements of 4 warps to 256 x 128 of 8, of
``mma`` and of ``wgmma``, gave the same bits.

What that costs: nothing cuts a long sum of few rows for the processors that have no tile (docs/determinism.md).

Of a gated product, a tile has a gate's sums and those of its up, which never leave the registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonllm.kernels.dense import cpu
from tritonllm.kernels.dense.portable.rows import MAX_ROWS
from tritonllm.kernels.dense.weight import Weight, elements, fetch_ahead, lines_ahead
from tritonllm.kernels.elementwise import ACTIVATIONS, activate
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import aligned, check_same_dtype, check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.runtime.variants import Variant, Variants

# Rows whose gated products are faster so than by any other kernel of `linear`, also where bits may depend on the batch:
# up to 64 with any weight (but for 64 of Qwen3-0.6B's, 8% slower), up to 256 with small ones. Beyond 64 rows large ones
# take up to 1.5 times as long (docs/notebook/products.md, "Gate and up of few rows").
MIN_GATED, MAX_GATED, MAX_GATED_SMALL = 2, 64, 256
SMALL = 2**23  # elements of a weight; Qwen3-0.6B's have up to 6.3 million, Llama-3.1-8B's 17 million and more

_GROUP = tl.constexpr(8)  # tiles of rows that share their tiles of the weight in the second-level cache


@triton.jit
def _load_tile(source, stride, row, start, rows, K, BOXES: tl.constexpr, R: tl.constexpr, BLOCK_K: tl.constexpr):
    """``[R, BLOCK_K]`` of a matrix ``[rows, K]``; 0 where there is nothing."""
    if BOXES:
        b_tile = source.load([row, start])
    else:
        b_row, b_k = row + tl.arange(0, R), start + tl.arange(0, BLOCK_K)
        p_tile = source + b_row.to(tl.int64)[:, None] * stride + b_k[None, :]
        b_tile = tl.load(p_tile, mask=(b_row < rows)[:, None] & (b_k < K)[None, :], other=0.0)
    return b_tile


@triton.jit(do_not_specialize=["M"])
def _invariant_linear_kernel(
    x,  # [M, K]: a pointer, or a descriptor of boxes
    weight,  # [N, K], as x; [2 N, K] if ACT
    weight_ptr,  # the same, as a pointer
    bias_ptr,  # [N] or [2 N], or None
    out_ptr,  # [M, N]
    M,
    N,
    K,
    stride_x,
    stride_weight,
    stride_out,
    ACT: tl.constexpr,  # of the first half of the product, which then multiplies the second; or None
    BOXES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # lines of each row of the weight that are asked for before the kernel before this one ends
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    m_tiles = tl.cdiv(M, BLOCK_M)
    in_group = _GROUP * tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // in_group * _GROUP
    height = tl.minimum(m_tiles - first, _GROUP)
    row = (first + tl.program_id(0) % in_group % height) * BLOCK_M
    if BOXES:
        # The last tile ends with the last row and computes some rows twice, with the same bits: to fetch rows that are
        # not there costs more. On an H100 160 rows take 2.2 times as long so, in tiles of 128, as 256 rows.
        row = tl.minimum(row, tl.maximum(M - BLOCK_M, 0))
    column = tl.program_id(0) % in_group // height * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_up = acc
    if PDL and AHEAD:
        b_ahead = tl.minimum(column + tl.arange(0, BLOCK_N), N - 1)
        fetch_ahead(weight_ptr, b_ahead, 0, stride_weight, AHEAD)
        if ACT is not None:
            fetch_ahead(weight_ptr, N + b_ahead, 0, stride_weight, AHEAD)
    wait_for_previous(PDL)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        b_x = _load_tile(x, stride_x, row, start, M, K, BOXES, BLOCK_M, BLOCK_K)
        b_weight = _load_tile(weight, stride_weight, column, start, N, K, BOXES, BLOCK_N, BLOCK_K)
        acc = tl.dot(b_x, tl.trans(b_weight), acc, input_precision="ieee")
        if ACT is not None:
            b_weight = _load_tile(weight, stride_weight, N + column, start, 2 * N, K, BOXES, BLOCK_N, BLOCK_K)
            b_up = tl.dot(b_x, tl.trans(b_weight), b_up, input_precision="ieee")
    b_row, b_column = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    m_column = b_column < N
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + b_column, mask=m_column, other=0.0).to(tl.float32)[None, :]
    if ACT is not None:
        if bias_ptr is not None:
            b_up += tl.load(bias_ptr + N + b_column, mask=m_column, other=0.0).to(tl.float32)[None, :]
        acc = activate(acc, ACT) * b_up
    p_out = out_ptr + b_row.to(tl.int64)[:, None] * stride_out + b_column[None, :]
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=(b_row < M)[:, None] & m_column[None, :])


def _tile(block_m: int, block_n: int, block_k: int, num_warps: int, stages: int) -> tuning.Config:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": num_warps, "STAGES": stages}


def default_config(m: int, n: int, k: int, itemsize: int, arch: str, gated: str) -> tuning.Config:
    """A tile for the rows of ``x`` between half of ``m`` and ``m``, and ``n`` columns of the result; ``arch``:
    ``"sm90"`` or ``"any"``. Whatever this says, the bits are the same.

    Up to 16 rows reading the weight is all; from some hundred on tiles are as large as leave enough of them for all
    processors.
    """
    if itemsize == 4:  # exact products run on the ordinary units
        return _tile(32, 32, 32, 4, 2)
    if arch == "sm90":
        return _gated_on_hopper(m, n) if gated == "yes" else _on_hopper(m, n)
    if m <= 16:
        tile = _tile(16, 32 if n <= 4096 else 64, 128, 4, 3)
    else:
        tile = _tile(32, 64, 64, 4, 3) if m <= 64 else _tile(128, 128, 32, 8, 3)
    if gated == "yes":  # as many rows of up as of gate
        tile["BLOCK_N"] //= 2
    return tile


def _on_hopper(m: int, n: int) -> tuning.Config:
    """The launch configuration for ``m`` rows on Hopper: of up to 9 tiles for each ``m`` the one that was best on an
    H100 for the weights of Llama-3.1-8B and Qwen3-0.6B, over the numbers of rows that captured steps have. Llama's take
    0.94 to 1.03 times what cuBLAS takes for 80 to 128 rows, and 1.04 to 1.10 times for 256."""
    few, many = n < 4096, n > 16384
    if m <= 16:
        return _tile(16, 32, 256, 4, 4) if few else _tile(16, 16, 256, 4, 6) if n == 4096 else _tile(16, 64, 256, 4, 3)
    if m <= 32:
        return _tile(32, 128, 128, 4, 4) if many else _tile(32, 32, 256, 4, 4)
    if m <= 128:
        if many or (n > 4096 and m > 64):
            return _tile(64, 128, 128, 4, 4)
        return _tile(64, 32 if few else 64, 128, 4, 5)
    if m <= 256:
        if n <= 4096:
            return _tile(64, 64, 128, 4, 5) if few else _tile(64, 128, 128, 4, 4)
        return _tile(128, 256, 64, 8, 4) if many else _tile(128, 128, 64, 4, 6)
    large = triton.cdiv(m, 256) * triton.cdiv(n, 128)  # tiles; an H200 has 132 processors
    if large >= 96:
        return _tile(256, 128, 64, 8, 4)
    return _tile(128, 128, 64, 4, 4) if 2 * large >= 96 else _tile(128, 64, 64, 4, 6)


def _gated_on_hopper(m: int, n: int) -> tuning.Config:
    """As :func:`_on_hopper`. Of Llama-3.1-8B, gate and up of 80 to 256 rows take an H100 0.94 to 1.03 times as long as
    cuBLAS and the activation behind it (an H200 up to 1.3 times: ``MAX_GATED``)."""
    few = n <= 4096
    if m <= 16 or (m <= 32 and few):
        return _tile(16, 32, 256, 4, 3)
    if m <= 32:
        return _tile(32, 64, 128, 4, 4)
    if m <= 64:
        return _tile(64, 32, 128, 4, 5) if few else _tile(64, 64, 128, 4, 4)
    if m <= 128:
        return _tile(64, 64, 128, 4, 4) if few else _tile(64, 128, 64, 4, 5)
    return _tile(128, 64, 64, 4, 6) if few else _tile(128, 128, 64, 8, 4)


def _reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """The reference: on the CPU, too, a row's bits are its own (:func:`cpu.row_by_row`)."""
    wide = weight.float()
    exact = None if bias is None else bias.float()
    cpu.row_by_row(lambda rows: torch.nn.functional.linear(rows.float(), wide, exact), x, out)


def _boxes(t: torch.Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])


def _in_boxes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the copy engine can fetch them."""
    return x.element_size() == 2 and all(t.stride(0) % 8 == 0 for t in (x, weight)) and aligned(x, weight)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None = None,
    constant_weight: bool = False,
) -> None:
    (m, k), n = x.shape, out.shape[1]
    arch = INVARIANT.own_arch(x.device)
    # of a power of two: what is compiled must not change between the sizes that warm-up steps have
    key = {"m": triton.next_power_of_2(m), "n": n, "k": k, "itemsize": x.element_size(), "arch": arch}
    key["gated"] = "no" if activation is None else "yes"
    config = tuning.get_config("batch_invariant_linear", x.device, default_config, **key)
    boxes = arch != "any" and _in_boxes(x, weight)
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    _invariant_linear_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        _boxes(x, block_m, block_k) if boxes else x,
        _boxes(weight, block_n, block_k) if boxes else weight,
        *(weight, bias, out, m, n, k, x.stride(0), weight.stride(0), out.stride(0)),
        ACT=activation,
        BOXES=boxes,
        AHEAD=lines_ahead(block_n if activation is None else 2 * block_n, k, weight) if constant_weight else 0,
        **config,
        **dependent_launch(x.device),
    )


@register_op(mutates=("out",), reference=_reference)
def _batch_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if out.numel() == 0:
        return
    if x.shape[1] == 0:
        out.zero_() if bias is None else out.copy_(bias.expand_as(out))
        return
    launch(x, weight, bias, out)


def _gated_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, activation: str
) -> None:
    both = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
    _reference(x, weight, bias, both)

    def activated(rows: torch.Tensor) -> torch.Tensor:
        gate, up = rows.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    cpu.row_by_row(activated, both, out)


@register_op(mutates=("out",), reference=_gated_reference)
def _batch_invariant_gated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, activation: str
) -> None:
    if out.numel() == 0:
        return
    if x.shape[1] == 0:
        _gated_reference(x, weight, bias, out, activation)
        return
    whole = INVARIANT_GATED.own(x.device, x, weight, out)
    if whole is not None:
        whole.module.launch(x, weight, bias, out, activation)
    else:
        launch(x, weight, bias, out, activation)


def pays_gated(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a gated product of ``linear`` is faster so than by any other kernel."""
    rows, small = len(x), weight.numel() <= SMALL
    if small and (rows <= MAX_ROWS or 32 < rows <= 64):
        return False
    return MIN_GATED <= rows <= (MAX_GATED_SMALL if small else MAX_GATED)


def fits_gated(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    return x.shape[1] > 0 and _in_boxes(x, weight)


INVARIANT = Variants(
    "batch_invariant_linear",
    Variant("boxes", "dense/invariant.py", (90,)),  # tiles of its own, fetched by the copy engine if it can
    Variant("pointers", "dense/invariant.py"),
)
INVARIANT_GATED = Variants(
    "batch_invariant_linear, gated",
    Variant("gated", "dense/sm90/gated.py", (90,), "fits", "pays"),  # its sums are chains along K, too
    Variant("invariant", "dense/invariant.py"),
)


def multiply_invariantly(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """:func:`batch_invariant_linear` of matrices that are known to fit, as a layer's do; returns ``out``."""
    _batch_invariant_linear(x, weight, bias, out)
    return out


def multiply_gated_invariantly(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, out: torch.Tensor
) -> torch.Tensor:
    """``activation(gate) * up`` of ``out``'s columns each, of which a row's bits depend on that row alone; of matrices
    that are known to fit.

    Gate and up are never rounded: of many rows on Hopper they do not leave the registers.
    """
    _batch_invariant_gated_linear(x, weight, bias, out, activation)
    return out


def batch_invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Weight,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x @ weight.T + bias``, of which a row has the same bits alone and among any others.

    Sums are in float32 and rounded once, when they are stored.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32; contiguous in the last dimension.
        weight: ``[N, K]`` with the dtype of ``x``; contiguous in the last dimension. A tensor or a :class:`Weight`.
        bias: ``[N]`` with the dtype of ``x``.
        activation: one of ``ACTIVATIONS``, of the first half of the result, which then multiplies the second: a gated
            projection, ``[M, N / 2]``.
        out: ``[M, N]`` to write into, or half as wide, of any of the three dtypes; by default a new tensor with the
            dtype of ``x``. Must not overlap ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    weight = elements("weight", weight)
    check_tensor("x", x, ("M", "K"))
    check_tensor("weight", weight, ("N", x.shape[1]), like=x)
    check_same_dtype("weight", weight, "x", x)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), like=x)
        check_same_dtype("bias", bias, "x", x)
    columns = weight.shape[0]
    if activation is not None:
        require(activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        require(columns % 2 == 0, f"weight must have an even number of rows (gate and up), got {columns}")
        columns //= 2
    if out is None:
        out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device)
    check_tensor("out", out, (x.shape[0], columns), like=x)
    if activation is not None:
        return multiply_gated_invariantly(x, weight, bias, activation, out)
    return multiply_invariantly(x, weight, bias, out)


batch_invariant_linear_ref = with_reference(batch_invariant_linear)
