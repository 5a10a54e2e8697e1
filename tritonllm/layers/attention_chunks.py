"""Layers that see one chunk of the sequence (Llama 4): their step, derived on the device, once for all of them.

Positions 0 to ``size - 1`` are a sequence's first chunk, the next ``size`` the second, and a token sees those keys of
its own chunk that are not behind it. So each chunk is attended to as a sequence by itself, whose blocks are those of
the whole from the chunk's first on, and whose keys are counted from there: kernels know nothing of it.

A decode lies in one chunk. The new tokens of a prompt, or a last token and its drafts, may lie in several. They become
as many sequences as that can be, most of them empty, since only the device may know where a sequence stands: what there
is follows from the room of the step alone, so captured steps have it inside. A tree of drafts lies in one chunk, as
nodes that would not are no drafts (:class:`~tritonllm.engine.drafts.draft_tree.DraftTree`).
"""

import dataclasses

import torch
from torch.nn import functional as F

from tritonllm.layers.metadata import AttentionMetadata
from tritonllm.layers.segments import Segment, Segments


def check_chunk_size(size: int, block_tokens: int) -> None:
    """Check that each chunk begins with a block.

    Raises:
        ValueError: it does not.
    """
    if size % block_tokens:
        raise ValueError(
            f"block_size={block_tokens} must divide the model's attention_chunk_size={size}, since its layers see "
            "chunks of so many tokens and each has to begin with a block: take another block_size, or a "
            f"max_model_len up to {size}"
        )


def within_chunks(metadata: AttentionMetadata, size: int, block_tokens: int) -> AttentionMetadata:
    """A step's metadata as layers read it that see one chunk. Launches only.

    Args:
        metadata: the step, whose tensors are settled.
        size: tokens of a chunk.
        block_tokens: tokens of a block.

    Raises:
        ValueError: a chunk does not begin with a block.
    """
    check_chunk_size(size, block_tokens)
    if not len(metadata.seq_lens):
        return metadata
    segments, longest = list(metadata.segments), metadata.max_decode_len
    first = metadata.cu_seqlens_q if metadata.verify_starts is None else metadata.verify_starts
    starts = [metadata.decode_starts(), first, metadata.cu_seqlens_q]
    counts = [segment.sequences for segment in segments]
    tables, lens = list(metadata.block_tables.split(counts)), list(metadata.seq_lens.split(counts))
    tree = metadata.tree_mask is not None
    # nodes of a tree may stand behind the chunk's end, where they are no drafts
    width = -(-(size + (segments[1].longest if tree else 0)) // block_tokens)
    for place, segment in enumerate(segments):
        if not segment.sequences:
            continue
        if segment.longest == 1 or (place == 1 and tree):
            begins = (lens[place] - segment.longest).clamp_min(0)[:, None] // size * size
            lens[place] = lens[place] - begins[:, 0]
        else:
            segments[place], starts[place], begins, lens[place] = _cut(segment, starts[place], lens[place], size)
        tables[place] = _tables_from(tables[place], begins // block_tokens, width)
    return dataclasses.replace(
        metadata,
        segments=Segments(*segments),
        block_tables=torch.cat([table for table in tables if len(table)]),
        seq_lens=torch.cat(lens),
        verify_starts=None if metadata.verify_starts is None else starts[1],
        cu_seqlens_q=starts[2],
        cascade=None,  # what a query sees of shared keys depends on its position
        max_decode_len=None if longest is None else min(longest, size),
    )


def _cut(
    segment: Segment, starts: torch.Tensor, lens: torch.Tensor, size: int
) -> tuple[Segment, torch.Tensor, torch.Tensor, torch.Tensor]:
    """N sequences with new tokens, cut where chunks end, into P each.

    Args:
        segment: their segment.
        starts: ``[N + 1]`` int32, the first token of each.
        lens: ``[N]`` int32, keys of each, the new tokens included; 0 for padding, which may have tokens.

    Returns:
        the segment of the ``N P`` sequences, their first tokens ``[N P + 1]`` int32, the token of the whole that each
        begins with ``[N, P]`` int32, and keys of each ``[N P]`` int32: 0 where there are no new tokens.
    """
    parts = (segment.longest + size - 2) // size + 1  # the first of these tokens may be the last of a chunk
    first = (lens - (starts[1:] - starts[:-1])).clamp_min(0)
    end = first + (starts[1:] - starts[:-1])
    begins = (first // size)[:, None] * size + torch.arange(parts, dtype=torch.int32, device=lens.device) * size
    ends = torch.minimum(begins + size, end[:, None])
    new = (ends - torch.maximum(begins, first[:, None])).clamp_min(0)
    keys = (ends - begins) * ((new > 0) & (lens > 0)[:, None])
    within = Segment(segment.sequences * parts, segment.tokens, min(segment.longest, size))
    return within, F.pad(new.flatten().cumsum(0), (1, 0)).int(), begins, keys.flatten()


def _tables_from(tables: torch.Tensor, blocks: torch.Tensor, width: int) -> torch.Tensor:
    """``tables[N, M]`` from the blocks ``[N, P]`` on: ``[N P, W]``; what would lie behind the whole is its last one."""
    each = torch.arange(min(width, tables.shape[1]), dtype=torch.int32, device=tables.device)
    places = (blocks[:, :, None] + each).clamp_max(tables.shape[1] - 1).long()
    return tables.gather(1, places.flatten(1)).view(-1, len(each))
