"""The product of 2 to 16 rows with a matrix for Hopper, in Gluon: weights go from memory straight into the registers in
which the tensor cores take them.

With one or two rows a product is fastest that has all of its weights under way at once, in registers
(`portable/rows.py`); with more rows the ordinary arithmetic units take too long, and the tensor cores want each
thread's operands in an order of their own, for which Triton's ``dot`` sends them through shared memory. But along K
any order is right, if it is the same for both operands. Here a thread loads 16 bytes, 8 neighbours of a row, and they
are its share of two instructions; rows of ``x`` are loaded likewise. So nothing but a program's sums goes through
shared memory. A program has 8 or 16 rows of the weight (as many of gate and of up), its warps take turns along K, and
`DEPTH` turns are under way; they are asked for before the kernel before has ended (`dependent_launch`).

The norm of ``x`` is taken along: its weight multiplies ``x``, rounded to the dtype of ``x``, and the root of the mean
square, one factor for a row, the sums (FlashNorm: Graef et al., 2024). The squares are the diagonal of ``x @ x.T``, by
tensor cores too. Every sum is added up in one order: a row's result does not depend on the others.

Loads into registers are under way in the first-level cache, which is what shared memory leaves. Tiles
(`portable/tiles.py`, `invariant.py`) and attention over many keys leave little, and a kernel runs with the division
that it finds: on an H200 a layer's products take up to 1.6 times as long so. Hence the wish for a share
(``SHARED_PERCENT``), and the rule that it is taken for all products of a layer or for none (``LIGHT``).
"""

import torch
import triton
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from tritonllm.kernels.dense.arguments import Fused, Operands
from tritonllm.kernels.dense.invariant import SMALL
from tritonllm.kernels.elementwise import activate
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.cache_share import wish_for_shared_memory
from tritonllm.kernels.runtime.checks import aligned
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous

MIN_ROWS, MAX_ROWS = 2, 16
# Elements of a layer's products up to which all of them are faster so with any number of rows here. Llama-3.1-8B, which
# is above, wins with 4 rows and fewer only (docs/notebook/products.md, "2 to 16 rows").
LIGHT = 2**27
# Of the most shared memory: 100 of 228 KB. More leaves these loads less cache, less leaves attention, which is between
# the products, too little: a step of Qwen3-0.6B takes 0.875 ms so, 0.899 with 57% and 0.952 without a wish.
SHARED_PERCENT = 43
MAX_TURNS, MAX_K = 64, 2**15  # turns that are unrolled: of 8 warps at most


@constexpr_function
def _doublings(start, stop, dim):
    """``start, 2 start, ... < stop`` as steps along one of three dimensions."""
    bases, step = [], start
    while step < stop:
        bases.append([step if i == dim else 0 for i in range(3)])
        step *= 2
    return bases


@constexpr_function
def _memory_layout(warps, rows, step):
    """``[warps, rows, step]``: 8 neighbours of a row to a thread, and 32 to four threads."""
    registers = [*_doublings(1, 8, 2), *_doublings(8, rows, 1), *_doublings(32, step, 2)]
    lanes = [*_doublings(8, 32, 2), *_doublings(1, 8, 1)]
    return gl.DistributedLinearLayout(registers, lanes, _doublings(1, warps, 0), [], [warps, rows, step])


