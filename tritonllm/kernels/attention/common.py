"""What decode and prefill attention share: argument checks, the softmax of kernels, and that of the reference.

Kernels keep logits in base 2: exp2 is one instruction.
"""

import math

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.arguments import AttentionArgs, Options, Pages, Scales
from tritonllm.kernels.elementwise import tanh_series
from tritonllm.kernels.runtime.checks import FLOATS, check_same_dtype, check_tensor, require
from tritonllm.kernels.runtime.float8 import require_float8

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# The running maximum of a row that has seen no key: finite, so that no difference of two maxima is NaN.
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def soft_cap(b_s, cap):
    """``cap tanh(s / cap)`` to a few float32 roundings, for any cap: of logits base 2, with the cap base 2 as well.

    Far from 0 that is ``cap - 2 cap / (e^2z + 1)`` with z = s / cap. Near 0 it would be as wrong as a rounding of the
    cap (0.06 with a cap of 1e6), so there the series takes over. Also called from Gluon.
    """
    b_z = b_s * (1.0 / cap)
    b_z2 = b_z * b_z
    b_far = cap - 2.0 * cap / (tl.exp2(b_z * (2.0 * LOG2E)) + 1.0)
    return tl.where(b_z2 < 0.16, b_s + b_s * tanh_series(b_z2), b_far)


@triton.jit
def row_offsets(b_token, b_head, stride_token, stride_head):
    """Where rows of queries or outputs lie, in 64 bits: heads may be 2^31 elements apart too. Also called from Gluon.

    The assumption, that no stride is negative, saves the register that holds a sign (Hopper's prefill has none left).
    """
    tl.assume(stride_head >= 0)
    return b_token * stride_token + b_head.to(tl.int64) * stride_head


@triton.jit
def start_softmax(sink_ptr, b_head, m_row, BLOCK_M: tl.constexpr):
    """The (maximum, sum) of rows that have seen no key: only the head's sink, if ``sink_ptr`` is not None."""
    if sink_ptr is not None:
        b_sink = tl.load(sink_ptr + b_head, mask=m_row, other=float("-inf")).to(tl.float32) * LOG2E
        b_m = tl.maximum(b_sink, LOWEST)
        b_l = tl.where(b_sink == float("-inf"), 0.0, 1.0)  # 2^(sink - maximum), of which no product is contracted
    else:
        b_m = tl.full([BLOCK_M], LOWEST, tl.float32)
        b_l = tl.zeros([BLOCK_M], tl.float32)
    return b_m, b_l


@triton.jit
def softmax_divisor(b_m, b_l):
    """What to divide by, and the logarithm of the denominator, base 2: (1, -inf) where nothing was seen."""
    b_divisor = tl.where(b_l == 0.0, 1.0, b_l)
    return b_divisor, tl.where(b_l == 0.0, float("-inf"), b_m + tl.log2(b_divisor))


@triton.jit
def finish_softmax(b_acc, b_m, b_l):
    """The normalized output and the logarithm of the denominator, base 2; (0, -inf) for a row that saw nothing."""
    b_divisor, b_lse = softmax_divisor(b_m, b_l)
    return b_acc / b_divisor[:, None], b_lse


# Of caches: e4m3 with scales, e5m2 without. Queries have 16 or 32 bits.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHE_ORDER = "the cache is [blocks, block_size, kv_heads, head_size]"


def check_caches(
    k_cache: torch.Tensor, v_cache: torch.Tensor, kv_heads: int | str, head_size: int | str, *, like: torch.Tensor
) -> None:
    """Check that both caches are ``[P, S, K, D]`` of one dtype on the device of ``like``, with S from 1 to 256."""
    if isinstance(k_cache, torch.Tensor) and k_cache.dim() == 4 and isinstance(kv_heads, int):
        require(
            k_cache.shape[1] != kv_heads or k_cache.shape[2] == kv_heads,
            f"k_cache has shape {list(k_cache.shape)}, with its {kv_heads} heads before its slots: {CACHE_ORDER}",
        )
    check_tensor("k_cache", k_cache, ("P", "S", kv_heads, head_size), dtype=(*FLOATS, *FLOAT8), like=like)
    check_tensor("v_cache", v_cache, k_cache.shape, dtype=k_cache.dtype, like=like)
    require(
        1 <= k_cache.shape[1] <= 256,
        f"k_cache must have blocks of 1 to 256 slots, got {k_cache.shape[1]}: {CACHE_ORDER}",
    )


