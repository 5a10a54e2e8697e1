"""Steps that hold parts of prompts, against the whole prompt at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.data.pooled_spans import PooledSpan
from tritonllm.engine.data.request import Pooling
from tritonllm.engine.step.pooler import Pooler

CPU = torch.device("cpu")
SEATS, SIZE = 4, 6
HOW = {
    "last": lambda hidden: hidden[-1:],
    "cls": lambda hidden: hidden[:1],
    "mean": lambda hidden: hidden.mean(0, keepdim=True),
    "all": lambda hidden: hidden,
}


@given(st.data())
def test_prompts_in_any_pieces(data):
    """Also when a prompt is begun anew, as after a preemption, and when seats change hands."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    hows = [data.draw(st.sampled_from(sorted(HOW))) for _ in lengths]
    prompts = [torch.randn(length, SIZE) for length in lengths]
    pooler, found = Pooler(SEATS, SIZE, CPU), dict[str, dict[int, torch.Tensor]]()
    waiting, running, done = list(range(len(lengths))), dict[int, int](), dict[int, int]()
    while waiting or running:
        while waiting and len(running) < SEATS:
            running[next(seat for seat in range(SEATS) if seat not in running)] = waiting.pop(0)
        spans, rows, hidden = [], [], []
        for seat, who in list(running.items()):
            if done.get(who) and data.draw(st.integers(0, 9)) == 0:
                done[who] = 0
                waiting.append(who)
                del running[seat]
                continue
            first = done.get(who, 0)
            end = data.draw(st.integers(first + 1, lengths[who]))
            begin, row = len(hidden), len(rows) if end == lengths[who] else -1
            hidden += prompts[who][first:end]
            spans.append(PooledSpan(str(who), seat, Pooling(hows[who]), first, begin, len(hidden), row))
            done[who] = end
            if row >= 0:
                rows.append(prompts[who][0 if spans[-1].in_row and hows[who] == "cls" else -1])
                del running[seat]
        if not spans:
            continue
        everything = torch.stack(hidden) if not all(span.in_row for span in spans) else None
        for ids, first, vectors in pooler.pool(spans, torch.stack(rows) if rows else torch.empty(0, SIZE), everything):
            for index, name in enumerate(ids):
                if first == 0:
                    found[name] = {}
                found[name][first] = vectors if len(ids) == 1 else vectors[index : index + 1]
    for who, (prompt, how) in enumerate(zip(prompts, hows, strict=True)):
        parts = found[str(who)]
        ours = torch.cat([parts[first] for first in sorted(parts)])
        torch.testing.assert_close(ours, HOW[how](prompt))


def test_heads_and_projections():
    pooler = Pooler(SEATS, 2, CPU, head=lambda x: x * 10, projection=lambda x: -x)
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    ways = Pooling("last"), Pooling("last", head=True), Pooling("all", head=True)
    spans = [PooledSpan(str(i), i, way, 0, i, i + 1, i if i < 2 else -1) for i, way in enumerate(ways)]
    results = pooler.pool(spans, rows, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert [(ids, first, vectors.tolist()) for ids, first, vectors in results] == [
        (("0",), 0, [[-1.0, -2.0]]),
        (("1",), 0, [[30.0, 40.0]]),
        (("2",), 0, [[50.0, 60.0]]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_are_summed_in_float32(dtype):
    hidden = (1 + torch.rand(300, SIZE)).to(dtype)
    span = PooledSpan("a", 0, Pooling("mean"), 0, 0, 300, 0)
    ((_, _, mean),) = Pooler(1, SIZE, CPU).pool([span], hidden[-1:], hidden)
    torch.testing.assert_close(mean[0], hidden.double().mean(0).float())