@gluon.jit
def _in_order(b):
    """``[warps, rows, step]`` along K in the order in which a thread's elements are its share of an operand."""
    WARPS: gl.constexpr = b.shape[0]
    ROWS: gl.constexpr = b.shape[1]
    STEP: gl.constexpr = b.shape[2]
    b = b.reshape([WARPS, ROWS, STEP // 32, 4, 2, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6])
    return b.reshape([WARPS, ROWS, STEP])


@gluon.jit
def _sixteen(b):
    """Make 16 rows of 8, the last 8 of them 0: the instruction has no fewer."""
    WARPS: gl.constexpr = b.shape[0]
    ROWS: gl.constexpr = b.shape[1]
    STEP: gl.constexpr = b.shape[2]
    if ROWS == 8:
        b = gl.join(b, gl.zeros_like(b)).permute([0, 3, 1, 2]).reshape([WARPS, 16, STEP])
    return b


@gluon.jit
def _places(dim: gl.constexpr, n: gl.constexpr, layout: gl.constexpr):
    """0 to n - 1 along one of three dimensions."""
    if dim == 0:
        b = gl.arange(0, n, gl.SliceLayout(1, gl.SliceLayout(2, layout))).expand_dims(1).expand_dims(2)
    elif dim == 1:
        b = gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(2, layout))).expand_dims(0).expand_dims(2)
    else:
        b = gl.arange(0, n, gl.SliceLayout(0, gl.SliceLayout(1, layout))).expand_dims(0).expand_dims(1)
    return b


@gluon.jit
def _weights(p_weight, b_k, at: gl.constexpr, K, WHOLE: gl.constexpr):
    """Load weights. Each is used once: other lines shall stay in the cache rather than these."""
    if WHOLE:
        b_weight = gl.load(p_weight + at, eviction_policy="evict_first")
    else:
        b_weight = gl.load(p_weight + at, mask=b_k + at < K, other=0.0, eviction_policy="evict_first")
    return b_weight


@gluon.jit
def _rows(p_x, m_x, b_k, at: gl.constexpr, K, WHOLE: gl.constexpr):
    return gl.load(p_x + at, mask=m_x if WHOLE else m_x & (b_k + at < K), other=0.0)


@gluon.jit
def _norms(p_norm, b_k, at: gl.constexpr, K, WHOLE: gl.constexpr):
    return gl.load(p_norm + at) if WHOLE else gl.load(p_norm + at, mask=b_k + at < K, other=0.0)


@gluon.jit
def _product(b_left, b_weight, acc, mma: gl.constexpr):
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    b_right = gl.convert_layout(_in_order(b_weight).permute([0, 2, 1]), right, assert_trivial=True)
    return mma_v2(b_left, b_right, acc)


@gluon.jit
def _add_squares(b_x, squares, mma: gl.constexpr):
    """``x @ x.T`` added, of which the diagonal is wanted."""
    b_left = gl.convert_layout(_in_order(_sixteen(b_x)), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)
    return _product(b_left, b_x, squares, mma)


@gluon.jit
def _diagonal(squares, mma: gl.constexpr):
    """``[16]``: the sums of squares of the rows, over all warps."""
    ROWS: gl.constexpr = squares.shape[2]
    b_diagonal = _places(1, 16, mma) == _places(2, ROWS, mma)
    return gl.sum(gl.sum(gl.where(b_diagonal, squares, 0.0), axis=0), axis=1)


