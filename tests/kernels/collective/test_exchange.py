"""Ranks in one process: the stages of a launch, one rank after the other, so that nobody waits in vain.

What only several GPUs can show is in ``tests/dist/test_exchange.py``.
"""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding
from support.inboxes import local_memories
from support.waiting import PATIENCE

from tritonllm.kernels import fused_moe_ref
from tritonllm.kernels.collective import (
    AddedNorm,
    ExchangeLayout,
    combine_rows,
    combine_rows_ref,
    dispatch_rows,
    dispatch_rows_ref,
    exchange_layout,
)
from tritonllm.kernels.collective.all_reduce import Stages

dtypes = st.sampled_from(FLOATS)
columns = st.sampled_from([1, 5, 16, 33, 70])
STAGES = [Stages(sends=True, finishes=False), Stages(sends=False, finishes=True)]


def made_up(count, n, top_k, experts, dtype, device, padding=0):
    """``x, weights, ids, marks`` of a rank: some rows are padding, and some ids no expert's, below the first and beyond
    the last."""
    x = with_row_padding(torch.randn(count, n).to(device, dtype), padding)
    weights = with_row_padding(torch.rand(count, top_k).to(device), padding)
    ids = torch.randint(-2, experts + 1, (count, top_k), dtype=torch.int32).to(device)
    ids = with_row_padding(ids.masked_fill(ids == -2, -(2**31)), padding)
    marks = torch.randint(-1, 3, (count,), dtype=[torch.int32, torch.int64][count % 2]).to(device)
    return x, weights, ids, marks


def dispatched(memories, sent, held, rows):
    """On all ranks, stage by stage; what each has received."""
    for stage in STAGES:
        found = [
            dispatch_rows(*part, memory, held, rows, stages=stage) for memory, part in zip(memories, sent, strict=True)
        ]
    return found


def combined(memories, sent, held, rows, forms):
    for stage in STAGES:
        found = [
            combine_rows(memory, *part[2:], held, rows, stages=stage, **form)
            for memory, part, form in zip(memories, sent, forms, strict=True)
        ]
    return found


def check_received(memories, sent, held, rows):
    found = dispatched(memories, sent, held, rows)
    for rank, (x, weights, ids) in enumerate(found):
        expected = dispatch_rows_ref(sent, rank, held, rows)
        assert torch.equal(ids, expected[2])
        here = (ids >= 0).any(1)
        assert torch.equal(x[here], expected[0][here]) and torch.equal(weights[here], expected[1][here])
    return found


def write_parts(memories, found, rows):
    """What experts might make of rows, and NaN where there was none to make something of."""
    parts = []
    for memory, (_, _, ids) in zip(memories, found, strict=True):
        made = memory.parts[: len(memories) * rows]
        made.copy_(torch.randn(made.shape).masked_fill((ids < 0).all(1, keepdim=True).cpu(), float("nan")))
        parts.append(made)
    return parts


@given(
    size=st.integers(2, 4),
    counts=st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=3, max_size=3),
    more=st.lists(st.integers(0, 2), min_size=3, max_size=3),
    n=columns,
    top_k=st.integers(1, 8),
    held=st.integers(1, 3),
    dtype=dtypes,
    programs=st.integers(1, 4),
    padding=st.integers(0, 3),
)
def test_rows_arrive_and_come_back(device, size, counts, more, n, top_k, held, dtype, programs, padding):
    """Three steps of other numbers of rows, of which each uses the places again; memory is NaN before."""
    memories = local_memories(ExchangeLayout(n, dtype, size, top_k, 7, programs), device)
    for numbers, room in zip(counts, more, strict=True):
        numbers = numbers[:size]
        rows = max(numbers) + room
        sent = [made_up(count, n, top_k, size * held, dtype, device, padding) for count in numbers]
        found = check_received(memories, sent, held, rows)
        parts = write_parts(memories, found, rows)
        outs = [poisoned(count, n, dtype=dtype, device=device) for count in numbers]
        results = combined(memories, sent, held, rows, [{"out": out} for out in outs])
        for rank, (out, result) in enumerate(zip(outs, results, strict=True)):
            assert result is out
            assert torch.equal(out, combine_rows_ref(parts, rank, *sent[rank][2:], held, rows))


