"""What a captured step with prompt tokens computes, without a GPU: graphs that run the captured step again."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine import mixed_graphs
from tritonllm.engine.batch import HostBatch, upload_batch
from tritonllm.engine.cuda_graphs import graph_sizes
from tritonllm.engine.mixed_graphs import MixedGraphs, decode_sizes, token_sizes
from tritonllm.layers.attention import paged_attention
from tritonllm.layers.metadata import KVCacheView

CPU, BLOCK, WIDTH, SEATS = torch.device("cpu"), 4, 6, 10
DRAWN = torch.arange(SEATS) + 30


@pytest.mark.parametrize(("seats", "sizes"), [(1, [1]), (8, [8]), (9, [8, 9]), (256, [8, 64, 256])])
def test_decode_sizes(seats, sizes):
    assert decode_sizes(seats, 1024) == sizes
    assert decode_sizes(seats, 1025) == [seats]


@pytest.mark.parametrize(
    ("budget", "host_bound", "sizes"),
    [
        (8192, 18000, [64, 256, 1024, 4096, 8192]),
        (8192, 8191, [64, 256, 1024, 4096]),
        (8192, 4095, [64, 256, 1024]),
        (8192, 0, [64, 256, 1024]),
        (2048, 5000, [64, 256, 1024, 2048]),
        (1024, 5000, [64, 256, 1024]),
        (100, 5000, [64]),
        (16, 5000, []),
    ],
)
def test_token_sizes(budget, host_bound, sizes):
    assert token_sizes(budget, host_bound) == sizes


class Model:
    """One layer of attention whose queries are the input ids' rows of a table; remembers its calls."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(50, 2, 16, generator=generator)
        self.cache = KVCacheView(*torch.randn(2, 100, BLOCK, 1, 16, generator=generator))
        self.calls = []

    def __call__(self, input_ids, positions, metadata, rows):
        n = metadata.num_decodes
        ids = input_ids.clone()
        ids[:n] = torch.where(ids[:n] < 0, DRAWN[-1 - ids[:n].clamp_max(-1)].int(), ids[:n])
        attended = paged_attention(self.table[ids.long()], metadata, self.cache)
        hidden = attended.flatten(1) + positions[:, None]
        wanted = hidden[rows]
        self.calls.append((input_ids, positions, metadata, rows, hidden, wanted))
        return wanted


@pytest.fixture(scope="module")
def graphs():
    """With room for 2, 5 or 10 decodes and 8 tokens of three chunks, or 10 decodes and 20 tokens of five chunks."""
    model = Model()

    class Graph:
        def __init__(self):
            *self.inputs, _, self.wanted = model.calls[-1]

        def replay(self):
            self.wanted.copy_(model(*self.inputs))

    def capture(work):
        outputs = work()
        return Graph(), outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_graphs, "SMALL", (8,))
        patch.setattr(mixed_graphs, "chunk_capacity", lambda tokens: 4 if tokens == 8 else 6)
        patch.setattr(mixed_graphs, "decode_sizes", lambda seats, tokens: [2, 5, seats] if tokens == 8 else [seats])
        sizes = (8, 20, 200)  # the last is more padding than fits the longest sequences
        yield MixedGraphs(model, SEATS, sizes, WIDTH, BLOCK, CPU, capture), model


def batch_of(decodes, chunks, seed=0):
    """Decodes of these lengths (negative: the token is in flight) and chunks of (cached, new) tokens."""
    rng = np.random.default_rng(seed)
    spans = [(abs(length) - 1, 1) for length in decodes] + list(chunks)
    width = max(-(-(start + count) // BLOCK) for start, count in spans)
    positions = np.concatenate([np.arange(start, start + count) for start, count in spans])
    ids = rng.integers(0, 50, len(positions)).astype(np.int32)
    in_flight = np.array(decodes, dtype=int) < 0
    ids[: len(decodes)][in_flight] = -1 - rng.permutation(SEATS)[: len(decodes)][in_flight]
    none = np.zeros(len(decodes))
    ends = np.cumsum([count for _, count in spans]) - 1
    ends = ends[(np.arange(len(spans)) < len(decodes)) | (rng.random(len(spans)) < 0.5)]  # not all prompts end here
    return HostBatch(
        input_ids=ids,
        positions=positions,
        slot_mapping=np.arange(len(positions)) + 7,
        block_tables=rng.permutation(100)[: len(spans) * width].reshape(len(spans), width).astype(np.int32),
        seq_lens=np.array([start + count for start, count in spans], dtype=np.int32),
        cu_seqlens_q=np.cumsum([0, *(count for _, count in chunks)]).astype(np.int32),
        logit_rows=ends,
        **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seeds", "steps"), none),
        num_decodes=len(decodes),
        max_seqlen_q=max((count for _, count in chunks), default=0),
        cascade=None,
        sampled=[],
        plain=True,
        whole=False,
    )


@given(
    decodes=st.lists(st.integers(-20, 20).filter(bool), max_size=SEATS),
    chunks=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_replays_equal_steps_without_graphs(graphs, decodes, chunks, seed):
    captured, model = graphs
    batch = batch_of(decodes[: SEATS - len(chunks)], chunks, seed)
    decodes, sampled = decodes[: SEATS - len(chunks)], len(batch.logit_rows)
    room = captured.room_for(batch)
    if sum(count for _, count in chunks) > 20:
        assert room is None
        return
    wanted = captured.run(batch, room).clone()
    ids, positions, metadata, *_, padded, _ = model.calls[-1]
    assert (metadata.num_decodes, len(ids)) == (room[0], sum(room))
    used = [*range(len(decodes)), *range(room[0], room[0] + len(positions[room[0] :]))][: len(batch.input_ids)]
    assert sorted(metadata.slot_mapping[metadata.slot_mapping >= 0].tolist()) == batch.slot_mapping.tolist()
    assert metadata.slot_mapping[used].tolist() == batch.slot_mapping.tolist()
    assert metadata.cu_seqlens_q[-1] == room[1]
    assert metadata.decode_order.tolist() == [*batch.decode_order.tolist(), *range(len(decodes), room[0])]
    assert padded.isfinite().all()
    assert len(wanted) in (0, *graph_sizes(SEATS)) and len(wanted) - sampled < 8
    eager = upload_batch(batch, CPU)
    rows = torch.from_numpy(batch.logit_rows)
    torch.testing.assert_close(wanted[:sampled], model(eager.input_ids, eager.positions, eager.metadata, rows))


def test_what_has_no_room(graphs):
    captured, _ = graphs
    assert captured.room_for(batch_of([3], [(0, 8)])) == (2, 8)
    assert captured.room_for(batch_of([3] * 3, [(0, 8)])) == (5, 8)
    assert captured.room_for(batch_of([3], [(0, 9)])) == (10, 20)
    assert captured.room_for(batch_of([3], [(0, 1)] * 4)) == (10, 20)  # there must be a chunk for the padding
    assert captured.room_for(batch_of([3], [(0, 2)] * 6)) is None
    assert captured.room_for(batch_of([3], [])) is None
    assert captured.room_for(batch_of([3], [(0, 21)])) is None
    whole = dataclasses.replace(batch_of([3], [(0, 8)]), whole=True)
    assert captured.room_for(whole) is None
