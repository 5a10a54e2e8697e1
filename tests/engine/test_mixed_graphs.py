"""What a captured step with prompt tokens computes, without a GPU: graphs that run the captured step again."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine import mixed_graphs
from tritonllm.engine.batch import HostBatch, upload_batch
from tritonllm.engine.mixed_graphs import MixedGraphs, decode_sizes
from tritonllm.layers.attention import paged_attention
from tritonllm.layers.metadata import KVCacheView

CPU, BLOCK, WIDTH, SEATS = torch.device("cpu"), 4, 6, 10
LAST_TOKENS = torch.arange(SEATS + 1) + 30


class Model:
    """One layer of attention whose queries are the input ids' rows of a table; remembers its calls."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(50, 2, 16, generator=generator)
        self.cache = KVCacheView(*torch.randn(2, 100, BLOCK, 1, 16, generator=generator))
        self.calls = []

    def __call__(self, input_ids, positions, metadata, seats):
        n = metadata.num_decodes
        ids = input_ids.clone()
        ids[:n] = torch.where(ids[:n] < 0, LAST_TOKENS[seats].int(), ids[:n])
        attended = paged_attention(self.table[ids.long()], metadata, self.cache)
        hidden = attended.flatten(1) + positions[:, None]
        self.calls.append((input_ids, positions, metadata, seats, hidden))
        return hidden


@pytest.fixture(scope="module")
def graphs():
    """With room for 2, 5 or 10 decodes and for 8 or 20 tokens of at most three chunks."""
    model = Model()

    class Graph:
        def replay(self):
            *inputs, hidden = self.step
            hidden.copy_(model(*inputs))

    @contextmanager
    def capture(graph, pool):
        yield
        graph.step = model.calls[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", capture)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(mixed_graphs, "TOKENS", (8, 20, 100))  # the last is more than a sequence may have
        patch.setattr(mixed_graphs, "CHUNKS", 4)
        patch.setattr(mixed_graphs, "decode_sizes", lambda seats: [2, 5, seats])
        yield MixedGraphs(model, SEATS, 1000, WIDTH, BLOCK, CPU), model


def batch_of(decodes, chunks, seed=0):
    """Decodes of these lengths (negative: the token is in flight) and chunks of (cached, new) tokens."""
    rng = np.random.default_rng(seed)
    spans = [(abs(length) - 1, 1) for length in decodes] + list(chunks)
    width = max(-(-(start + count) // BLOCK) for start, count in spans)
    positions = np.concatenate([np.arange(start, start + count) for start, count in spans])
    ids = rng.integers(0, 50, len(positions)).astype(np.int32)
    ids[: len(decodes)][np.array(decodes, dtype=int) < 0] = -1
    none = np.zeros(len(decodes))
    return HostBatch(
        input_ids=ids,
        positions=positions,
        slot_mapping=np.arange(len(positions)) + 7,
        block_tables=rng.permutation(100)[: len(spans) * width].reshape(len(spans), width).astype(np.int32),
        seq_lens=np.array([start + count for start, count in spans], dtype=np.int32),
        cu_seqlens_q=np.cumsum([0, *(count for _, count in chunks)]).astype(np.int32),
        logit_rows=none,
        seats=rng.permutation(SEATS)[: len(decodes)],
        **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seeds", "steps"), none),
        num_decodes=len(decodes),
        max_seqlen_q=max((count for _, count in chunks), default=0),
        cascade=None,
        sampled=[],
        plain=True,
    )


@given(
    decodes=st.lists(st.integers(-20, 20).filter(bool), max_size=SEATS),
    chunks=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_replays_equal_steps_without_graphs(graphs, decodes, chunks, seed):
    captured, model = graphs
    batch = batch_of(decodes, chunks, seed)
    room = captured.room_for(batch)
    if sum(count for _, count in chunks) > 20:
        assert room is None
        return
    hidden = captured.run(batch, room).clone()
    ids, positions, metadata, *_, padded = model.calls[-1]
    assert (metadata.num_decodes, len(ids)) == (room[0], sum(room))
    used = [*range(len(decodes)), *range(room[0], room[0] + len(positions[room[0] :]))][: len(batch.input_ids)]
    assert sorted(metadata.slot_mapping[metadata.slot_mapping >= 0].tolist()) == batch.slot_mapping.tolist()
    assert metadata.slot_mapping[used].tolist() == batch.slot_mapping.tolist()
    assert padded.isfinite().all()
    eager = upload_batch(batch, CPU)
    seats = torch.from_numpy(batch.seats)
    torch.testing.assert_close(hidden, model(eager.input_ids, eager.positions, eager.metadata, seats))


def test_what_has_no_room(graphs):
    captured, _ = graphs
    assert captured.room_for(batch_of([3], [(0, 8)])) == (2, 8)
    assert captured.room_for(batch_of([3] * 3, [(0, 9)])) == (5, 20)
    assert captured.room_for(batch_of([3], [(0, 2)] * 4)) is None  # as many chunks as there is room for, and padding
    assert captured.room_for(batch_of([3], [])) is None


@pytest.mark.parametrize(("seats", "sizes"), [(1, [1]), (8, [8]), (9, [8, 9]), (256, [8, 64, 256])])
def test_decode_sizes(seats, sizes):
    assert decode_sizes(seats) == sizes