@given(
    size=st.integers(2, 3),
    counts=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    n=columns,
    dtype=dtypes,
    scale=st.sampled_from([1.0, 0.22]),
    offset=st.sampled_from([0.0, 1.0]),
    padding=st.integers(0, 3),
    norms=st.booleans(),
)
def test_with_the_addition_and_the_norm(device, size, counts, n, dtype, scale, offset, padding, norms):
    counts = counts[:size]
    rows, held, top_k = max(counts) + 1, 2, 3
    memories = local_memories(exchange_layout(n, dtype, size, top_k, rows, 2), device)
    sent = [made_up(count, n, top_k, size * held, dtype, device) for count in counts]
    parts = write_parts(memories, check_received(memories, sent, held, rows), rows)
    streams = [with_row_padding(torch.randn(count, n).to(device, dtype), padding) for count in counts]
    weight = torch.randn(n).to(device)

    def forms(rows_of_streams):
        if norms:
            return [{"added": AddedNorm(s, weight.to(dtype), 1e-5, offset, scale)} for s in rows_of_streams]
        return [{"residual": s, "scale": scale} for s in rows_of_streams]

    expected_streams = [stream.clone() for stream in streams]
    expected = [
        combine_rows_ref(parts, rank, *sent[rank][2:], held, rows, **form)
        for rank, form in enumerate(forms(expected_streams))
    ]
    results = combined(memories, sent, held, rows, forms([stream.clone() for stream in streams]))
    results_streams = streams if norms else results
    if norms:  # the streams that were added to
        memories = local_memories(exchange_layout(n, dtype, size, top_k, rows, 2), device)
        check_received(memories, sent, held, rows)
        for memory, part in zip(memories, parts, strict=True):
            memory.parts[: size * rows] = part
        again = combined(memories, sent, held, rows, forms(streams))
        assert all(torch.equal(one, other) for one, other in zip(results, again, strict=True))
    for result, stream, right, right_stream in zip(results, results_streams, expected, expected_streams, strict=True):
        if scale == 1.0:
            assert torch.equal(stream, right_stream)
        assert_close(stream, right_stream)
        assert_close(result, right)


def test_long_rows_go_in_several_blocks(device):
    memories = local_memories(exchange_layout(8200, torch.float16, 2, 2, 2, 1), device)
    sent = [made_up(2, 8200, 2, 4, torch.float16, device) for _ in range(2)]
    parts = write_parts(memories, check_received(memories, sent, 2, 2), 2)
    for rank, out in enumerate(combined(memories, sent, 2, 2, [{}] * 2)):
        assert torch.equal(out, combine_rows_ref(parts, rank, *sent[rank][2:], 2, 2))