@gluon.jit(do_not_specialize=["M"])
def linear_few_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; [2 N, K] if GATED
    bias_ptr,  # [N] or [2 N], or None
    norm_ptr,  # [K] weight of the RMS norm of x, or None
    out_ptr,  # [M, N]; read too if ADD
    M,
    N,
    K,
    eps,
    norm_offset,
    scale,
    stride_x,
    stride_weight,
    stride_out,
    ACT: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    PDL: gl.constexpr,
    EARLY: gl.constexpr,  # no kernel in flight writes the weights
    PLAIN_NORM: gl.constexpr,  # the norm's weight has the dtype of x, and no offset
    ROWS: gl.constexpr,  # 8 or 16, M or more
    WARPS: gl.constexpr,
    COLUMNS: gl.constexpr,  # of the result: 8 or 16
    STEP: gl.constexpr,  # of a warp along K: 32 or more
    DEPTH: gl.constexpr,  # turns of all warps that are under way
    TURNS: gl.constexpr,  # along K; all are unrolled, for a loop's loads would be late
    EVEN_K: gl.constexpr,  # whole turns
):
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    w_layout: gl.constexpr = _memory_layout(WARPS, COLUMNS, STEP)
    x_layout: gl.constexpr = _memory_layout(WARPS, ROWS, STEP)
    TURN: gl.constexpr = WARPS * STEP
    first = gl.program_id(0) * COLUMNS
    b_row = gl.minimum(first + _places(1, COLUMNS, w_layout), N - 1).to(gl.int64)
    b_k = _places(0, WARPS, w_layout) * STEP + _places(2, STEP, w_layout)
    p_weight = weight_ptr + b_row * stride_weight + b_k
    p_up = weight_ptr + (b_row + N) * stride_weight + b_k
    if not EARLY:
        wait_for_previous(PDL)
    weights: gl.tuple = ()
    ups: gl.tuple = ()
    for i in gl.static_range(min(DEPTH, TURNS)):
        weights += (_weights(p_weight, b_k, i * TURN, K, EVEN_K or i < TURNS - 1),)
        if GATED:
            ups += (_weights(p_up, b_k, i * TURN, K, EVEN_K or i < TURNS - 1),)
    let_next_start(PDL)
    if EARLY:
        wait_for_previous(PDL)

    out_layout: gl.constexpr = gl.SliceLayout(0, mma)
    b_n = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, out_layout))
    b_m = gl.arange(0, 16, gl.SliceLayout(1, out_layout))
    m_n = b_n < N
    p_out = out_ptr + b_m[:, None].to(gl.int64) * stride_out + b_n[None, :]
    m_out = (b_m < M)[:, None] & m_n[None, :]
    if ADD:
        b_before = gl.load(p_out, mask=m_out, other=0.0)
    b_line = _places(1, ROWS, x_layout)
    m_x = b_line < M
    b_at = _places(0, WARPS, x_layout) * STEP + _places(2, STEP, x_layout)
    p_x = x_ptr + b_line.to(gl.int64) * stride_x + b_at
    b_next = _rows(p_x, m_x, b_at, 0, K, EVEN_K or TURNS > 1)
    if norm_ptr is not None:
        p_norm = norm_ptr + b_at
        b_next_norm = _norms(p_norm, b_at, 0, K, EVEN_K or TURNS > 1)
    acc = gl.zeros([WARPS, 16, COLUMNS], gl.float32, mma)
    acc_up = acc
    squares = gl.zeros([WARPS, 16, ROWS], gl.float32, mma)
    for i in gl.static_range(TURNS):
        b_x = b_next
        if norm_ptr is not None:
            b_norm = b_next_norm
        if i + 1 < TURNS:
            b_next = _rows(p_x, m_x, b_at, (i + 1) * TURN, K, EVEN_K or i + 1 < TURNS - 1)
            if norm_ptr is not None:
                b_next_norm = _norms(p_norm, b_at, (i + 1) * TURN, K, EVEN_K or i + 1 < TURNS - 1)
        if norm_ptr is not None:
            squares = _add_squares(b_x, squares, mma)
            if PLAIN_NORM:  # the product of two numbers of 8 bits each is exact before it is rounded
                b_x = b_x * b_norm
            else:
                b_x = (b_x.to(gl.float32) * (b_norm.to(gl.float32) + norm_offset)).to(dtype)
        b_left = gl.convert_layout(_in_order(_sixteen(b_x)), left, assert_trivial=True)
        acc = _product(b_left, weights[i], acc, mma)
        if GATED:
            acc_up = _product(b_left, ups[i], acc_up, mma)
        if i + DEPTH < TURNS:
            weights += (_weights(p_weight, b_k, (i + DEPTH) * TURN, K, EVEN_K or i + DEPTH < TURNS - 1),)
            if GATED:
                ups += (_weights(p_up, b_k, (i + DEPTH) * TURN, K, EVEN_K or i + DEPTH < TURNS - 1),)

    b_y = gl.sum(acc, axis=0)
    if norm_ptr is not None:
        b_factor = gl.rsqrt(_diagonal(squares, mma) / K + eps)[:, None]
        b_y *= b_factor
    if bias_ptr is not None:
        b_y += gl.load(bias_ptr + b_n, mask=m_n, other=0.0).to(gl.float32)[None, :]
    if ACT is not None:
        b_y = activate(b_y, ACT)
    if GATED:
        b_up = gl.sum(acc_up, axis=0)
        if norm_ptr is not None:
            b_up *= b_factor
        if bias_ptr is not None:
            b_up += gl.load(bias_ptr + N + b_n, mask=m_n, other=0.0).to(gl.float32)[None, :]
        b_y *= b_up
    if ADD:
        b_y = b_before.to(gl.float32) + b_y * scale
    gl.store(p_out, b_y.to(out_ptr.dtype.element_ty), mask=m_out)


