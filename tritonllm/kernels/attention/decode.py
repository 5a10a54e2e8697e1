"""Decode attention: one query token per sequence against a cache in blocks.

Four kernels compute it. :mod:`tritonllm.kernels.attention.sm90.decode`, for Hopper, and
:mod:`tritonllm.kernels.attention.portable.balanced` deal the keys of the whole batch out evenly;
:mod:`tritonllm.kernels.attention.portable.split` has a program for each sequence and head, or part of it, and so has
:mod:`tritonllm.kernels.attention.portable.few`, which does with one launch. A configuration's ``kernel`` says which.
"""

import functools
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
from tritonllm.kernels.attention.portable.few import few_config, few_row_tiles
from tritonllm.kernels.attention.portable.split import split_config
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.runtime.variants import Variant, Variants

WORKSPACE_SIZE = 4096  # as many stretches of work as any configuration asks for, and a few more


def balanced_config(head_size: int, group: int, dtype: str, cache_dtype: str) -> tuning.Config:
    """``group``: rows that share keys; ``PROGRAMS``: how many, best as many as an H200's 132 processors hold at once.

    ``maxnreg``: left to itself, the assembler rather spills some registers than lets one program less reside.
    """
    rows = max(16, triton.next_power_of_2(group))
    config = {"kernel": "balanced", "maxnreg": 255}
    if dtype == "float32":  # exact products run on the ordinary units, with operands in registers
        block_n = 32 if head_size <= 64 else 16  # 32 keys of 80 elements spill on sm_100
        return config | {"BLOCK_M": 16, "BLOCK_N": block_n, "PROGRAMS": 132, "num_warps": 8, "num_stages": 2}
    most, block_n = (64, 64) if head_size <= 128 else (32, 32) if head_size <= 256 else (16, 32)
    block_m = min(rows, most)
    registers = block_m * triton.next_power_of_2(head_size) * (2 if cache_dtype.startswith("float8") else 1)
    if registers >= 8192 or block_m > 16:
        return config | {"BLOCK_M": block_m, "BLOCK_N": block_n, "PROGRAMS": 132, "num_warps": 8, "num_stages": 3}
    if cache_dtype.startswith("float8") and head_size <= 128:
        block_n = 128  # b64 x 4096: 203 us against 227
    return config | {"BLOCK_M": block_m, "BLOCK_N": block_n, "PROGRAMS": 264, "num_warps": 4, "num_stages": 3}


def sm90_config(head_size: int, group: int, cache_dtype: str, programs: int | None = None) -> tuning.Config:
    """Two programs on each processor with up to 16 rows, else one; up to 8 rows each warp works on its own.

    A few pairs are cut into as many parts as run at once, which are merged: one program a processor, with twice the
    tiles on their way, has half as many parts, and wins a sixth with 4 pairs of 8 rows. Otherwise more tiles on their
    way than needed do harm; up to 32 pairs have few tiles each, and three let more of them begin early
    (docs/notebook/decode-attention.md, "How many tiles on their way").

    Args:
        programs: pairs of sequence and key/value head, None if nobody knows.
    """
    float8 = cache_dtype.startswith("float8")
    block_m = 8 if group <= 8 else max(16, triton.next_power_of_2(group))
    config = {"kernel": "sm90", "BLOCK_M": block_m, "BLOCK_N": 128 if float8 and block_m == 8 else 64, "num_warps": 4}
    if block_m > 16:
        return config | {"PROGRAMS": 132, "num_stages": 4, "maxnreg": 248}
    if programs is not None and programs <= (4 if block_m == 8 else 8):
        if float8 and block_m == 8:  # Triton 3.9 spills 12 bytes with 200 and more, none with 168
            return config | {"PROGRAMS": 132, "num_stages": 4, "maxnreg": 168}
        return config | {"PROGRAMS": 132, "num_stages": 6 if float8 or block_m == 8 else 4, "maxnreg": 248}
    config |= {"PROGRAMS": 264, "maxnreg": 128}
    if float8:
        return config | {"num_stages": 2 if block_m == 8 and head_size == 128 else 4}
    few = block_m == 8 and programs is not None and programs <= 32
    return config | {"num_stages": 3 if few or head_size == 64 else 2}


SM90_ROWS = 32  # more leave its accumulators too few registers
FEW_PAIRS, FEW_KEYS, FEW_WORK = 64, 2560, 28_672  # of decode_short_keys: most pairs, most keys, most of both multiplied