def check_head_size(name: str, head_size: int) -> None:
    require(
        16 <= head_size <= 512 and head_size % 8 == 0,
        f"{name} must have a head size that is a multiple of 8 from 16 to 512, got {head_size}",
    )


def check_cache_dtype(k_cache: torch.Tensor, name: str, x: torch.Tensor) -> None:
    if k_cache.dtype not in FLOAT8:
        check_same_dtype("k_cache (unless it is float8)", k_cache, name, x)


def check_float8(k_cache: torch.Tensor) -> None:
    """Raise if the cache is e4m3 on a GPU that cannot convert it. (e5m2 is the upper half of a float16 everywhere.)"""
    if k_cache.dtype == torch.float8_e4m3fn:
        require_float8("k_cache", k_cache.device, "use a cache of torch.float8_e5m2 or of the model's dtype")


def check_positive(name: str, number: float) -> None:
    # Dynamo makes a variable of a number that changes (Gemma 2's softcap): it can be compared, but has no `isfinite`
    # and no text
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {number}")


def _split_scale(
    name: str, scale: float | torch.Tensor | None, heads: int, like: torch.Tensor
) -> tuple[torch.Tensor | None, float]:
    if isinstance(scale, torch.Tensor):
        check_tensor(name, scale, (heads,), dtype=torch.float32, like=like)
        return scale, 1.0
    if scale is None:
        return None, 1.0
    check_positive(name, scale)
    return None, float(scale)


def check_scales(
    k_scale: float | torch.Tensor | None, v_scale: float | torch.Tensor | None, heads: int, like: torch.Tensor
) -> Scales:
    """Check the caches' scales: each None, a positive number, or a float32 tensor with one per key/value head."""
    k_scale, k_factor = _split_scale("k_scale", k_scale, heads, like)
    v_scale, v_factor = _split_scale("v_scale", v_scale, heads, like)
    return Scales(k_scale, v_scale, k_factor, v_factor)


def check_attention(
    q: torch.Tensor, pages: Pages, options: Options, out: torch.Tensor | None, return_lse: bool, *, batch: int
) -> AttentionArgs:
    """Check the arguments that both attention operations take, and allocate the outputs.

    Raises:
        ValueError: a wrong shape, dtype, device or number; the message names the argument.
    """
    k_cache, v_cache, block_tables, seq_lens = pages
    check_tensor("q", q, ("T", "H", "D"))
    rows, heads, head_size = q.shape
    check_head_size("q", head_size)
    check_caches(k_cache, v_cache, "K", head_size, like=q)
    check_cache_dtype(k_cache, "q", q)
    kv_heads = k_cache.shape[2]
    require(
        kv_heads > 0 and heads > 0 and heads % kv_heads == 0,
        f"q must have a multiple of k_cache's {kv_heads} heads, got {heads}: {CACHE_ORDER}",
    )
    check_sequences(block_tables, seq_lens, batch, like=q)
    if out is None:
        out = torch.empty((rows, heads, head_size), dtype=q.dtype, device=q.device)
    check_tensor("out", out, q.shape, dtype=q.dtype, like=q)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device) if return_lse else None
    return check_options(options, heads, kv_heads, out, lse)


def check_sequences(block_tables: torch.Tensor, seq_lens: torch.Tensor, batch: int, *, like: torch.Tensor) -> None:
    check_tensor("seq_lens", seq_lens, (batch,), dtype=torch.int32, like=like)
    check_tensor("block_tables", block_tables, (batch, "M"), dtype=torch.int32, like=like)


def check_options(
    options: Options, heads: int, kv_heads: int, out: torch.Tensor, lse: torch.Tensor | None
) -> AttentionArgs:
    """Check what a layer asks of attention; with the outputs, as operators take it. ``out`` has heads of its size."""
    scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale = options
    scale = out.shape[-1] ** -0.5 if scale is None else scale
    check_positive("scale", scale)
    require(window is None or window >= 1, f"window must be None or at least 1 (the current key), got {window}")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")
    for name, t in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if t is not None:
            check_tensor(name, t, (heads,), dtype=FLOATS, like=out)
    scales = check_scales(k_scale, v_scale, kv_heads, out)
    return AttentionArgs(
        *(out, lse, sinks, alibi_slopes, scales.k_scale, scales.v_scale),
        *(scale * scales.k_factor, scales.v_factor, window or 0, float(softcap)),
    )


