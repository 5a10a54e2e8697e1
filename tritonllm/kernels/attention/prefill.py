"""Prefill attention: the newest tokens of each sequence, of any number, against a cache in blocks.

``4 D`` FLOPs for each query head and visible key, so the floor is FLOPs over the matrix-product rate. Two kernels share
the work: ``portable/prefill.py`` for any GPU, ``sm90/prefill.py`` for Hopper.
"""

from typing import Any

import torch
import triton

from tritonllm.kernels.attention import cpu
from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Options, Pages, Queries
from tritonllm.kernels.attention.common import (
    check_attention,
    check_float8,
    dtype_name,
    reference_attention,
    visible_keys,
)
from tritonllm.kernels.attention.decode import DECODE, SM90_ROWS, check_workspace, sm90_config
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.runtime.variants import Variant, Variants

# The Hopper kernel's rows a tile are 128: half a tile's and fewer leave most of it empty.
SM90_MIN_ROWS = 64
# Up to so many rows (tokens times query heads; 128 tiles of 128) and tokens their keys are shared out. Powers of two:
# steps whose tokens have the same next power of two launch the same. (Of 32 heads, behind 32,768 tokens, 256 tokens
# 412 -> 235 us; 512, of which no tile is cut, 791 -> 465, since only tiles that have rows are counted.)
SPLIT_ROWS, SPLIT_TOKENS = 16384, 1024
# Up to the rows of so many tiles of the portable kernel (less than half of an H200's programs: of 128 each is whole
# already, and twice the height is faster. 512 tokens of 16 heads of 256: 28.4 us, shared out 49.6; 128 behind 1,024:
# 55.6, 34.5).
SPLIT_TILES = 64
# Keys from which its tiles are of 128 keys (16 x 1024 tokens: 341 us, with tiles of 64 keys 276; 4 x 4096: 883, 963).
SM90_LONG = 2048
# Keys up to which its loops do the last tile too (64 x 256 tokens: 119.5 us instead of 135; 16 x 1024: 292, 282).
SM90_SHORT = 512


def _decode_config(head_size: int, group: int, max_q: int, cache_dtype: str) -> tuning.Config:
    return sm90_config(head_size, max_q * group, cache_dtype)


def _sm90_config(group: int, capacity: int, logits: str, few: str) -> tuning.Config:
    """``logits``: ``"plain"``, or ``"changed"`` by options."""
    config: tuning.Config = {"kernel": "sm90", "BLOCK_M": 128, "PROGRAMS": 132, "num_warps": 4}
    if few == "split":
        return config | {"BLOCK_N": 64, "PARTS": 2, "MERGED": False, "SPLIT": 128, "num_stages": 4}
    config |= {"SPLIT": 0}
    if capacity >= SM90_LONG and logits == "plain" and 64 % group == 0:  # otherwise registers do not suffice
        return config | {"BLOCK_N": 128, "PARTS": 1, "MERGED": False, "num_stages": 2}
    return config | {"BLOCK_N": 64, "PARTS": 2, "MERGED": capacity <= SM90_SHORT, "num_stages": 4}


