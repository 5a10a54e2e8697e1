"""Attention of ranks that split the keys of each sequence (decode context parallelism).

The ranks that share a key head would hold copies of the same keys. Instead each holds those of every r-th token
(:mod:`tritonllm.layers.local_keys`). In each layer all of them get the queries of all r, attend to their own keys, and
send each rank the results of its heads with the logarithms of the softmax's denominators (lse). From these follows
attention over all keys (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). Two collectives a
layer: queries are gathered, results are exchanged. (vLLM's ``decode_context_parallel_size``.)
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tritonllm.dist.group import Group
from tritonllm.kernels import merge_attention_states, paged_decode_attention, varlen_prefill_attention
from tritonllm.layers.local_keys import LocalChunks, LocalKeys, local_chunks, local_lens, local_slots
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView

WORD = 4  # bytes
ALIGNMENT = 16  # words: what goes to one rank begins at a multiple of 64 bytes, as kernels like to read it


def with_local_keys(metadata: AttentionMetadata, positions: torch.Tensor, context: Group) -> AttentionMetadata:
    """A step's metadata with what this rank has of its keys. Launches only; a captured step has them inside.

    Args:
        positions: ``[T]`` int64 of the step's tokens.
        context: the ranks that split the keys.
    """
    segments, ranks = metadata.segments, range(context.rank, context.size)
    known = segments.decode.sequences + segments.verify.sequences
    tables, lens = local_lens(segments, metadata.block_tables, metadata.seq_lens, positions, ranks)
    chunks, chunk = None, segments.chunk
    if chunk.tokens:
        mine = metadata.block_tables[known:], metadata.cu_seqlens_q, metadata.seq_lens[known:]
        chunks = local_chunks(*mine, chunk.tokens, chunk.longest, ranks)
    longest = metadata.max_decode_len
    local = LocalKeys(
        slot_mapping=local_slots(metadata.slot_mapping, context.rank, context.size),
        block_tables=tables,
        seq_lens=lens,
        order=None if segments.verify.tokens else metadata.decode_order,
        longest=None if longest is None else max(1, -(-longest // context.size)),
        chunks=chunks,
    )
    return dataclasses.replace(metadata, local=local)


def split_attention(
    q: torch.Tensor,
    keys: LocalKeys,
    kv_cache: KVCacheView,
    context: Group,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention of this rank's heads over the keys of all ranks.

    Args:
        q: ``[T, H, D]``, the queries of the step; the new keys are stored.
        kv_cache: this rank's part of the layer's cache, with the keys and values of one head.
        context: the ranks that split the keys.
        scale, softcap: as of the kernels.

    Returns:
        ``[T, H, D]``.
    """
    tokens, heads, head_size = q.shape
    everyone = context.stack(q.contiguous()).transpose(0, 1).reshape(tokens, context.size * heads, head_size)
    out, lse = attend(everyone, keys, kv_cache, scale=scale, softcap=softcap)
    parts, part_lses = exchange(out, lse, context)
    return merge_attention_states(parts[1:], part_lses[1:], parts[0], part_lses[0])


def attend(
    q: torch.Tensor, keys: LocalKeys, kv_cache: KVCacheView, **numbers: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q[T, H, D]``, of all heads -> the same and lse ``[T, H]`` float32, over this rank's keys alone; keywords as of
    :func:`split_attention`. Queries that see none of them get an lse of -inf."""
    cache, n = (kv_cache.k, kv_cache.v), len(keys.seq_lens)
    numbers = {**numbers, **kv_cache.scales, "workspace": kv_cache.workspace, "return_lse": True}
    outs, lses = [], []
    if n:
        lengths = {"order": keys.order, "max_seqlen_k": keys.longest}
        out, lse = paged_decode_attention(q[:n], *cache, keys.block_tables, keys.seq_lens, **lengths, **numbers)
        outs.append(out)
        lses.append(lse)
    if keys.chunks is not None:
        out, lse = _chunk_attention(q[n:], keys.chunks, kv_cache, numbers)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs), torch.cat(lses)


def _chunk_attention(
    q: torch.Tensor, chunks: LocalChunks, kv_cache: KVCacheView, numbers: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q[T, H, D]`` of prompt chunks -> the same and ``[T, H]``, over this rank's keys."""
    lanes = chunks.block_tables, chunks.cu_seqlens_q, chunks.seq_lens
    out, lse = varlen_prefill_attention(
        q.index_select(0, chunks.order), kv_cache.k, kv_cache.v, *lanes, max_seqlen_q=chunks.longest, **numbers
    )
    return out.index_select(0, chunks.places), lse.index_select(0, chunks.places)


def exchange(out: torch.Tensor, lse: torch.Tensor, context: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Send each rank what was computed of its heads, in one collective.

    Args:
        out: ``[T, r H, D]``, of the heads of all r ranks over this one's keys.
        lse: ``[T, r H]`` float32.

    Returns:
        ``[r, T, H, D]`` and ``[r, T, H]``, of this rank's heads over the keys of each.
    """
    size, (tokens, heads, head_size) = context.size, out.shape
    shape = size, tokens, heads // size, head_size
    words = tokens * shape[2] * head_size * out.element_size() // WORD
    row = -(-(words + tokens * shape[2]) // ALIGNMENT) * ALIGNMENT
    sent = torch.empty(size, row, dtype=torch.int32, device=out.device)
    for part, whole in zip(_parts(sent, words, shape, out.dtype), (out, lse), strict=True):
        part.copy_(whole.unflatten(1, (size, -1)).transpose(0, 1))
    return _parts(context.all_to_all(sent), words, shape, out.dtype)


def _parts(
    rows: torch.Tensor, words: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of ``rows[r, N]`` int32: results ``shape`` and, behind them, their lse."""
    size, tokens, heads, _ = shape
    out = rows[:, :words].view(dtype).view(shape)
    return out, rows[:, words : words + tokens * heads].view(torch.float32).view(size, tokens, heads)