def test_the_ranks_add_in_one_order(device):
    """Of these four, 1 is lost or not, depending on what is added first; rounding is to float32."""
    memories = local_memories(exchange_layout(1, torch.float32, 4, 4, 1, 1), device)
    ids = torch.arange(4, dtype=torch.int32, device=device)[None]
    one, marks = torch.ones(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    sent = [(one, torch.ones(1, 4, device=device), ids, marks)] * 4
    dispatched(memories, sent, 1, 1)
    for memory, value in zip(memories, (2.0**24, 1.0, -(2.0**24), 1.0), strict=True):
        memory.parts.fill_(value)
    assert [float(out) for out in combined(memories, sent, 1, 1, [{}] * 4)] == [1.0] * 4


def test_epochs_wrap_around(device):
    """Only their difference counts; that of programs that did not run stays."""
    memories = local_memories(ExchangeLayout(4, torch.float32, 2, 1, 3, 3), device)
    last = 2**31 - 2
    for memory in memories:
        memory.epochs.fill_(last)
        memory.memory[0][memory.rank][memory.layout.flags_at :].view(torch.int32).fill_(last)
    for rows in (3, 1, 1, 2):
        sent = [made_up(rows, 4, 1, 2, torch.float32, device) for _ in range(2)]
        parts = write_parts(memories, check_received(memories, sent, 1, rows), rows)
        for rank, out in enumerate(combined(memories, sent, 1, rows, [{}] * 2)):
            assert torch.equal(out, combine_rows_ref(parts, rank, *sent[rank][2:], 1, rows))
    expected = [[-(2**31) + 2, -(2**31), last + 1]] * 2
    assert [memory.epochs.tolist() for memory in memories] == [expected] * 2


@pytest.mark.parametrize("before", [0, 7, 2**31 - 1])
def test_a_flag_is_waited_for(device, before):
    """Also where the number that it gets is smaller than the one that it has."""
    if device.type == "cuda":
        pytest.skip("a launch does not wait for its end")
    memory, other = local_memories(exchange_layout(4, torch.float32, 2, 1, 1, 1), device)
    flags = memory.memory[0][0][memory.layout.flags_at :].view(torch.int32)
    memory.epochs.fill_(before), other.epochs.fill_(before), flags.fill_(before)
    sent = made_up(1, 4, 1, 2, torch.float32, device)
    waits = threading.Thread(
        target=dispatch_rows, args=(*sent, memory, 1, 1), kwargs={"stages": STAGES[1]}, daemon=True
    )
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    flags[1] = before + 1 if before < 2**31 - 1 else -(2**31)  # of program 0, from rank 1
    waits.join(PATIENCE)
    assert not waits.is_alive() and int(memory.epochs[0, 0]) == int(flags[1])


def test_a_word_ends_all_waiting(device):
    """The other rank never comes: whoever waits gives up once that is known."""
    memory, _ = local_memories(exchange_layout(8, torch.float32, 2, 2, 3, 2), device, stopped=True)
    sent = made_up(3, 8, 2, 4, torch.float32, device)
    dispatch_rows(*sent, memory, 2, 3)
    assert combine_rows(memory, *sent[2:], 2, 3).shape == (3, 8)


def test_no_room_is_no_launch(device):
    memory, _ = local_memories(exchange_layout(8, torch.float32, 2, 2, 3, 2), device)
    sent = made_up(0, 8, 2, 4, torch.float32, device)
    assert [len(t) for t in dispatch_rows(*sent, memory, 2, 0)] == [0, 0, 0]
    assert combine_rows(memory, *sent[2:], 2, 0).shape == (0, 8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_whole_way_is_a_mixture_of_experts(device, dtype, size):
    """Each rank computes its experts for what came; the sums are those of one rank that has all experts."""
    n, i, top_k, held, rows = 24, 16, 3, 2, 5
    memories = local_memories(exchange_layout(n, dtype, size, top_k, rows, 2), device)
    w_gate_up = (torch.randn(size * held, 2 * i, n) / n**0.5).to(device, dtype)
    w_down = (torch.randn(size * held, n, i) / i**0.5).to(device, dtype)
    sent = [made_up(rows - rank, n, top_k, size * held, dtype, device) for rank in range(size)]
    for memory, received in zip(memories, dispatched(memories, sent, held, rows), strict=True):
        here = slice(memory.rank * held, (memory.rank + 1) * held)
        memory.parts[:] = fused_moe_ref(received[0], w_gate_up[here], w_down[here], *received[1:])
    for part, out in zip(sent, combined(memories, sent, held, rows, [{}] * size), strict=True):
        x, weights, ids, marks = part
        expected = fused_moe_ref(
            x.float(), w_gate_up.float(), w_down.float(), weights, ids.masked_fill(marks[:, None] < 0, -1)
        )
        assert_close(out, expected, dtype)


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"x": torch.zeros(2, 5)}, r"x must have shape \[T, 4\]"),
        ({"x": torch.zeros(2, 4, dtype=torch.float16)}, "x must be torch.float32"),
        ({"weights": torch.zeros(2, 3)}, r"weights must have shape \[2, 2\]"),
        ({"ids": torch.zeros(1, 2, dtype=torch.int32)}, r"ids must have shape \[2, 2\]"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "ids must be torch.int32"),
        ({"marks": torch.zeros(3, dtype=torch.int32)}, r"marks must have shape \[2\]"),
        ({"held": 0}, "held must be at least 1"),
        ({"rows": 1}, "rows must be from 2"),
        ({"rows": 4}, "rows must be from 2"),
    ],
)
def test_bad_arguments_of_dispatch(kwargs, names):
    memory, _ = local_memories(exchange_layout(4, torch.float32, 2, 2, 3, 1), torch.device("cpu"))
    good = {"x": torch.zeros(2, 4), "weights": torch.zeros(2, 2), "ids": torch.zeros(2, 2, dtype=torch.int32)}
    good |= {"marks": torch.zeros(2, dtype=torch.int64), "held": 2, "rows": 3}
    with pytest.raises(ValueError, match=names):
        dispatch_rows(**(good | kwargs), memory=memory)


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"ids": torch.zeros(2, 3, dtype=torch.int32)}, r"ids must have shape \[T, 2\]"),
        ({"rows": 4}, "rows must be from 2"),
        ({"out": torch.zeros(3, 4)}, r"out must have shape \[2, 4\]"),
        ({"scale": 2.0}, "scale=2.0 needs residual"),
        ({"residual": torch.zeros(2, 5)}, r"residual must have shape \[2, 4\]"),
        ({"residual": torch.zeros(2, 4), "out": torch.zeros(2, 4)}, "residual must be alone"),
        ({"added": AddedNorm(torch.zeros(3, 4), torch.zeros(4))}, "residual must have shape"),
        ({"added": AddedNorm(torch.zeros(2, 4), torch.zeros(5))}, "weight must have shape"),
    ],
)
def test_bad_arguments_of_combine(kwargs, names):
    memory, _ = local_memories(exchange_layout(4, torch.float32, 2, 2, 3, 1), torch.device("cpu"))
    good = {"ids": torch.zeros(2, 2, dtype=torch.int32), "marks": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=names):
        combine_rows(memory, **(good | {"held": 2, "rows": 3} | kwargs))
