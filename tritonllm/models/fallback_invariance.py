"""How a model that runs through transformers is batch invariant: each token runs through it alone.

Its code is its own, and torch's operations choose their order of sums by the shapes that they get (norms and softmax on
a GPU, products everywhere; on the CPU even an exponential has other bits at the end of a tensor). With one token at a
time all shapes are always the same. What is left is attention, over as many keys as the token's sequence has, and that
has a kernel whose bits depend on the sequence alone (:mod:`tritonllm.kernels.attention.invariant`). The price is that
nothing of a batch is shared, and a step of N tokens reads the weights N times.
"""

from collections.abc import Iterator

import torch

from tritonllm.layers.metadata import AttentionMetadata
from tritonllm.layers.segments import Segments, decodes


def tokens_alone(metadata: AttentionMetadata, positions: torch.Tensor) -> Iterator[AttentionMetadata]:
    """A step's tokens, in their order, each as a decode of its own: it sees those before it, whose keys are stored by
    then. Nothing is read on the host.

    Args:
        positions: ``[T]`` int64, each token's place in its sequence.
    """
    rows = _sequences(metadata, positions.device)
    tables = metadata.block_tables.index_select(0, rows)
    lens = torch.minimum(positions + 1, metadata.seq_lens.index_select(0, rows)).int()  # in padding 0
    starts = metadata.cu_seqlens_q.new_zeros(1)
    for token in range(len(positions)):
        mine = slice(token, token + 1)
        yield AttentionMetadata(
            segments=Segments(decodes(1)),
            slot_mapping=metadata.slot_mapping[mine],
            block_tables=tables[mine],
            seq_lens=lens[mine],
            cu_seqlens_q=starts,
        )


def _sequences(metadata: AttentionMetadata, device: torch.device) -> torch.Tensor:
    """``[T]`` int64, the sequence of each token."""
    decode, verify, chunk = metadata.segments
    parts, first = [torch.arange(decode.tokens, device=device)], decode.sequences
    for segment, starts in ((verify, metadata.verify_starts), (chunk, metadata.cu_seqlens_q)):
        if segment.tokens:
            assert starts is not None  # of a segment that is there
            tokens = torch.arange(segment.tokens, device=device, dtype=starts.dtype)
            place = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
            parts.append(first + place.clamp_max(segment.sequences - 1))  # padding is of the last one
        first += segment.sequences
    return torch.cat(parts)
