"""Layers that see one chunk: each token sees the keys of its chunk that are not behind it, in any step and its room."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import assert_close

from tritonllm.layers.attention import AttentionSpec, invariant_attention, paged_attention
from tritonllm.layers.attention_chunks import within_chunks
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.segments import Segment, Segments, decodes, verified

HEADS, HEAD_SIZE, KEYS = 4, 16, 40  # no sequence has more keys
drafted = st.integers(0, KEYS - 5)  # keys before a last token and up to four drafts
prompts = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), max_size=3)  # new tokens, keys before


class Steps:
    """Sequences with keys of their own in a cache of blocks in any order."""

    def __init__(self, block_size, seed):
        self.block_size, self._generator = block_size, torch.Generator().manual_seed(seed)
        self.width = -(-KEYS // block_size)
        shape = (8 * self.width + 1, block_size, 2, HEAD_SIZE)
        self.cache = KVCacheView(*(torch.randn(shape, generator=self._generator) for _ in "kv"))
        self._blocks = 1 + torch.randperm(8 * self.width, generator=self._generator).int()

    def queries(self, tokens):
        return torch.randn(tokens, HEADS, HEAD_SIZE, generator=self._generator)

    def metadata(self, alone, tried, chunks, drafts, room=0):
        """A step of decodes and verified sequences with so many keys before them, and of prompts' chunks.

        Args:
            room: how many sequences of each kind and tokens of chunks are padding, as in a captured step.
        """
        lens = [n + 1 for n in alone] + [0] * room + [n + 1 + drafts for n in tried] + [0] * room * bool(tried)
        lens += [new + before for new, before in chunks] + [0] * room
        counts = [new for new, _ in chunks] + [min(room, 1)] * room
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        verify = verified(len(tried) + room * bool(tried), 1 + drafts)
        chunk = Segment(len(counts), sum(counts), max(counts, default=0) + room)
        tables = torch.zeros(len(lens), self.width + room, dtype=torch.int32)
        real = [row for row, length in enumerate(lens) if length]
        tables[real, : self.width] = self._blocks[: len(real) * self.width].view(-1, self.width)
        return AttentionMetadata(
            segments=Segments(decodes(len(alone) + room), verify, chunk),
            slot_mapping=torch.zeros(0, dtype=torch.int64),
            block_tables=tables,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            cu_seqlens_q=starts,
            verify_starts=torch.arange(verify.sequences + 1, dtype=torch.int32) * (1 + drafts),
        )

    def expected(self, q, metadata, size):
        """Attention with a mask, one token after the other; NaN of padding."""
        decode, verify, _ = metadata.segments
        counts = [1] * decode.sequences + [verify.longest] * verify.sequences
        counts += (metadata.cu_seqlens_q[1:] - metadata.cu_seqlens_q[:-1]).tolist()
        out, token = torch.full_like(q, float("nan")), 0
        for table, length, count in zip(metadata.block_tables, metadata.seq_lens.tolist(), counts, strict=True):
            k, v = (
                cache[table.long()].flatten(0, 1).repeat_interleave(2, dim=1) for cache in (self.cache.k, self.cache.v)
            )
            for position in range(length - count, length) if length else ():
                seen = slice(position // size * size, position + 1)
                logits = torch.einsum("hd,lhd->hl", q[token], k[seen]) * HEAD_SIZE**-0.5
                out[token] = torch.einsum("hl,lhd->hd", logits.softmax(-1), v[seen])
                token += 1
            token += 0 if length else count
        return out


def attended(steps, q, metadata, size, attention=paged_attention, **bounds):
    metadata = within_chunks(dataclasses.replace(metadata, **bounds), size, steps.block_size)
    options = {} if attention is paged_attention else {"scale": None, "window": None, "softcap": 0.0, "sinks": None}
    return attention(q, metadata, steps.cache, **options, **({"alibi_slopes": None} if options else {}))


@given(
    block_size=st.sampled_from([1, 2, 4]),
    blocks=st.integers(1, 6),
    alone=st.lists(st.integers(0, KEYS - 1), max_size=2),
    tried=st.lists(drafted, max_size=2),
    chunks=prompts,
    drafts=st.integers(1, 4),
    room=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_tokens_see_their_chunk(block_size, blocks, alone, tried, chunks, drafts, room, seed):
    """Also in the room of a captured step, where sequences without keys have tokens, and batch-invariant attention."""
    steps, size = Steps(block_size, seed), block_size * blocks
    metadata = steps.metadata(alone, tried, chunks, drafts, room)
    q = steps.queries(metadata.segments.tokens)
    expected = steps.expected(q, metadata, size)
    real = ~expected[:, 0, 0].isnan()
    for bound in (None, KEYS):
        for attention in (paged_attention, invariant_attention):
            got = attended(steps, q, metadata, size, attention, max_decode_len=bound)
            assert_close(got[real], expected[real])


@given(alone=st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=3), tried=st.lists(drafted, max_size=2))
def test_sizes_follow_from_the_room(alone, tried):
    """What a captured step launches must not depend on where its sequences stand."""
    steps = Steps(2, 0)
    first = within_chunks(steps.metadata(alone, tried, [(7, 4)], 3), 6, 2)
    other = within_chunks(steps.metadata([0] * len(alone), [0] * len(tried), [(7, 0)], 3), 6, 2)
    assert first.segments == other.segments and first.segments.chunk == Segment(2, 7, 6)
    for field in ("block_tables", "seq_lens", "cu_seqlens_q", "verify_starts"):
        assert getattr(first, field).shape == getattr(other, field).shape
        assert getattr(first, field).dtype == torch.int32
    padding = within_chunks(steps.metadata([], [], [], 3, room=2), 6, 2)
    assert len(padding.seq_lens) and not padding.seq_lens.any(), "nothing is read for it"
    assert first.block_tables.shape[1] == 3 and int(first.seq_lens.max()) <= 6


def test_nodes_of_a_tree_see_their_ancestors_from_the_chunk_on():
    """A tree's nodes are of the last token's chunk, wherever their keys lie."""
    steps, size = Steps(2, 0), 6
    metadata = steps.metadata([], [4], [], 3)  # the last token is the fifth of its chunk, its first two nodes the sixth
    q = steps.queries(4)
    masks = torch.tensor([0b1, 0b11, 0b101, 0b1011], dtype=torch.int32)
    got = attended(steps, q, metadata, size, tree_mask=masks)
    whole = paged_attention(q, dataclasses.replace(metadata, tree_mask=masks), steps.cache)
    assert_close(got, whole)  # from the first chunk on
    later = steps.metadata([], [10], [], 3)
    moved = dataclasses.replace(later, block_tables=later.block_tables[:, 3:], seq_lens=later.seq_lens - 6)
    whole = paged_attention(q, dataclasses.replace(moved, tree_mask=masks), steps.cache)
    assert_close(attended(steps, q, later, size, tree_mask=masks), whole)


def test_nothing_of_nobody():
    steps = Steps(2, 0)
    metadata = steps.metadata([], [], [], 1)
    assert within_chunks(metadata, 4, 2) is metadata


@pytest.mark.parametrize("other", [{"window": 4}, {"alibi_slopes": (0.5, 0.5)}, {"causal": False}], ids=str)
def test_chunks_come_alone(other):
    with pytest.raises(
        ValueError, match=r"attention_chunk with(out causal| a window or alibi_slopes) is not supported"
    ):
        AttentionSpec(num_heads=2, num_kv_heads=2, head_size=16, attention_chunk=8, **other)
