"""The collectives, between ranks that are threads here."""

import threading
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from support.waiting import PATIENCE, eventually

from tritonllm.dist import group as group_module
from tritonllm.dist.group import ALONE, ConnectedGroup, Group, share_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_gives_all_ranks_the_same_bits(size, dtype):
    parts = [torch.randn(37, 65, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
    found = run_ranks(size, lambda group: group.all_reduce(parts[group.rank].clone()))
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.testing.assert_close(found[0].double(), sum(p.double() for p in parts), rtol=0.03, atol=0.03)


@pytest.mark.parametrize(
    ("columns", "size"), [(16, 3), (21, 3), (24, 3), (101, 3), (10, 4), (20, 4), (300, 2), (1000, 3)]
)
def test_all_gather_puts_columns_side_by_side(columns, size):
    rows = torch.arange(3 * columns, dtype=torch.float32).view(3, columns)

    def gather(group: Group) -> torch.Tensor:
        each = share_of(columns, size)
        return group.all_gather(rows[:, group.rank * each : (group.rank + 1) * each], columns)

    for found in run_ranks(size, gather):
        assert torch.equal(found, rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_stack(dtype):
    x = torch.arange(10).view(5, 2).to(dtype)
    for found in run_ranks(3, lambda group: group.stack(x + group.rank)):
        assert torch.equal(found, torch.stack([x, x + 1, x + 2]))
    assert torch.equal(ALONE.stack(x), x[None])
    assert Group(0, 4).stack(x).shape == (4, 5, 2)


@pytest.mark.parametrize(
    ("count", "size", "each"), [(151936, 2, 76032), (128256, 4, 32128), (300, 2, 256), (101, 2, 56)]
)
def test_shares_of_a_vocabulary_are_whole_groups_of_a_draw_where_all_ranks_then_have_some(count, size, each):
    assert share_of(count, size) == each


@pytest.mark.parametrize("size", [2, 3])
def test_all_to_all(size):
    """Row i of what rank r gets is row r of what rank i sent."""
    rows = torch.arange(size * size * 10, dtype=torch.int32).view(size, size, 5, 2)
    found = run_ranks(size, lambda group: group.all_to_all(rows[group.rank]))
    assert all(torch.equal(got, rows[:, rank]) for rank, got in enumerate(found))


def test_broadcast_and_least():
    found = run_ranks(
        3, lambda group: (int(group.broadcast(torch.tensor([7 + group.rank]))), group.least(9 - group.rank))
    )
    assert found == [(7, 7)] * 3


def test_a_group_of_one_gives_back_what_it_gets():
    x = torch.ones(2, 3)
    assert ALONE.all_reduce(x) is x and ALONE.all_gather(x, 3) is x and ALONE.broadcast(x) is x and ALONE.least(5) == 5
    assert ALONE.all_to_all(x) is x
    assert ALONE.leads and not Group(1, 2).leads


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (2, 2), (-1, 2)])
def test_bad_ranks(rank, size):
    with pytest.raises(ValueError, match="rank must be from 0 to size - 1"):
        Group(rank, size)


def threads_of_this_process() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_no_thread_of_a_group_that_was_left_remains():
    """One that lets go of a tensor when Python has begun to end aborts the process."""
    before = threads_of_this_process()
    groups = run_ranks(2, lambda group: (group.broadcast(torch.ones(1000)), group)[1])
    assert threads_of_this_process() > before
    for group in groups:
        group.shut()
        group.shut()
    eventually(lambda: threads_of_this_process() <= before)  # the kernel lists one for a moment after its end
    with pytest.raises(RuntimeError, match="has left its group"):
        groups[0].broadcast(torch.ones(1))


def test_nobody_waits_for_ever_for_a_group_whose_graphs_are_still_there(monkeypatch):
    """NCCL's abort does."""
    monkeypatch.setattr(group_module, "PATIENCE", 0.05)
    aborted, never = [], threading.Event()

    class Backend:
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 2)

        def abort(self):
            aborted.append(True)
            never.wait()

    group = ConnectedGroup(Backend(), torch.device("cuda"))
    group.shut()
    group.shut()
    never.set()
    assert aborted == [True]


def test_whoever_leaves_a_second_time_waits_for_the_first():
    """Else Python ends while a thread still ends those of gloo, and the process with signal 6."""
    leaving, go_on = threading.Event(), threading.Event()

    class Slow:
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 1)

        def __del__(self):
            leaving.set()
            assert go_on.wait(PATIENCE)

    group = ConnectedGroup(Slow(), torch.device("cpu"))
    first, second = (threading.Thread(target=group.shut) for _ in range(2))
    first.start()
    assert leaving.wait(PATIENCE)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    go_on.set()
    for thread in (first, second):
        thread.join(PATIENCE)
        assert not thread.is_alive()
