"""Mixture of experts, second half: the experts' gated MLPs as two grouped matrix products.

Pairs (token, expert) are ordered by expert (:mod:`tritonllm.kernels.moe_grouping`), and a program takes a block of
pairs of one expert. The first product reads the tokens' rows through that order and applies the gate in its epilogue,
so the ``[T, k, 2I]`` projection never reaches memory; the second multiplies by the routing weight; a last kernel adds
the ``k`` rows of a token in float32, in the order of the choices, so results do not depend on timing.

The floor is reading the weights of the experts that were hit (``3 I N`` elements each; all 128 experts of 768 x 2048
in bfloat16 are 1.2 GB, 250 us at 4.8 TB/s) or, from some hundred tokens an expert, ``6 T k I N`` operations. The gated
activation and the weighted rows are rounded to the dtype of ``x``; all sums are float32. Biases join in the epilogues.
Grouped products over sorted tokens: Gale et al., "MegaBlocks" (2022).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.activation import activate, gelu_and_mul_ref, silu_and_mul_ref
from tritonllm.kernels.checks import check_same_dtype, check_tensor, require
from tritonllm.kernels.moe_grouping import ExpertBlocks, expert_of_pairs, group_by_expert
from tritonllm.kernels.moe_tiles import default_down_config, default_gate_up_config
from tritonllm.kernels.registry import register_op

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")

# GPT-OSS: "gpt-oss-120b & gpt-oss-20b Model Card" (2025), and `swiglu` in the reference implementation beside it.
SWIGLU_ALPHA = tl.constexpr(1.702)  # x * sigmoid(1.702 x) is close to gelu(x)
SWIGLU_LIMIT = tl.constexpr(7.0)


@triton.jit
def _gated(b_gate, b_up, ACT: tl.constexpr):
    """The gated activation of float32 blocks."""
    if ACT == "swigluoai":
        # comparisons, because tl.minimum and tl.clamp would turn NaN into the limit
        b_gate = tl.where(b_gate > SWIGLU_LIMIT, SWIGLU_LIMIT, b_gate)
        b_up = tl.where(b_up > SWIGLU_LIMIT, SWIGLU_LIMIT, b_up)
        b_up = tl.where(b_up < -SWIGLU_LIMIT, -SWIGLU_LIMIT, b_up)
        b_h = b_gate * tl.sigmoid(SWIGLU_ALPHA * b_gate) * (b_up + 1.0)
    else:
        b_h = activate(b_gate, ACT) * b_up
    return b_h


@triton.jit
def _tile(num_blocks, n_tiles, GROUP_M: tl.constexpr):
    """(block of pairs, tile of columns) of this program: GROUP_M blocks share a tile of weights in L2."""
    pid = tl.program_id(0)
    group = pid // (GROUP_M * n_tiles)
    size = tl.minimum(num_blocks - group * GROUP_M, GROUP_M)
    within = pid % (GROUP_M * n_tiles)
    return group * GROUP_M + within % size, within // size


@triton.jit
def _product(
    p_a,  # [BLOCK_M, 1] rows of the left operand
    p_b,  # [BLOCK_N, 1] rows of the right operand, which is transposed
    m_a,
    m_b,
    K,
    FULL_K: tl.constexpr,  # BLOCK_K divides K: no columns to mask
    BLOCK_K: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)[None, :]
    b_sum = tl.zeros([p_a.shape[0], p_b.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        if FULL_K:
            b_a = tl.load(p_a + start + k, mask=m_a, other=0.0)
            b_b = tl.load(p_b + start + k, mask=m_b, other=0.0)
        else:
            b_a = tl.load(p_a + start + k, mask=m_a & (k < K - start), other=0.0)
            b_b = tl.load(p_b + start + k, mask=m_b & (k < K - start), other=0.0)
        b_sum = tl.dot(b_a, b_b.T, b_sum, input_precision="ieee")
    return b_sum


@triton.jit(do_not_specialize=["num_blocks"])
def _gate_up_kernel(
    x_ptr,  # [T, N]
    w_ptr,  # [E, 2I, N]: gate rows, then up rows
    bias_ptr,  # [E, 2I] or None
    h_ptr,  # [T * TOP_K, I], rows in the order of the experts
    order_ptr,
    table_ptr,
    I,
    N,
    num_blocks,
    n_tiles,
    stride_x,
    stride_we,
    stride_w,
    stride_bias,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    FULL_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of weights: half of them gate, half up
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    block, n_tile = _tile(num_blocks, n_tiles, GROUP_M)
    rows = tl.load(table_ptr + 2 * num_blocks + block)
    if rows == 0:
        return
    expert = tl.load(table_ptr + block).to(tl.int64)
    first = tl.load(table_ptr + num_blocks + block).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    m_row = row < rows
    token = tl.load(order_ptr + first + row, mask=m_row, other=0).to(tl.int64) // TOP_K
    HALF: tl.constexpr = BLOCK_N // 2
    w_row = tl.arange(0, BLOCK_N)
    w_column = n_tile * HALF + w_row % HALF
    p_w = w_ptr + expert * stride_we + (w_column + w_row // HALF * I).to(tl.int64) * stride_w
    p_x = x_ptr + token * stride_x
    b_both = _product(p_x[:, None], p_w[:, None], m_row[:, None], (w_column < I)[:, None], N, FULL_K, BLOCK_K)
    # a thread holds whole rows of the product, so gate and up are taken apart in registers
    b_gate, b_up = tl.split(tl.permute(tl.reshape(b_both, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    column = n_tile * HALF + tl.arange(0, HALF)
    m_column = column < I
    if bias_ptr is not None:
        p_bias = bias_ptr + expert * stride_bias + column
        b_gate += tl.load(p_bias, mask=m_column, other=0.0).to(tl.float32)[None, :]
        b_up += tl.load(p_bias + I, mask=m_column, other=0.0).to(tl.float32)[None, :]
    b_h = _gated(b_gate, b_up, ACT)
    p_h = h_ptr + (first + row)[:, None] * I + column[None, :]
    tl.store(p_h, b_h.to(h_ptr.dtype.element_ty), mask=m_row[:, None] & m_column[None, :])


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    h_ptr,  # [T * TOP_K, I], rows in the order of the experts
    w_ptr,  # [E, N, I]
    bias_ptr,  # [E, N] or None
    weights_ptr,  # [T, TOP_K]
    y_ptr,  # [T, TOP_K, N]
    order_ptr,
    table_ptr,
    N,
    I,
    num_blocks,
    n_tiles,
    stride_we,
    stride_w,
    stride_bias,
    stride_weights,
    TOP_K: tl.constexpr,
    FULL_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    block, n_tile = _tile(num_blocks, n_tiles, GROUP_M)
    rows = tl.load(table_ptr + 2 * num_blocks + block)
    if rows == 0:
        return
    expert = tl.load(table_ptr + block).to(tl.int64)
    first = tl.load(table_ptr + num_blocks + block).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    m_row = row < rows
    column = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_column = column < N
    p_h = h_ptr + (first + row) * I
    p_w = w_ptr + expert * stride_we + column.to(tl.int64) * stride_w
    b_y = _product(p_h[:, None], p_w[:, None], m_row[:, None], m_column[:, None], I, FULL_K, BLOCK_K)
    if bias_ptr is not None:
        b_y += tl.load(bias_ptr + expert * stride_bias + column, mask=m_column, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order_ptr + first + row, mask=m_row, other=0).to(tl.int64)
    b_weight = tl.load(weights_ptr + pair // TOP_K * stride_weights + pair % TOP_K, mask=m_row, other=0.0)
    b_y *= b_weight.to(tl.float32)[:, None]
    p_y = y_ptr + pair[:, None] * N + column[None, :]
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_row[:, None] & m_column[None, :])


@triton.jit
def _sum_kernel(
    y_ptr,  # [T, TOP_K, N]
    ids_ptr,
    map_ptr,
    out_ptr,  # [T, N]
    N,
    experts,
    num_ids,
    stride_ids,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = column < N
    b_sum = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        # a pair without an expert here was never written
        here = expert_of_pairs(ids_ptr, map_ptr, pair, pair + 1, experts, num_ids, stride_ids, TOP_K, HAS_MAP) >= 0
        b_sum += tl.load(y_ptr + pair * N + column, mask=m_column & here, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + column, b_sum.to(out_ptr.dtype.element_ty), mask=m_column)


def _gated_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return silu_and_mul_ref(gate_up)
    if activation == "swigluoai":
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=SWIGLU_LIMIT.value), up.clamp(-SWIGLU_LIMIT.value, SWIGLU_LIMIT.value)
        return gate * (SWIGLU_ALPHA.value * gate).sigmoid() * (up + 1)
    return gelu_and_mul_ref(gate_up, approximate="tanh" if activation == "gelu_tanh" else "none")


def _reference(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
) -> None:
    experts = w_gate_up.shape[0]
    local = ids
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        local = expert_map[ids.where(known, 0)].where(known, -1)
    y = x.new_zeros((*ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in local.unique().tolist():
        if 0 <= expert < experts:
            token, choice = (local == expert).nonzero(as_tuple=True)
            gate_up = x[token].float() @ w_gate_up[expert].float().T
            if gate_up_bias is not None:
                gate_up += gate_up_bias[expert]
            row = _gated_reference(gate_up, activation) @ w_down[expert].float().T
            if down_bias is not None:
                row += down_bias[expert]
            y[token, choice] = row * weights[token, choice, None]
    out.copy_(y.sum(1))


def _launch_products(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    weights: torch.Tensor,
    y: torch.Tensor,
    blocks: ExpertBlocks,
    up: tuning.Config,
    down: tuning.Config,
    activation: str,
) -> None:
    """Write the weighted row of each pair that has an expert to ``y [T, k, N]``."""
    n, i = w_down.shape[1:]
    order, table, block_m = blocks
    num_blocks = table.shape[1]
    h = torch.empty((weights.numel(), i), dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(i, up["BLOCK_N"] // 2)
    stride_bias = 0 if gate_up_bias is None else gate_up_bias.stride(0)
    strides = (x.stride(0), w_gate_up.stride(0), w_gate_up.stride(1), stride_bias)
    flags = {"TOP_K": weights.shape[1], "ACT": activation, "FULL_K": n % up["BLOCK_K"] == 0}
    _gate_up_kernel[(num_blocks * tiles,)](
        x, w_gate_up, gate_up_bias, h, order, table, i, n, num_blocks, tiles, *strides, **flags, **up
    )
    tiles = triton.cdiv(n, down["BLOCK_N"])
    stride_bias = 0 if down_bias is None else down_bias.stride(0)
    strides = (w_down.stride(0), w_down.stride(1), stride_bias, weights.stride(0))
    flags = {"TOP_K": weights.shape[1], "BLOCK_M": block_m, "FULL_K": i % down["BLOCK_K"] == 0}
    _down_kernel[(num_blocks * tiles,)](
        h, w_down, down_bias, weights, y, order, table, n, i, num_blocks, tiles, *strides, **flags, **down
    )


@register_op(mutates=("out",), reference=_reference)
def _fused_moe(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
) -> None:
    tokens, top_k = ids.shape
    if tokens == 0:
        return
    experts, n, i = w_down.shape
    num_ids = experts if expert_map is None else expert_map.shape[0]
    # experts elsewhere take their share of the pairs
    key = {"pairs": tokens * top_k, "experts": num_ids, "itemsize": x.element_size()}
    up = tuning.get_config("moe_gate_up", x.device, default_gate_up_config, n=i, k=n, activation=activation, **key)
    block_m = up["BLOCK_M"]
    down = tuning.get_config("moe_down", x.device, default_down_config, n=n, k=i, block_m=block_m, **key)
    blocks = group_by_expert(ids, experts, block_m, expert_map)
    y = torch.empty((tokens, top_k, n), dtype=x.dtype, device=x.device)
    _launch_products(x, w_gate_up, w_down, gate_up_bias, down_bias, weights, y, blocks, up, down, activation)
    block = min(1024, triton.next_power_of_2(n))
    map_or_ids = ids if expert_map is None else expert_map
    flags = {"TOP_K": top_k, "HAS_MAP": expert_map is not None, "BLOCK": block, "num_warps": max(1, block // 256)}
    _sum_kernel[(tokens, triton.cdiv(n, block))](y, ids, map_or_ids, out, n, experts, num_ids, ids.stride(0), **flags)


def _check(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    expert_map: torch.Tensor | None,
) -> None:
    require(activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    check_tensor("x", x, ("T", "N"))
    tokens, n = x.shape
    check_tensor("w_down", w_down, ("E", n, "I"), like=x)
    experts, _, i = w_down.shape
    check_tensor("w_gate_up", w_gate_up, (experts, 2 * i, n), like=x)
    check_same_dtype("w_gate_up", w_gate_up, "x", x)
    check_same_dtype("w_down", w_down, "x", x)
    require(w_down.numel() > 0, f"w_down must not be empty, got shape {list(w_down.shape)}")
    if gate_up_bias is not None:
        check_tensor("gate_up_bias", gate_up_bias, (experts, 2 * i), like=x)
    if down_bias is not None:
        check_tensor("down_bias", down_bias, (experts, n), like=x)
    check_tensor("ids", ids, (tokens, "k"), dtype=(torch.int32, torch.int64), like=x)
    require(ids.shape[1] > 0, "ids must have at least one expert for each token, got none")
    require(ids.numel() < 2**31, f"ids must have fewer than 2^31 elements, got {ids.numel()}; split the tokens")
    check_tensor("weights", weights, ids.shape, like=x)
    if expert_map is not None:
        check_tensor("expert_map", expert_map, ("experts",), dtype=torch.int32, like=x)


def fused_moe(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum over each token's experts of ``(act(x @ gate.T) * (x @ up.T)) @ down.T``, biases included.

    Only the weights of experts that were hit are read. An id out of range has no expert and adds nothing, so padding
    tokens may carry -1.

    Args:
        x: ``[T, N]`` float16, bfloat16 or float32; contiguous in the last dimension, as all arguments.
        w_gate_up: ``[E, 2I, N]`` of the dtype of ``x``: the gate projection's rows, then the up projection's.
        w_down: ``[E, N, I]`` of the dtype of ``x``.
        weights: ``[T, k]`` of a float dtype, usually from :func:`moe_route`.
        ids: ``[T, k]`` int32 or int64 experts of each token.
        activation: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, or ``"swigluoai"`` (GPT-OSS): with the gate limited
            to at most 7 and up to -7 to 7, ``gate * sigmoid(1.702 * gate) * (up + 1)``.
        gate_up_bias: ``[E, 2I]`` of a float dtype, in the order of ``w_gate_up``.
        down_bias: ``[E, N]`` of a float dtype; the routing weight multiplies it too.
        expert_map: ``[E_global]`` int32 from an id to one of the ``E`` experts here, or -1 for one that lives elsewhere
            and adds nothing here (expert parallelism); by default ids are experts.

    Returns:
        ``[T, N]`` of the dtype of ``x``. The same input gives the same bits.

    Raises:
        ValueError: a wrong shape, dtype or device, or another activation.
    """
    _check(x, w_gate_up, w_down, weights, ids, gate_up_bias, down_bias, activation, expert_map)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _fused_moe(x, w_gate_up, w_down, weights, ids, gate_up_bias, down_bias, expert_map, out, activation)
    return out


def fused_moe_ref(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`fused_moe` in plain torch: one pair of products for each expert that was hit, in float32."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _reference(x, w_gate_up, w_down, weights, ids, gate_up_bias, down_bias, expert_map, out, activation)
    return out
