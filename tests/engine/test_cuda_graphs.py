"""What a replay reads, without a GPU: graphs that run the captured step again."""

from contextlib import contextmanager

import pytest
import torch

from tritonllm.engine.batch import Batch
from tritonllm.engine.cuda_graphs import DecodeGraphs
from tritonllm.kernels import plan_cascade
from tritonllm.layers.attention import paged_attention
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView

CPU, BLOCK, WIDTH, SEATS = torch.device("cpu"), 4, 6, 20


class Model:
    """One layer of attention whose queries are the input ids' rows of a table; remembers its calls."""

    def __init__(self):
        self.table = torch.randn(50, 2, 16)
        self.cache = KVCacheView(*torch.randn(2, 200, BLOCK, 1, 16))
        self.calls = []

    def __call__(self, input_ids, positions, metadata):
        hidden = paged_attention(self.table[input_ids.long()], metadata, self.cache).flatten(1)
        self.calls.append((input_ids, positions, metadata, hidden))
        return hidden


@pytest.fixture
def model(monkeypatch):
    torch.manual_seed(0)
    model = Model()

    class Graph:
        def replay(self):
            *inputs, hidden = self.step
            hidden.copy_(model(*inputs))

    @contextmanager
    def capture(graph, pool):
        yield
        graph.step = model.calls[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return model


def step(n, shared, who):
    """A batch of `n` decodes of which those in `who` share blocks; `shared` 0: an ordinary step."""
    tables = torch.randperm(200, dtype=torch.int32)[: n * WIDTH].view(n, WIDTH)[:, : WIDTH - 1]
    shares = torch.tensor([i in who for i in range(n)])
    lens = torch.randint(shared * BLOCK + 1, (WIDTH - 1) * BLOCK, (n,), dtype=torch.int32)
    if shared:
        tables = torch.where(shares[:, None] & (torch.arange(WIDTH - 1) < shared), tables[who[0]], tables)
    metadata = AttentionMetadata(
        slot_mapping=torch.arange(n),
        block_tables=tables,
        seq_lens=lens,
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
        num_decodes=n,
        max_seqlen_q=0,
        cascade=plan_cascade(tables, lens, shares, shared, BLOCK) if shared else None,
    )
    return Batch(torch.randint(50, (n,), dtype=torch.int32), torch.arange(n), metadata, torch.arange(n), None)


def test_replays_equal_steps_without_graphs(model):
    """Large batches before small ones, and steps that share before others: nothing of an earlier step may show."""
    graphs = DecodeGraphs(model, SEATS, WIDTH, CPU, may_share=lambda size: size >= 4)
    everyone = list(range(SEATS))
    for n, shared, who in (
        *((20, 4, everyone), (18, 0, []), (17, 2, everyone[3:]), (5, 0, []), (3, 4, [0, 2]), (3, 1, [1, 2])),
        *((13, 3, [0]), (20, 1, everyone[::2]), (1, 0, [])),
    ):
        batch = step(n, shared, who)
        got = graphs.run(batch).clone()
        replayed = model.calls[-1]
        assert (replayed[2].cascade is not None) == (shared > 0)
        assert (replayed[2].slot_mapping[n:] == -1).all() and (replayed[2].seq_lens[n:] == 0).all()
        torch.testing.assert_close(got, model(batch.input_ids, batch.positions, batch.metadata))


def test_graphs_for_shared_prefixes_only_where_they_can_occur(model):
    DecodeGraphs(model, SEATS, WIDTH, CPU, may_share=lambda size: size >= 16)
    captured = [(len(ids), metadata.cascade is not None) for ids, _, metadata, _ in model.calls[::2]]
    assert captured == [(20, False), (20, True), (16, False), (16, True), *((n, False) for n in (8, 4, 2, 1))]