@functools.cache
def decode_short_keys(heads: int, kv_heads: int, head_size: int, dtype: torch.dtype, sequences: int) -> int:
    """Up to how many keys decode attention of so many sequences is a matter of latency: the few kernel's, which is one
    launch with what prepares it. 0: it never is.

    The limits are where an H200 takes as long with Hopper's kernel: 2,600 keys with 8 pairs of a sequence and a tile of
    heads, some 1,000 with 32, 430 with 64 (docs/notebook/decode-attention.md, "Short or long").
    """
    group = heads // kv_heads
    if group > 16 or head_size > 256 or dtype not in (torch.bfloat16, torch.float16):
        return 0
    pairs = sequences * kv_heads * few_row_tiles(group, sequences * kv_heads)
    return 0 if pairs > FEW_PAIRS else min(FEW_KEYS, FEW_WORK // max(1, pairs))


def lengths_of(q: torch.Tensor, pages: Pages, hints: Hints, window: int) -> str:
    """``"short"`` or ``"long"``, of ``q[B, H, D]``: what the host knows, for lengths are on the device."""
    keys = hints.most_keys(pages)
    limit = decode_short_keys(q.shape[1], pages.k_cache.shape[2], q.shape[2], q.dtype, len(pages.seq_lens))
    return "short" if (min(keys, window) if window else keys) <= limit else "long"


def config_key(q: torch.Tensor, pages: Pages, max_seqlen_q: int = 1) -> dict[str, Any]:
    """What a configuration depends on, but for the lengths."""
    _, heads, head_size = q.shape
    kv_heads = pages.k_cache.shape[2]
    return {
        "head_size": head_size,
        "group": heads // kv_heads * max_seqlen_q,
        "programs": len(pages.seq_lens) * kv_heads,
        "dtype": dtype_name(q),
        "cache_dtype": dtype_name(pages.k_cache),
        "arch": DECODE.own_arch(q.device, q, pages.k_cache, pages.v_cache),
    }


def decode_config(q: torch.Tensor, pages: Pages, hints: Hints, window: int) -> tuning.Config:
    """The launch configuration for decodes ``q[B, H, D]``."""
    key = config_key(q, pages) | {"lengths": lengths_of(q, pages, hints, window)}
    return tuning.get_config("paged_decode_attention", q.device, DECODE.default_config, **key)


def check_workspace(workspace: torch.Tensor | None, like: torch.Tensor) -> None:
    if workspace is not None:
        check_tensor("workspace", workspace, ("N",), dtype=torch.int32, like=like)
        require(len(workspace) >= 1, "workspace must have at least 1 element, got none")


def check_hints(hints: Hints, q: torch.Tensor) -> None:
    check_workspace(hints.workspace, q)
    most = hints.max_seqlen_k
    require(most is None or most >= 1, f"max_seqlen_k must be at least 1 or None, got {most}")
    if hints.order is not None:
        check_tensor("order", hints.order, (len(q),), dtype=torch.int32, like=q)


def _few_pays(lengths: str) -> bool:
    return lengths == "short"


def _sm90_pays(group: int, programs: int, cache_dtype: str) -> bool:
    """Whether Hopper's kernel is the fastest: it is up to some 2,000 programs, and everywhere with a float8 cache, for
    which split has no loop of its own (docs/notebook/decode-attention.md, "Which kernel")."""
    return group <= SM90_ROWS and (programs <= 2112 or cache_dtype.startswith("float8"))


def _balanced_pays(programs: int, cache_dtype: str) -> bool:
    return 132 < programs <= 1056 or cache_dtype.startswith("float8")


# A key's `programs` are sequences times key/value heads; `lengths` are "short", as decode_short_keys says, or "long".
DECODE = Variants(
    "paged_decode_attention",
    Variant("few", "attention/portable/few.py", pays=_few_pays, config=few_config),
    Variant("sm90", "attention/sm90/decode.py", (90,), "fits", _sm90_pays, sm90_config),
    Variant("balanced", "attention/portable/balanced.py", pays=_balanced_pays, config=balanced_config),
    Variant("split", "attention/portable/split.py", config=split_config),
)


def _reference(q: torch.Tensor, pages: Pages, hints: Hints, args: AttentionArgs) -> None:
    k_cache, v_cache, block_tables, seq_lens = pages
    query_pos = (seq_lens - 1)[:, None]
    blocks = triton.cdiv(int(seq_lens.max()), k_cache.shape[1]) if len(seq_lens) else 0
    visible = visible_keys(query_pos, seq_lens, blocks * k_cache.shape[1], causal=False, window=args.window)
    out, lse = reference_attention(q[:, None], k_cache, v_cache, block_tables, query_pos, visible, args)
    args.out.copy_(out[:, 0])
    if args.lse is not None:
        args.lse.copy_(lse[:, 0])


@register_op(mutates=("workspace", "out", "lse"), reference=_reference, cpu=cpu.decode)
def _paged_decode_attention(q: torch.Tensor, pages: Pages, hints: Hints, args: AttentionArgs) -> None:
    check_float8(pages.k_cache)
    if len(q) == 0:
        return
    config = decode_config(q, pages, hints, args.window)
    DECODE.launch(config, Queries(q), pages, hints, args)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
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
    settled: bool = False,
    order: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per sequence, the last, over the sequence's keys and values in blocks.

    Logits (products times ``scale``) of float32 queries may have any size that float32 holds. Of 16-bit ones they may
    have up to 1e8, of either sign: beyond that outputs may not be finite. Log-sum-exps are float32, too: where several
    programs share a sequence's keys, those in different parts are weighed as exactly as that says, which is to a
    relative error of 1e-7 times the logit.

    Args:
        q: ``[B, H, D]`` float16, bfloat16 or float32; D a multiple of 8 from 16 to 512. May be a slice of a wider
            tensor: only the last dimension must be contiguous (here and in the caches).
        k_cache: ``[P, S, K, D]`` with the dtype of ``q`` or float8_e4m3fn; H a multiple of K, S from 1 to 256. Query
            head h reads key/value head ``h // (H / K)``.
        v_cache: as ``k_cache``.
        block_tables: ``[B, M]`` int32, the ids of each sequence's blocks. Entries of blocks that no query sees (past
            the length, before the window) are never read and may hold anything, and so may unused slots.
        seq_lens: ``[B]`` int32, keys of each sequence with the query's own; at most ``M S``. A sequence of length 0
            gets output 0.
        scale: factor of the logits; by default ``D ** -0.5``.
        window: keys that a query sees, itself included: positions ``(p - window, p]``. None: all.
        softcap: replace logits s by ``softcap * tanh(s / softcap)``; 0: do not.
        sinks: ``[H]``, a logit that joins each head's softmax without a value (it only takes weight).
        alibi_slopes: ``[H]``; ``slope * (key position - query position)`` is added to the logits, after the softcap
            (Press et al., "Train Short, Test Long", 2022).
        k_scale: what the cache's keys must be multiplied by: a number, or ``[K]`` float32.
        v_scale: what the cache's values must be multiplied by: a number, or ``[K]`` float32.
        out: ``[B, H, D]`` to write into, with the dtype of ``q``; by default a new tensor.
        return_lse: also return the logarithm of the softmax's denominator.
        workspace: ``[WORKSPACE_SIZE]`` int32, zeros, and zeros again afterwards, so that all launches on one stream may
            share it. None: a new one, filled by a launch of its own.
        settled: no kernel that may still run writes ``block_tables``, ``seq_lens``, or any key or value but the last of
            each sequence (true while a model is served): they are read before the kernel before this one ends.
        order: ``[B]`` int32, the sequences from the longest to the shortest (any permutation is right). Given it, where
            there are some sequences a processor of unequal lengths, Hopper's kernel shares them out whole.
        max_seqlen_k: keys of the longest sequence, as far as the host knows; None: all that ``block_tables`` has room
            for. Few and short sequences have a kernel of their own. (Any number is right; a good one is fast.)

    Returns:
        ``out``, or ``(out, lse)`` with lse ``[B, H]`` float32: natural, sinks included, -inf for an empty sum.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit, or a float8 cache on a GPU without float8.
    """
    pages, hints = Pages(k_cache, v_cache, block_tables, seq_lens), Hints(workspace, settled, order, max_seqlen_k)
    options = Options(scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale)
    args = check_attention(q, pages, options, out, return_lse, batch=len(q))
    check_hints(hints, q)
    _paged_decode_attention(q, *pages, *hints, *args)
    return args.out if args.lse is None else (args.out, args.lse)


paged_decode_attention_ref = with_reference(paged_decode_attention)
