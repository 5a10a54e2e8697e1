"""Which keys of a step are a rank's, where ranks split the keys of each sequence: derived on the device, once a step.

Of r ranks, rank i has the keys at positions ``i, i + r, i + 2 r, ...`` of every sequence. A block of the pool holds
``r S`` tokens, S on each rank, so block ids and tables are the same everywhere, and slot s of the whole block becomes
slot ``s // r`` of rank ``s % r``. What is left to derive are slots, and how many keys a query sees here.

Of a sequence's first n keys rank i has ``(n + r - 1 - i) // r``. Neighbouring tokens of a prompt's chunk do not see one
more each, as attention's kernels expect of a sequence's tokens; but those that are r apart do. So a chunk is attended
to as r sequences, its lanes: lane k has the tokens k, k + r, k + 2 r, ... of the chunk.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from tritonllm.layers.segments import Segments


@dataclass(frozen=True)
class LocalChunks:
    """The prompt chunks of a step as lanes: T tokens, L lanes of all chunks, one after the other.

    Attributes:
        order: ``[T]`` int64, the token in each place.
        places: ``[T]`` int64, the place of each token.
        cu_seqlens_q: ``[L + 1]`` int32, the first place of each lane.
        seq_lens: ``[L]`` int32, keys of this rank that the last token of a lane sees. A lane may have more tokens.
        block_tables: ``[L, M]`` int32.
        longest: no lane has more tokens.
    """

    order: torch.Tensor
    places: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    longest: int


@dataclass(frozen=True)
class LocalKeys:
    """A step of T tokens, N of them decoded or verified.

    Attributes:
        slot_mapping: ``[T]`` int64, where keys and values go; -1 for those that are another rank's.
        block_tables: ``[N, M]`` int32, one row for each token.
        seq_lens: ``[N]`` int32, keys of this rank that each token sees.
        order: ``[N]`` int32, from the longest to the shortest; ``None`` if nobody has sorted them.
        longest: a bound of ``seq_lens``; ``None`` if there is none but the tables' width.
        chunks: ``None`` without chunks.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    order: torch.Tensor | None
    longest: int | None
    chunks: LocalChunks | None


def local_slots(slot_mapping: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Slots ``[T]`` int64 of whole blocks -> this rank's, -1 for another's and for none."""
    return torch.where(slot_mapping % size == rank, slot_mapping // size, -1)  # -1 // size is -1


def keys_of(lengths: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """How many of a sequence's first keys, so many, are the rank's."""
    return (lengths + (size - 1 - rank)) // size


def local_lens(
    segments: Segments, block_tables: torch.Tensor, seq_lens: torch.Tensor, positions: torch.Tensor, ranks: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables and lengths of the tokens that are decoded or verified: ``[N, M]`` and ``[N]`` int32.

    Args:
        block_tables, seq_lens, positions: the tensors of the step, as in
            :class:`~tritonllm.layers.metadata.AttentionMetadata`.
        ranks: the ranks from this one to the last: ``range(rank, size)``.
    """
    decode, verify, _ = segments
    n, size = decode.sequences, ranks.stop
    tables, lens = block_tables[:n], seq_lens[:n]
    if verify.tokens:  # each draft is a sequence of its own: what it sees here does not grow from one to the next
        each = verify.tokens // verify.sequences
        drafted = block_tables[n : n + verify.sequences].repeat_interleave(each, dim=0)
        tables = torch.cat((tables, drafted))
        lens = torch.cat((lens, positions[n : n + verify.tokens].int() + 1))
    return tables, keys_of(lens, ranks.start, size)


def local_chunks(
    tables: torch.Tensor, starts: torch.Tensor, seq_lens: torch.Tensor, tokens: int, longest: int, ranks: range
) -> LocalChunks:
    """C chunks as lanes.

    Args:
        tables: ``[C, M]`` int32.
        starts: ``[C + 1]`` int32, the first token of each; the last one is ``tokens``.
        seq_lens: ``[C]`` int32, keys of each over all ranks, its tokens included.
        tokens: how many tokens all chunks have together.
        longest: how many tokens a chunk has at most.
        ranks: the ranks from this one to the last: ``range(rank, size)``.
    """
    size, device = ranks.stop, starts.device
    counts, lane = starts[1:] - starts[:-1], torch.arange(size, dtype=torch.int32, device=device)
    each = (counts[:, None] + (size - 1 - lane)) // size  # [C, size]: tokens of each lane
    lane_starts = F.pad(each.flatten().cumsum(0), (1, 0))  # int64
    ends = (seq_lens - counts)[:, None] + lane + (each - 1) * size + 1  # behind a lane's last token
    lens = keys_of(ends, ranks.start, size).clamp_min(0)  # of a lane without tokens it is nobody's
    token = torch.arange(tokens, dtype=torch.int32, device=device)
    chunk = torch.searchsorted(starts[1:], token, right=True)
    inside = token - starts[chunk]
    places = lane_starts[chunk * size + inside % size] + inside // size
    order = torch.empty_like(places).scatter_(0, places, token.long())
    return LocalChunks(
        order=order,
        places=places,
        cu_seqlens_q=lane_starts.int(),
        seq_lens=lens.flatten(),
        block_tables=tables.repeat_interleave(size, dim=0),
        longest=-(-longest // size),
    )
