"""Ranks that split a sequence's keys: each key is somewhere, each query sees its own, the parts are the whole."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import assert_close
from support.ranks import run_ranks

from tritonllm.dist.group import Group
from tritonllm.kernels import merge_attention_states
from tritonllm.layers.attention import paged_attention
from tritonllm.layers.context import attend, exchange, with_local_keys
from tritonllm.layers.local_keys import keys_of, local_chunks, local_slots
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.segments import Segment, Segments, decodes, verified

HEADS, HEAD_SIZE = 4, 16
sizes = st.sampled_from([2, 3, 4, 8])
chunks_of = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), min_size=1, max_size=5)  # tokens, keys before


@given(size=sizes, block_size=st.integers(1, 5), blocks=st.permutations(range(6)), keys=st.integers(0, 100))
def test_each_key_is_in_one_place(size, block_size, blocks, keys):
    """A sequence's keys fill the leading slots of its blocks on each rank."""
    whole = size * block_size
    position = torch.arange(min(keys, whole * len(blocks)))
    slots = torch.tensor([*blocks, 0])[position // whole] * whole + position % whole
    held = torch.zeros(len(position), dtype=torch.int64)
    for rank in range(size):
        mine = local_slots(torch.cat((slots, torch.tensor([-1]))), rank, size)
        assert mine[-1] == -1
        here = mine[:-1] >= 0
        held += here
        index = torch.arange(int(here.sum()))
        assert mine[:-1][here].tolist() == [blocks[i // block_size] * block_size + i % block_size for i in index]
        for length in {0, len(position) // 2, len(position)}:
            assert int(keys_of(torch.tensor(length), rank, size)) == int(here[:length].sum())
    assert (held == 1).all()


@given(size=sizes, given_chunks=chunks_of)
def test_lanes_see_what_their_tokens_see(size, given_chunks):
    """Attention lets a lane's tokens see one key more from each to the next, and the last one all of ``seq_lens``."""
    counts = [count for count, _ in given_chunks]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lens = torch.tensor([sum(chunk) for chunk in given_chunks], dtype=torch.int32)
    positions = torch.cat([torch.arange(b, b + n) for n, b in given_chunks])
    tables = torch.arange(len(counts), dtype=torch.int32)[:, None]
    of_chunk = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    total = len(positions)
    for rank in range(size):
        lanes = local_chunks(tables, starts, lens, total, max(counts), range(rank, size))
        assert lanes.order[lanes.places].tolist() == list(range(total))
        begins = lanes.cu_seqlens_q.tolist()
        assert begins[-1] == total and len(begins) == size * len(counts) + 1
        for lane, (begin, end) in enumerate(itertools.pairwise(begins)):
            tokens = lanes.order[begin:end]
            assert end - begin <= lanes.longest
            assert (of_chunk[tokens] == int(lanes.block_tables[lane, 0])).all()
            seen = int(lanes.seq_lens[lane]) - torch.arange(end - begin).flip(0)
            assert seen.clamp_min(0).tolist() == keys_of(positions[tokens] + 1, rank, size).tolist()


def step_of(decoded, drafted, drafts, chunks, block_size, generator):
    """A step's metadata and positions, from the keys of its decodes and verified sequences, and its chunks; over random
    blocks of so many tokens."""
    each = 1 + drafts
    lens = [*decoded, *(n + drafts for n in drafted), *(n + before for n, before in chunks)]
    counts = [*[1] * len(decoded), *[each] * len(drafted), *(n for n, _ in chunks)]
    width = max(1, -(-max(lens) // block_size))
    tables = torch.randperm(len(lens) * width, generator=generator).int().view(len(lens), width)
    ends = torch.tensor([0, *(n for n, _ in chunks)]).cumsum(0).int()
    longest = max((n for n, _ in chunks), default=0)
    metadata = AttentionMetadata(
        segments=Segments(
            decodes(len(decoded)), verified(len(drafted), each), Segment(len(chunks), int(ends[-1]), longest)
        ),
        slot_mapping=torch.full((sum(counts),), -1),
        block_tables=tables,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        cu_seqlens_q=ends,
        verify_starts=torch.arange(len(drafted) + 1, dtype=torch.int32) * each,
        max_decode_len=max(1, *lens),
    )
    positions = [torch.arange(max(0, length - n), max(length, n)) for length, n in zip(lens, counts, strict=True)]
    return metadata, torch.cat(positions)


@given(
    decoded=st.lists(st.integers(0, 40), max_size=4),
    drafted=st.lists(st.integers(1, 40), max_size=3),
    drafts=st.integers(0, 4),
    chunks=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), max_size=3),
    block_size=st.integers(1, 5),
    size=sizes,
    softcap=st.sampled_from([0.0, 5.0]),
    seed=st.integers(0, 99),
)
def test_parts_merge_to_the_whole(decoded, drafted, drafts, chunks, block_size, size, softcap, seed):
    if not (decoded or drafted or chunks):
        return
    generator = torch.Generator().manual_seed(seed)
    metadata, positions = step_of(decoded, drafted, drafts, chunks, size * block_size, generator)
    blocks = metadata.block_tables.numel()
    k, v = torch.randn(2, blocks, size * block_size, 1, HEAD_SIZE, generator=generator)
    q = torch.randn(len(positions), HEADS, HEAD_SIZE, generator=generator)
    whole = paged_attention(q, metadata, KVCacheView(k, v), softcap=softcap)
    parts = []
    for rank in range(size):
        mine = [x.unflatten(1, (block_size, size))[:, :, rank].contiguous() for x in (k, v)]
        local = with_local_keys(metadata, positions, Group(rank, size)).local
        parts.append(attend(q, local, KVCacheView(*mine), softcap=softcap))
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    assert_close(merge_attention_states(outs[1:], lses[1:], outs[0], lses[0]), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "tokens"), [(2, 5), (3, 1), (4, 8)])
def test_each_rank_gets_its_heads(size, tokens, dtype):
    generator = torch.Generator().manual_seed(size)
    outs = torch.randn(size, tokens, size * 3, 24, generator=generator).to(dtype)
    lses = torch.randn(size, tokens, size * 3, generator=generator)
    found = run_ranks(size, lambda group: exchange(outs[group.rank], lses[group.rank], group))
    for rank, (out, lse) in enumerate(found):
        mine = slice(3 * rank, 3 * rank + 3)
        assert torch.equal(out, outs[:, :, mine]) and torch.equal(lse, lses[:, :, mine])


def test_nothing_else_of_a_step_changes():
    metadata, positions = step_of([3, 0], [], 0, [(4, 2)], 4, torch.Generator().manual_seed(0))
    split = with_local_keys(metadata, positions, Group(1, 2))
    assert dataclasses.replace(split, local=None) == metadata
