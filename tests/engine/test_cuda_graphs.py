"""What a replay reads, without a GPU: graphs that run the captured step again."""

import numpy as np
import pytest
import torch

from tritonllm.engine.batch import HostBatch, upload_batch, upload_sampling
from tritonllm.engine.cuda_graphs import DecodeGraphs
from tritonllm.kernels import plan_cascade
from tritonllm.layers.attention import paged_attention
from tritonllm.layers.metadata import KVCacheView

CPU, BLOCK, WIDTH, SEATS = torch.device("cpu"), 4, 6, 20


class Model:
    """One layer of attention whose queries are the input ids' rows of a table; remembers its calls."""

    def __init__(self):
        self.table = torch.randn(50, 2, 16)
        self.cache = KVCacheView(*torch.randn(2, 200, BLOCK, 1, 16))
        self.calls = []

    def __call__(self, input_ids, positions, metadata, sampling):
        hidden = paged_attention(self.table[input_ids.long()], metadata, self.cache).flatten(1)
        tokens = sampling.seeds * 1000 + sampling.steps + positions + (sampling.temperature * 7).long()
        self.calls.append((input_ids, positions, metadata, sampling, hidden, tokens))
        return hidden, tokens


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def capture(model):
    """In the place of a GPU's: replays run the captured step again."""

    class Graph:
        def __init__(self):
            *self.inputs, self.hidden, self.tokens = model.calls[-1]

        def replay(self):
            for old, new in zip((self.hidden, self.tokens), model(*self.inputs), strict=True):
                old.copy_(new)

    def captured(work):
        outputs = work()
        return Graph(), outputs

    return captured


def step(n, shared, who):
    """A batch of `n` decodes of which those in `who` share blocks; `shared` 0: an ordinary step."""
    tables = torch.randperm(200, dtype=torch.int32)[: n * WIDTH].view(n, WIDTH)[:, : WIDTH - 1]
    shares = torch.tensor([i in who for i in range(n)])
    lens = torch.randint(shared * BLOCK + 1, (WIDTH - 1) * BLOCK, (n,), dtype=torch.int32)
    if shared:
        tables = torch.where(shares[:, None] & (torch.arange(WIDTH - 1) < shared), tables[who[0]], tables)
    rng = np.random.default_rng(n)
    return HostBatch(
        input_ids=rng.integers(0, 50, n).astype(np.int32),
        positions=np.arange(n),
        slot_mapping=np.arange(n),
        block_tables=tables.numpy(),
        seq_lens=lens.numpy(),
        cu_seqlens_q=np.zeros(1, dtype=np.int32),
        logit_rows=np.arange(n),
        temperature=rng.random(n, dtype=np.float32),
        top_k=rng.integers(0, 9, n).astype(np.int32),
        top_p=rng.random(n, dtype=np.float32),
        min_p=rng.random(n, dtype=np.float32),
        seeds=rng.integers(0, 99, n),
        steps=rng.integers(0, 99, n),
        num_decodes=n,
        max_seqlen_q=0,
        cascade=plan_cascade(tables, lens, shares, shared, BLOCK) if shared else None,
        sampled=[],
        plain=True,
        whole=False,
    )


def test_replays_equal_steps_without_graphs(model):
    """Large batches before small ones, and steps that share before others: nothing of an earlier step may show."""
    graphs = DecodeGraphs(model, SEATS, WIDTH, CPU, may_share=lambda size: size >= 4, capture=capture(model))
    everyone = list(range(SEATS))
    for n, shared, who in (
        *((20, 4, everyone), (18, 0, []), (17, 2, everyone[3:]), (5, 0, []), (3, 4, [0, 2]), (3, 1, [1, 2])),
        *((13, 3, [0]), (20, 1, everyone[::2]), (1, 0, [])),
    ):
        batch = step(n, shared, who)
        hidden, tokens = (t.clone() for t in graphs.run(batch))
        _, _, metadata, *_ = model.calls[-1]
        assert (metadata.cascade is not None) == (shared > 0)
        assert (metadata.slot_mapping[n:] == -1).all() and (metadata.seq_lens[n:] == 0).all()
        size = len(metadata.seq_lens)
        assert len(hidden) == size
        assert metadata.decode_order.tolist() == [*batch.decode_order.tolist(), *range(n, size)]
        expected, (_, inputs) = upload_batch(batch, CPU), upload_sampling(batch, CPU, n)
        for name, values in vars(inputs).items():
            assert torch.equal(getattr(graphs.sampling_inputs(n), name), values), name
        wanted = model(expected.input_ids, expected.positions, expected.metadata, inputs)
        torch.testing.assert_close((hidden[:n], tokens), wanted)


def test_graphs_for_shared_prefixes_are_captured_when_one_comes(model):
    graphs = DecodeGraphs(model, SEATS, WIDTH, CPU, may_share=lambda size: size >= 16, capture=capture(model))
    assert [len(ids) for ids, *_ in model.calls] == [20, 16, 8, 4, 2, 1]
    assert all(metadata.cascade is None for _, _, metadata, *_ in model.calls)
    for calls in (2, 1):  # the first time a capture; then replays
        before = len(model.calls)
        graphs.run(step(18, 4, list(range(18))))
        sizes = [(len(ids), metadata.cascade is not None) for ids, _, metadata, *_ in model.calls[before:]]
        assert sizes == [(20, True)] * calls