def default_config(n: int, k: int, gated: str) -> tuning.Config:
    """For ``n`` columns of the result; of 13 configurations for each product of four models.

    128 registers of a thread are weights under way. More programs than have room at once take a second round, so wide
    gated products have 16 columns each where that spares one. Of a long K more warps take turns.
    """
    if gated == "yes":
        wide = 660 < triton.cdiv(n, 8) and triton.cdiv(n, 16) <= 660
        tile = {"COLUMNS": 16, "STEP": 64} if wide else {"COLUMNS": 8, "STEP": 128}
        tile |= {"DEPTH": 4, "num_warps": 2}
    else:
        tile = {"COLUMNS": 16, "STEP": 64, "DEPTH": 8, "num_warps": 2 if n >= 4096 else 4}
    while k > MAX_TURNS * tile["num_warps"] * tile["STEP"]:
        tile["num_warps"] *= 2
    return tile


def pays(x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor | None, together: int) -> bool:
    """Whether this kernel is the fastest in a layer whose products have weights of ``together`` elements. Two rows of a
    small weight are those of `portable/rows.py`."""
    least = MIN_ROWS + 1 if weight.numel() <= SMALL else MIN_ROWS
    return least <= len(x) <= MAX_ROWS and together <= LIGHT


def fits(x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor | None, together: int) -> bool:
    """Whether it is exact enough, too: float16 has no room for a row times the norm's weight."""
    k = x.shape[1]
    if x.element_size() != 2 or (norm_weight is not None and x.dtype != torch.bfloat16):
        return False
    return 0 < k <= MAX_K and k % 16 == 0 and all(t.stride(0) % 8 == 0 for t in (x, weight)) and aligned(x, weight)


def launch(operands: Operands, fused: Fused) -> None:
    x, weight, bias, norm_weight, out, _ = operands
    (m, k), n = x.shape, out.shape[1]
    key = {"n": n, "k": k, "gated": "yes" if fused.gated else "no"}
    config = tuning.get_config("linear_few", x.device, default_config, **key)
    turn = config["num_warps"] * config["STEP"]
    kernel = linear_few_kernel[(triton.cdiv(n, config["COLUMNS"]),)](
        *(x, weight, bias, norm_weight, out, m, n, k, fused.eps, fused.norm_offset, fused.scale),
        *(x.stride(0), weight.stride(0), out.stride(0)),
        ACT=fused.activation,
        GATED=fused.gated,
        ADD=fused.add,
        EARLY=fused.constant_weight,
        PLAIN_NORM=norm_weight is not None and norm_weight.dtype == x.dtype and fused.norm_offset == 0.0,
        ROWS=8 if m <= 8 else 16,
        WARPS=config["num_warps"],
        TURNS=triton.cdiv(k, turn),
        EVEN_K=k % turn == 0,
        **config,
        **dependent_launch(x.device),
    )
    wish_for_shared_memory(kernel, SHARED_PERCENT)