def dtype_name(t: torch.Tensor) -> str:
    """``"bfloat16"``: a dtype as the tuning tables spell it."""
    return str(t.dtype).removeprefix("torch.")


def as_movable(cache: torch.Tensor) -> torch.Tensor:
    """The cache, as bytes if it is float8: few operations know that dtype, and moving it needs no arithmetic."""
    return cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache


def visible_keys(
    query_pos: torch.Tensor, seq_lens: torch.Tensor, length: int, *, causal: bool, window: int, both_sides: bool = False
) -> torch.Tensor:
    """Which of ``length`` keys the queries at ``query_pos [..., N]`` see: ``[..., N, length]``; ``seq_lens [...]``. A
    window hides keys before it, and those behind it too if it has ``both_sides``."""
    key = torch.arange(length, device=query_pos.device)
    visible = key < seq_lens[..., None, None]
    if causal:
        visible = visible & (key <= query_pos[..., None])
    if window:
        visible = visible & (key > query_pos[..., None] - window)
        if both_sides:
            visible = visible & (key < query_pos[..., None] + window)
    return visible.expand(*query_pos.shape, length)


def gather_tokens(cache: torch.Tensor, block_tables: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Sequences' keys or values in order, ``[..., K, L, D]`` float32; 0 where ``seen [..., L]`` is False."""
    size, (kv_heads, head_size) = cache.shape[1], cache.shape[2:]
    in_blocks = seen.unflatten(-1, (seen.shape[-1] // size, size)).any(-1)
    blocks = block_tables[..., : in_blocks.shape[-1]].masked_fill(~in_blocks, 0)
    # index_select and index_fill_ copy whole rows: on the CPU several times as fast as indexing and masked_fill.
    x = as_movable(cache).index_select(0, blocks.flatten()).view(cache.dtype).float()
    x.view(-1, kv_heads * head_size).index_fill_(0, (~seen).flatten().nonzero().flatten(), 0.0)
    return x.view(*seen.shape, kv_heads, head_size).transpose(-3, -2).contiguous()


def reference_attention(
    q: torch.Tensor,  # [..., N, H, D]
    k_cache: torch.Tensor,  # [P, S, K, D]
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,  # [..., M]
    query_pos: torch.Tensor,  # [..., N]
    visible: torch.Tensor,  # [..., N, L] bool, L a multiple of S
    args: AttentionArgs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float32: ``(out [..., N, H, D], lse [..., N, H])``."""
    kv_heads = k_cache.shape[2]
    seen = visible.any(-2)
    k = gather_tokens(k_cache, block_tables, seen)
    v = gather_tokens(v_cache, block_tables, seen)
    grouped = q.float().unflatten(-2, (kv_heads, -1)).movedim(-4, -2)  # [..., K, G, N, D]
    logits = grouped.flatten(-3, -2) @ k.transpose(-1, -2) * args.scale
    logits = logits.unflatten(-2, grouped.shape[-3:-1])  # [..., K, G, N, L]
    if args.k_scale is not None:
        logits = logits * args.k_scale[:, None, None, None]
    if args.softcap:
        logits = args.softcap * torch.tanh(logits / args.softcap)
    if args.alibi_slopes is not None:
        distance = torch.arange(visible.shape[-1], device=q.device) - query_pos[..., None]  # [..., N, L]
        logits = logits + args.alibi_slopes.float().view(kv_heads, -1, 1, 1) * distance[..., None, None, :, :]
    logits = logits.masked_fill(~visible[..., None, None, :, :], -math.inf)
    logits = torch.nn.functional.pad(logits, (0, 1), value=-math.inf)  # a last column for the sink
    if args.sinks is not None:
        logits[..., -1] = args.sinks.float().view(kv_heads, -1, 1)
    peak = logits.amax(-1, keepdim=True)
    peak.masked_fill_(peak == -math.inf, 0.0)
    weights = logits.sub_(peak).mul_(1 / math.log(2)).exp2_()  # exp2: exp takes 6 times as long for -inf on a CPU
    total = weights.sum(-1, keepdim=True)
    lse = (peak + total.log()).squeeze(-1)  # [..., K, G, N]
    out = (weights[..., :-1].flatten(-3, -2) @ v).view_as(grouped) / total.masked_fill(total == 0, 1.0) * args.v_factor
    if args.v_scale is not None:
        out = out * args.v_scale[:, None, None, None]
    return out.movedim(-2, -4).flatten(-3, -2), lse.movedim(-1, -3).flatten(-2)
