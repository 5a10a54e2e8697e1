"""Mixture of experts for one token or two: programs for some columns of one (token, expert) pair, without any grouping.

The pairs hardly share an expert, so ordering them buys nothing and costs two launches. The gated projection is one
launch over pairs, and the down projection one over tokens that adds a token's pairs in the order of its choices: no
scratch but the gated activation, the same bits in every run. Each is a matrix-vector product in float32 on the ordinary
cores that asks for all its weights at once: 76 MB for a token of Qwen3-30B-A3B, so memory bounds it. The second kernel
starts while the first drains, and has its first weights on the way when the activation arrives (`dependent_launch`).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.moe_activation import gated
from tritonllm.kernels.moe_grouping import expert_of_pairs


@triton.jit(do_not_specialize=["pairs"])
def _direct_gate_up_kernel(
    x_ptr,  # [T, N]
    w_ptr,  # [E, 2I, N]: gate rows, then up rows
    bias_ptr,  # [E, 2I] or None
    h_ptr,  # [T * TOP_K, I]; rows of pairs without an expert are not written
    ids_ptr,
    map_ptr,
    pairs,
    experts,
    num_ids,
    I,
    stride_x,
    stride_we,
    stride_w,
    stride_bias,
    stride_ids,
    N: tl.constexpr,  # so that the loop is unrolled and all its loads are in flight
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)  # only now: the next kernel reads ids and weights without waiting
    pair = tl.program_id(1)
    expert = expert_of_pairs(ids_ptr, map_ptr, pair, pairs, experts, num_ids, stride_ids, TOP_K, HAS_MAP)
    if expert < 0:
        return
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_column = column < I
    p_gate = w_ptr + expert.to(tl.int64) * stride_we + column.to(tl.int64)[:, None] * stride_w
    p_up = p_gate + tl.cast(I, tl.int64) * stride_w
    p_x = x_ptr + (pair // TOP_K).to(tl.int64) * stride_x
    b_gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.static_range(0, N, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        mask = m_column[:, None] & (k < N)[None, :]
        b_x = tl.load(p_x + k, mask=k < N, other=0.0).to(tl.float32)[None, :]
        b_gate += tl.load(p_gate + k[None, :], mask=mask, other=0.0).to(tl.float32) * b_x
        b_up += tl.load(p_up + k[None, :], mask=mask, other=0.0).to(tl.float32) * b_x
    b_gate, b_up = tl.sum(b_gate, axis=1), tl.sum(b_up, axis=1)
    if bias_ptr is not None:
        p_bias = bias_ptr + expert.to(tl.int64) * stride_bias + column
        b_gate += tl.load(p_bias, mask=m_column, other=0.0).to(tl.float32)
        b_up += tl.load(p_bias + I, mask=m_column, other=0.0).to(tl.float32)
    b_h = gated(b_gate, b_up, ACT)
    tl.store(h_ptr + pair.to(tl.int64) * I + column, b_h.to(h_ptr.dtype.element_ty), mask=m_column)


@triton.jit
def _direct_down_kernel(
    h_ptr,  # [T * TOP_K, I]
    w_ptr,  # [E, N, I]
    bias_ptr,  # [E, N] or None
    weights_ptr,  # [T, TOP_K]
    out_ptr,  # [T, N]; read too if ADD
    ids_ptr,
    map_ptr,
    scale,
    experts,
    num_ids,
    N,
    stride_we,
    stride_w,
    stride_bias,
    stride_weights,
    stride_ids,
    stride_out,
    I: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,  # tiles of weights that are loaded before the activation is there
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    STEPS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_column = column < N
    k = tl.arange(0, BLOCK_K)
    p_column = w_ptr + column.to(tl.int64)[:, None] * stride_w + k[None, :]
    p_pair = ()  # type: tuple
    here = ()  # type: tuple
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = expert_of_pairs(ids_ptr, map_ptr, pair, pair + 1, experts, num_ids, stride_ids, TOP_K, HAS_MAP)
        here += (expert >= 0,)
        p_pair += (p_column + tl.maximum(expert, 0).to(tl.int64) * stride_we,)
    early = ()  # type: tuple
    for tile in tl.static_range(min(EARLY, TOP_K * STEPS)):
        start = tile % STEPS * BLOCK_K
        mask = m_column[:, None] & (here[tile // STEPS] & (start + k < I))[None, :]
        early += (tl.load(p_pair[tile // STEPS] + start, mask=mask, other=0.0),)
    wait_for_previous(PDL)
    let_next_start(PDL)

    b_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for tile in tl.static_range(TOP_K * STEPS):
        start = tile % STEPS * BLOCK_K
        m_pair = here[tile // STEPS]
        m_k = m_pair & (start + k < I)
        if tile < EARLY:
            b_w = early[tile]
        else:
            b_w = tl.load(p_pair[tile // STEPS] + start, mask=m_column[:, None] & m_k[None, :], other=0.0)
        weight = tl.load(weights_ptr + token * stride_weights + tile // STEPS, mask=m_pair, other=0.0).to(tl.float32)
        b_h = tl.load(h_ptr + (token * TOP_K + tile // STEPS) * I + start + k, mask=m_k, other=0.0).to(tl.float32)
        b_sum += b_w.to(tl.float32) * (b_h * weight)[None, :]
    b_out = tl.sum(b_sum, axis=1)
    if bias_ptr is not None:
        for j in tl.static_range(TOP_K):
            pair = token * TOP_K + j
            expert = expert_of_pairs(ids_ptr, map_ptr, pair, pair + 1, experts, num_ids, stride_ids, TOP_K, HAS_MAP)
            weight = tl.load(weights_ptr + token * stride_weights + j, mask=here[j], other=0.0).to(tl.float32)
            p_bias = bias_ptr + tl.maximum(expert, 0).to(tl.int64) * stride_bias + column
            b_out += tl.load(p_bias, mask=m_column & here[j], other=0.0).to(tl.float32) * weight
    p_out = out_ptr + token * stride_out + column
    if ADD:
        b_out = tl.load(p_out, mask=m_column, other=0.0).to(tl.float32) + b_out * scale
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_column)


def _tile(k: int, smallest: int) -> tuning.Config:
    """A warp for a row or half a row; few steps, so that all loads are in flight and it compiles in seconds."""
    block = max(smallest, triton.next_power_of_2(triton.cdiv(k, 8)))
    warps = 2 if k <= 2048 else min(8, block // 128)
    return {"BLOCK_N": min(4, warps), "BLOCK_K": block, "num_warps": warps}


def default_up_config(pairs: int, n: int, k: int) -> tuning.Config:
    return _tile(k, 512)


def default_down_config(tokens: int, n: int, k: int) -> tuning.Config:
    """Early loads shorten the wait for the activation, but more of them than these cost registers and so programs."""
    return {**_tile(k, 256), "EARLY": 4}


def launch(
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
    add: bool,
    scale: float,
) -> None:
    """All of :func:`tritonllm.kernels.fused_moe`."""
    (tokens, top_k), (experts, n, i) = ids.shape, w_down.shape
    pairs = tokens * top_k
    h = torch.empty((pairs, i), dtype=x.dtype, device=x.device)
    map_or_ids = ids if expert_map is None else expert_map
    num_ids = experts if expert_map is None else expert_map.shape[0]
    flags = {"TOP_K": top_k, "HAS_MAP": expert_map is not None}
    config = tuning.get_config("moe_direct_up", x.device, default_up_config, pairs=pairs, n=i, k=n)
    stride_bias = 0 if gate_up_bias is None else gate_up_bias.stride(0)
    strides = (x.stride(0), *w_gate_up.stride()[:2], stride_bias, ids.stride(0))
    tiles = triton.cdiv(i, config["BLOCK_N"])
    _direct_gate_up_kernel[(tiles, pairs)](
        *(x, w_gate_up, gate_up_bias, h, ids, map_or_ids, pairs, experts, num_ids, i, *strides),
        **(flags | dependent_launch(x.device, tiles * pairs)),
        N=n,
        ACT=activation,
        **config,
    )
    config = tuning.get_config("moe_direct_down", x.device, default_down_config, tokens=tokens, n=n, k=i)
    stride_bias = 0 if down_bias is None else down_bias.stride(0)
    strides = (*w_down.stride()[:2], stride_bias, weights.stride(0), ids.stride(0), out.stride(0))
    tiles = triton.cdiv(n, config["BLOCK_N"])
    _direct_down_kernel[(tiles, tokens)](
        *(h, w_down, down_bias, weights, out, ids, map_or_ids, scale, experts, num_ids, n, *strides),
        **(flags | dependent_launch(x.device, tiles * tokens)),
        I=i,
        ADD=add,
        **config,
    )
