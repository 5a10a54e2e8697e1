"""Mixture of experts for one token or two: programs for some columns of one (token, expert) pair, without any grouping.

The pairs hardly share an expert, so ordering them buys nothing and costs two launches. The gated projection is one
launch over pairs, and the down projection one over tokens that adds a token's pairs in the order of its choices: no
scratch but the gated activation, the same bits in every run. Each is a matrix-vector product in float32 on the ordinary
cores that asks for all its weights at once: 76 MB for a token of Qwen3-30B-A3B, so memory bounds it. The second kernel
starts while the first drains, and has its first weights on the way when the activation arrives (`dependent_launch`).

Given logits, each program chooses the experts itself, which takes it less than a launch that does it for all. Every row
of a tile loads its input for itself: in the shape of the weights nothing has to move between threads.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dense import load_tile, tile_at
from tritonllm.kernels.elementwise import gated
from tritonllm.kernels.moe.arguments import ExpertChoice, Experts, Result, map_size
from tritonllm.kernels.moe.grouping import expert_of_pairs
from tritonllm.kernels.moe.route import choose_experts, weigh_experts
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import MAX_PROGRAMS, dependent_launch, let_next_start, wait_for_previous


class Routing(NamedTuple):
    """How a token's experts are chosen, as in :func:`tritonllm.kernels.moe_route`.

    Attributes:
        logits: ``[T, E]``.
        bias: ``[E]`` or None.
        scale: multiplies the weights.
        top_k: experts a token.
        constants: the constants that :func:`tritonllm.kernels.moe.route.routing_constants` gives.
    """

    logits: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    top_k: int
    constants: tuple[bool | int, ...]


@triton.jit
def _load_step(p_weight, here, step: tl.constexpr, k, K: tl.constexpr):
    """Weights ``[BLOCK_N, BLOCK_K]`` of one step along K, zeros unless ``here`` (``None``: needed in any case).

    Each is used once: other lines shall stay in the cache rather than these.
    """
    BLOCK_K: tl.constexpr = k.shape[1]
    if here is None and (step + 1) * BLOCK_K <= K:
        b_w = load_tile(p_weight, step * BLOCK_K, None, "evict_first")
    else:
        m_k = step * BLOCK_K + k < K
        mask = m_k if here is None else m_k & here
        b_w = load_tile(p_weight, step * BLOCK_K, mask, "evict_first")
    return b_w


@triton.jit
def _where_first(m_one, b_x):
    """The element of the first row of ``b_x`` where ``m_one`` is true; rows of ``m_one`` are equal."""
    return tl.sum(tl.where(m_one & (tl.arange(0, m_one.shape[0])[:, None] == 0), b_x, 0))


@triton.jit(do_not_specialize=["pairs"])
def _direct_gate_up_kernel(
    x_ptr,  # [T, N]
    w_ptr,  # [E, 2I, N]: gate rows, then up rows
    bias_ptr,  # [E, 2I] or None
    h_ptr,  # [T * TOP_K, I]; rows of pairs without an expert are not written
    weights_ptr,  # [T, TOP_K], or if ROUTING float logits [T, E]
    ids_ptr,  # [T, TOP_K]
    map_ptr,
    correction_ptr,  # [E] or None
    routing_scale,
    pairs,
    experts,
    num_ids,
    I,
    stride_x,
    stride_we,
    stride_w,
    stride_bias,
    stride_weights,
    stride_ids,
    N: tl.constexpr,  # so that the loop is unrolled
    TOP_K: tl.constexpr,
    MAP_ROWS: tl.constexpr,
    ROUTING: tl.constexpr,  # None: ids and weights are given
    COPIES: tl.constexpr,  # of the logits: one for each warp
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,  # steps whose weights are asked for before any is used
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)  # only now: the next kernel reads ids and weights without waiting
    pair = tl.program_id(1)
    token = (pair // TOP_K).to(tl.int64)
    if ROUTING is None:
        expert = expert_of_pairs(ids_ptr, map_ptr, pair, pairs, experts, num_ids, stride_ids, TOP_K, MAP_ROWS)
        if expert < 0:
            return
    else:
        p_logits = weights_ptr + token * stride_weights + tl.zeros([COPIES, 1], tl.int32)
        b_expert, b_logits, b_rank = choose_experts(p_logits, pair < pairs, correction_ptr, TOP_K, ROUTING)
        expert = _where_first(b_rank == pair % TOP_K, b_expert)
    STEPS: tl.constexpr = (N + BLOCK_K - 1) // BLOCK_K
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_column = column < I
    k = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], (BLOCK_N, BLOCK_K))
    # a column beyond the last reads that one again: no mask, which would be an instruction for each load
    p_gate = tile_at(w_ptr + expert.to(tl.int64) * stride_we, tl.minimum(column, I - 1), k, stride_w)
    p_up = p_gate + tl.cast(I, tl.int64) * stride_w
    ahead = ()  # type: tuple
    for step in tl.static_range(min(AHEAD, STEPS)):
        ahead += (_load_step(p_gate, None, step, k, N), _load_step(p_up, None, step, k, N))
    if AHEAD > 0:
        tl.debug_barrier()  # otherwise the assembler puts most loads off until their sums
    p_x = x_ptr + token * stride_x + k
    b_gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        m_k = step * BLOCK_K + k < N
        b_x = tl.load(p_x + step * BLOCK_K, mask=m_k, other=0.0).to(tl.float32)
        if step < AHEAD:
            b_w_gate, b_w_up = ahead[2 * step], ahead[2 * step + 1]
        else:
            b_w_gate, b_w_up = _load_step(p_gate, None, step, k, N), _load_step(p_up, None, step, k, N)
        b_gate += b_w_gate.to(tl.float32) * b_x
        b_up += b_w_up.to(tl.float32) * b_x
    b_gate, b_up = tl.sum(b_gate, axis=1), tl.sum(b_up, axis=1)
    if bias_ptr is not None:
        p_bias = bias_ptr + expert.to(tl.int64) * stride_bias + column
        b_gate += tl.load(p_bias, mask=m_column, other=0.0).to(tl.float32)
        b_up += tl.load(p_bias + I, mask=m_column, other=0.0).to(tl.float32)
    # here, where a pair has few columns: it would be a multiplication for each weight of the second product
    if ROUTING is None:
        weight = tl.load(weights_ptr + token * stride_weights + pair % TOP_K).to(tl.float32)
    else:
        b_weights = weigh_experts(b_logits, b_rank, routing_scale, TOP_K, ROUTING)
        weight = _where_first(b_rank == pair % TOP_K, b_weights)
    b_h = gated(b_gate, b_up, ACT) * weight
    tl.store(h_ptr + pair.to(tl.int64) * I + column, b_h.to(h_ptr.dtype.element_ty), mask=m_column)


@triton.jit
def _direct_down_kernel(
    h_ptr,  # [T * TOP_K, I], times the pairs' weights
    w_ptr,  # [E, N, I]
    bias_ptr,  # [E, N] or None
    weights_ptr,  # [T, TOP_K], or if ROUTING float logits [T, E]
    out_ptr,  # [T, N]; read too if ADD
    ids_ptr,
    map_ptr,
    correction_ptr,
    routing_scale,
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
    MAP_ROWS: tl.constexpr,
    ROUTING: tl.constexpr,
    COPIES: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,  # tiles of weights that are loaded before the activation is there
    AHEAD: tl.constexpr,  # those that are asked for before any is used
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    STEPS: tl.constexpr = (I + BLOCK_K - 1) // BLOCK_K
    TILES: tl.constexpr = TOP_K * STEPS
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_column = column < N
    k = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], (BLOCK_N, BLOCK_K))
    p_column = tile_at(w_ptr, tl.minimum(column, N - 1), k, stride_w)
    chosen = ()  # type: tuple
    p_pair = ()  # type: tuple
    here = ()  # type: tuple
    if ROUTING is not None:
        p_logits = weights_ptr + token * stride_weights + tl.zeros([COPIES, 1], tl.int32)
        b_expert, b_logits, b_rank = choose_experts(p_logits, token >= 0, correction_ptr, TOP_K, ROUTING)
    for j in tl.static_range(TOP_K):
        if ROUTING is None:
            pair = token * TOP_K + j
            expert = expert_of_pairs(ids_ptr, map_ptr, pair, pair + 1, experts, num_ids, stride_ids, TOP_K, MAP_ROWS)
        else:
            expert = _where_first(b_rank == j, b_expert)
        here += (expert >= 0,)
        chosen += (tl.maximum(expert, 0).to(tl.int64),)
        p_pair += (p_column + chosen[j] * stride_we,)
    ahead = ()  # type: tuple
    for tile in tl.static_range(min(EARLY, TILES)):
        ahead += (_load_step(p_pair[tile // STEPS], here[tile // STEPS], tile % STEPS, k, I),)
    wait_for_previous(PDL)
    let_next_start(PDL)
    for tile in tl.static_range(min(EARLY, TILES), min(AHEAD, TILES)):
        ahead += (_load_step(p_pair[tile // STEPS], here[tile // STEPS], tile % STEPS, k, I),)
    if AHEAD > EARLY:
        tl.debug_barrier()  # otherwise the assembler puts most loads off until their sums

    p_out = out_ptr + token * stride_out + column
    if ADD:
        b_before = tl.load(p_out, mask=m_column, other=0.0).to(tl.float32)
    b_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for tile in tl.static_range(TILES):
        if tile < max(EARLY, AHEAD):
            b_w = ahead[tile]
        else:
            b_w = _load_step(p_pair[tile // STEPS], here[tile // STEPS], tile % STEPS, k, I)
        column_h = tile % STEPS * BLOCK_K + k
        p_h = h_ptr + (token * TOP_K + tile // STEPS) * I + column_h
        b_h = tl.load(p_h, mask=here[tile // STEPS] & (column_h < I), other=0.0)
        b_sum += b_w.to(tl.float32) * b_h.to(tl.float32)
    b_out = tl.sum(b_sum, axis=1)
    if bias_ptr is not None:
        if ROUTING is not None:
            b_weights = weigh_experts(b_logits, b_rank, routing_scale, TOP_K, ROUTING)
        for j in tl.static_range(TOP_K):
            if ROUTING is None:
                weight = tl.load(weights_ptr + token * stride_weights + j, mask=here[j], other=0.0).to(tl.float32)
            else:
                weight = _where_first(b_rank == j, b_weights)
            p_bias = bias_ptr + chosen[j] * stride_bias + column
            b_out += tl.load(p_bias, mask=m_column & here[j], other=0.0).to(tl.float32) * weight
    if ADD:
        b_out = b_before + b_out * scale
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_column)


def _tile(k: int) -> tuning.Config:
    """The launch configuration for ``k`` columns: at most 8 steps, of 8 elements a thread, so that a row of bfloat16 is
    32 registers, and rows share no thread."""
    block = max(256, triton.next_power_of_2(triton.cdiv(k, 8)))
    warps = 2 if block == 256 else max(8, block // 256)
    return {"BLOCK_N": warps * 256 // block, "BLOCK_K": block, "num_warps": warps}


def default_up_config(pairs: int, n: int, k: int, chooses: str) -> tuning.Config:
    """Tiles of 512 columns where programs choose the experts (a layer of Qwen3-30B-A3B: 42.6 us, 44.2 with 256).

    Programs of twice as many rows where they would be too many to start early: two tokens 37.7 us instead of 40.5.
    """
    if k <= 2048 and chooses == "yes":
        return {"BLOCK_N": 2, "BLOCK_K": 512, "num_warps": 2, "AHEAD": 4}
    tile = _tile(k)
    if k <= 2048 and n * pairs > MAX_PROGRAMS * tile["BLOCK_N"]:
        tile |= {"BLOCK_N": 2 * tile["BLOCK_N"], "num_warps": 2 * tile["num_warps"]}
    return {**tile, "AHEAD": 8}


def default_down_config(tokens: int, n: int, k: int, chooses: str) -> tuning.Config:
    """Early loads shorten the wait for the activation, but more of them than these cost registers and so programs."""
    return {**_tile(k), **({"EARLY": 8, "AHEAD": 0} if k <= 2048 else {"EARLY": 4, "AHEAD": 16})}


def launch(x: torch.Tensor, experts: Experts, choice: ExpertChoice | Routing, result: Result) -> None:
    """Launch all of :func:`tritonllm.kernels.fused_moe`, or with a routing, of
    :func:`tritonllm.kernels.moe_from_logits`."""
    w_gate_up, w_down, gate_up_bias, down_bias, activation = experts[:5]
    out, add, scale, *_ = result
    tokens, (count, n, i) = len(x), w_down.shape
    chooses = "yes" if isinstance(choice, Routing) else "no"
    if isinstance(choice, Routing):
        top_k, map_rows, num_ids, routing = choice.top_k, 0, count, choice.constants
        weights = ids = map_or_ids = choice.logits
        correction, routing_scale = choice.bias, choice.scale
    else:
        weights, ids, expert_map = choice
        top_k, routing, correction, routing_scale = ids.shape[1], None, None, 1.0
        map_or_ids = ids if expert_map is None else expert_map
        map_rows, num_ids = map_size(expert_map, count)
    pairs = tokens * top_k
    h = torch.empty((pairs, i), dtype=x.dtype, device=x.device)
    flags = {"TOP_K": top_k, "MAP_ROWS": map_rows, "ROUTING": routing}
    config = tuning.get_config("moe_direct_up", x.device, default_up_config, pairs=pairs, n=i, k=n, chooses=chooses)
    stride_bias = 0 if gate_up_bias is None else gate_up_bias.stride(0)
    strides = (x.stride(0), *w_gate_up.stride()[:2], stride_bias, weights.stride(0), ids.stride(0))
    tiles = triton.cdiv(i, config["BLOCK_N"])
    _direct_gate_up_kernel[(tiles, pairs)](
        *(x, w_gate_up, gate_up_bias, h, weights, ids, map_or_ids, correction, routing_scale),
        *(pairs, count, num_ids, i, *strides),
        **(flags | dependent_launch(x.device, tiles * pairs)),
        N=n,
        COPIES=config["num_warps"],
        ACT=activation,
        **config,
    )
    key: dict[str, int | str] = {"tokens": tokens, "n": n, "k": i, "chooses": chooses}
    config = tuning.get_config("moe_direct_down", x.device, default_down_config, **key)
    stride_bias = 0 if down_bias is None else down_bias.stride(0)
    strides = (*w_down.stride()[:2], stride_bias, weights.stride(0), ids.stride(0), out.stride(0))
    tiles = triton.cdiv(n, config["BLOCK_N"])
    _direct_down_kernel[(tiles, tokens)](
        *(h, w_down, down_bias, weights, out, ids, map_or_ids, correction, routing_scale, scale),
        *(count, num_ids, n, *strides),
        **(flags | dependent_launch(x.device, tiles * tokens)),
        I=i,
        COPIES=config["num_warps"],
        ADD=add,
        **config,
    )