def _portable_config(head_size: int, group: int, max_q: int, dtype: str, few: str) -> tuning.Config:
    rows = padded_rows(max_q, group)
    if few == "split" and dtype != "float32":
        return shared_config(head_size, rows)
    config: tuning.Config = {"kernel": "portable", "SPLIT": 0}
    if dtype == "float32":  # exact products run on the ordinary units, with operands in registers
        return config | {"BLOCK_M": min(rows, 32), "BLOCK_N": 16, "num_warps": 8, "num_stages": 2}
    if head_size > 256:
        return config | {"BLOCK_M": min(rows, 32), "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    if head_size > 128:
        return config | {"BLOCK_M": min(rows, 64), "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    config |= {"BLOCK_M": min(rows, 128), "BLOCK_N": 64, "num_warps": 8 if rows > 32 else 4, "num_stages": 3}
    # Left to itself, the assembler rather spills (on sm_100) than lets one program less reside.
    return config | ({"maxnreg": 255} if head_size <= 64 else {})


def padded_rows(max_q: int, group: int) -> int:
    """(token, head) pairs of the longest sequence's new tokens, as a power of two."""
    return max(16, triton.next_power_of_2(max_q * group))


def shared_config(head_size: int, rows: int) -> tuning.Config:
    """The launch configuration of the portable kernel, where keys are shared out. (32 tokens behind 8,160 on an H200,
    16 heads of 256: 360 -> 63 us; 32 of 96: 170 -> 43; behind none 7.6 -> 8.4, and 5.3 -> 8.4.)

    Args:
        rows: as :func:`padded_rows` has them.
    """
    config: tuning.Config = {"kernel": "portable", "SPLIT": 32, "maxnreg": 255}
    config |= {"BLOCK_M": min(rows, _share_rows(head_size)), "BLOCK_N": 32 if head_size > 256 else 64}
    if head_size > 128:
        return config | {"num_warps": 8, "num_stages": 2}
    return config | {"num_warps": 8 if rows > 32 else 4, "num_stages": 3}


def _share_rows(head_size: int) -> int:
    """Rows of a tile whose keys are shared out: merging takes registers, so it is half as high as others."""
    if head_size > 256:
        return 16
    return 32 if head_size > 128 else 64


def _fits_decode(queries: Queries, pages: Pages, window: int) -> bool:
    rows = queries.max_seqlen_q * (queries.q.shape[1] // pages.k_cache.shape[2])
    fits = DECODE.named["sm90"].module.fits
    return queries.causal and rows <= SM90_ROWS and fits(queries.q, pages.k_cache, pages.v_cache)


def _fits_sm90(queries: Queries, pages: Pages, window: int) -> bool:
    """Whether there are rows enough for this kernel, which knows no window to both sides."""
    rows = padded_rows(queries.max_seqlen_q, queries.q.shape[1] // pages.k_cache.shape[2])
    one_sided, fits = queries.causal or window == 0, PREFILL.named["sm90"].module.fits
    return one_sided and rows >= SM90_MIN_ROWS and fits(queries.q, pages.k_cache, pages.v_cache)


# A key's `few` is "decode" where the rows of each sequence are so few that decode's own kernel of the chip takes them,
# "split" where all rows make so few tiles that their keys are shared out, else "no".
PREFILL = Variants(
    "varlen_prefill_attention",
    Variant("decode", "attention/sm90/decode.py", (90,), _fits_decode, lambda few: few == "decode", _decode_config),
    Variant("sm90", "attention/sm90/prefill.py", (90,), _fits_sm90, config=_sm90_config),
    Variant("portable", "attention/portable/prefill.py", config=_portable_config),
)


def _config_key(queries: Queries, pages: Pages, args: AttentionArgs) -> dict[str, Any]:
    """What a configuration depends on."""
    (q, _, max_seqlen_q, *_), (k_cache, _, block_tables, _) = queries, pages
    tokens, heads, head_size = q.shape
    group = heads // k_cache.shape[2]
    arch = PREFILL.own_arch(q.device, queries, pages, args.window)
    few = "decode" if arch != "any" and max_seqlen_q * group <= SM90_ROWS else "no"
    most = SPLIT_ROWS if arch == "sm90" else SPLIT_TILES * _share_rows(head_size)
    if few == "no" and tokens <= SPLIT_TOKENS and triton.next_power_of_2(tokens) * heads <= most:
        few = "split"
    plain = args.alibi_slopes is None and args.window == 0 and args.softcap == 0
    return {
        "head_size": head_size,
        "group": group,
        "tokens": tokens,
        "max_q": max_seqlen_q,
        "capacity": block_tables.shape[1] * k_cache.shape[1],
        "dtype": dtype_name(q),
        "cache_dtype": dtype_name(k_cache),
        "arch": arch,
        "logits": "plain" if plain else "changed",
        "few": few,
    }


def _reference(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> None:
    (q, cu_seqlens_q, _, causal, _), (k_cache, v_cache, block_tables, seq_lens) = queries, pages
    assert cu_seqlens_q is not None
    begins, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for seq, length in enumerate(lengths):
        begin, end = begins[seq : seq + 2]
        padded = triton.cdiv(length, k_cache.shape[1]) * k_cache.shape[1]
        rows = max(1, 2**27 // (q.shape[1] * max(length, 1)))  # bounds the logits' memory
        for at in range(begin, end, rows):
            tokens = slice(at, min(at + rows, end))
            query_pos = torch.arange(tokens.start, tokens.stop, device=q.device) + (length - end)
            seen = visible_keys(
                query_pos, seq_lens[seq], padded, causal=causal, window=args.window, both_sides=not causal
            )
            out, lse = reference_attention(q[tokens], k_cache, v_cache, block_tables[seq], query_pos, seen, args)
            args.out[tokens] = out.to(q.dtype)
            if args.lse is not None:
                args.lse[tokens] = lse


@register_op(mutates=("workspace", "out", "lse"), reference=_reference, cpu=cpu.prefill)
def _varlen_prefill_attention(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> None:
    check_float8(pages.k_cache)
    if len(queries.q) > 0 and len(pages.seq_lens) > 0:
        launch(queries, pages, hints, args)


def launch(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs, _: tuning.Config | None = None) -> None:
    """Look up the configuration and launch the kernel that it is for. (A configuration of verify attention says only
    that.)"""
    key = _config_key(queries, pages, args)
    config = tuning.get_config("varlen_prefill_attention", queries.q.device, PREFILL.default_config, **key)
    PREFILL.launch(config, queries, pages, hints, args)


def varlen_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of each sequence over the sequence's keys and values in blocks.

    The keys and values of the new tokens must be in the cache already. Sequences may bring any number of tokens, one
    or none included, so prefills, prefill chunks and decodes mix in one batch. How large logits may be:
    :func:`~tritonllm.kernels.paged_decode_attention`.

    Args:
        q: ``[T, H, D]``, the sequences' new tokens one after the other. Dtypes, head sizes and strides as in
            :func:`~tritonllm.kernels.paged_decode_attention`, and so for all arguments not listed here.
        cu_seqlens_q: ``[B + 1]`` int32, rising from 0: tokens ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of ``q``
            are the last of sequence b. Tokens from ``cu_seqlens_q[B]`` on are padding: what ``out`` and lse hold there
            does not change.
        seq_lens: ``[B]`` int32, keys of each sequence with its new tokens.
        max_seqlen_q: the most new tokens of a sequence, or an upper bound; chooses kernel and tile size.
        causal: a query sees no key after itself; False: all keys of its sequence. ``window`` hides keys at positions
            up to ``p - window`` in both cases, and without ``causal`` those from ``p + window`` on, too.
        out: ``[T, H, D]`` to write into, with the dtype of ``q``; by default a new tensor.
        workspace: ``[WORKSPACE_SIZE]`` int32, zeros, and zeros again afterwards: decode attention's may be shared.
            None, or one that is too short: a new one, filled by a launch of its own.

    Returns:
        ``out``, or ``(out, lse)`` with lse ``[T, H]`` float32. A query that sees no key (a sequence longer in queries
        than in keys) gets output 0.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit, or a float8 cache on a GPU without float8.
    """
    batch = _check_lengths(q, cu_seqlens_q, max_seqlen_q)
    pages = Pages(k_cache, v_cache, block_tables, seq_lens)
    options = Options(scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale)
    args = check_attention(q, pages, options, out, return_lse, batch=batch)
    check_workspace(workspace, q)
    _varlen_prefill_attention(*Queries(q, cu_seqlens_q, max_seqlen_q, causal), *pages, *Hints(workspace), *args)
    return args.out if args.lse is None else (args.out, args.lse)


varlen_prefill_attention_ref = with_reference(varlen_prefill_attention)


def _check_lengths(q: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int) -> int:
    """Check what only prefill takes, and return the number of sequences."""
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("B + 1",), dtype=torch.int32, like=q)
    require(len(cu_seqlens_q) >= 1, "cu_seqlens_q must begin with 0, got an empty tensor")
    require(max_seqlen_q >= 1 or len(q) == 0, f"max_seqlen_q must be at least 1, got {max_seqlen_q}")
    return len(cu_seqlens_q) - 1
