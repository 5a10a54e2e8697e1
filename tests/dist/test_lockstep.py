"""Engines that take their steps together: nobody reads another step's words, and nobody waits for one that has left."""

import multiprocessing
import select
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import shared_memory
from support.waiting import PATIENCE

from tritonllm.dist import lockstep as module
from tritonllm.dist.lockstep import Board, LeftError, Lockstep, LockstepError


def lockstep(board, rank, patience=PATIENCE):
    return Lockstep(board, rank, patience)


def words_of(rank, step):
    return [100 * step + rank, -step]


def take_part(board, rank, wants, found, barrier):
    """Begin as many steps as this engine wants, and join those of the others until all have had theirs."""
    mine, taken = lockstep(board, rank), 0
    for _ in range(wants):
        taken += 1
        found[rank].append(mine.agree(words_of(rank, taken)))
    total = max(barrier)
    while taken < total:
        select.select([mine.bell], [], [])
        mine.hush()
        while mine.is_behind:
            taken += 1
            found[rank].append(mine.agree(words_of(rank, taken)))


@given(wants=st.lists(st.integers(0, 12), min_size=2, max_size=4))
def test_all_take_the_same_steps_and_read_their_words(wants):
    """Those that want fewer steps sleep until a bell rings, and join."""
    board, found = Board(len(wants)), [[] for _ in wants]
    arguments = [(board, rank, count, found, wants) for rank, count in enumerate(wants)]
    threads = [threading.Thread(target=take_part, args=each, daemon=True) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    expected = [[words_of(rank, step) for rank in range(len(wants))] for step in range(1, max(wants) + 1)]
    assert found == [expected] * len(wants)


def test_an_engine_that_is_behind_knows_it():
    board = Board(2)
    first, second = lockstep(board, 0), lockstep(board, 1)
    assert not first.is_behind and not second.is_behind
    thread = threading.Thread(target=first.agree, args=([1],), daemon=True)
    thread.start()
    assert select.select([second.bell], [], [], PATIENCE)[0] == [second.bell]
    second.hush()
    assert second.is_behind and not first.is_behind
    second.agree([2])
    thread.join(PATIENCE)
    assert not first.is_behind and not second.is_behind
    first.hush()
    second.hush()  # the bell was not rung again
    assert select.select([first.bell, second.bell], [], [], 0)[0] == []


def test_who_never_comes_is_named():
    board = Board(3)
    thread = threading.Thread(target=lockstep(board, 2).agree, args=([0],), daemon=True)
    thread.start()
    with pytest.raises(LockstepError, match="engine 1 did not come to step 1 within"):
        lockstep(board, 0, patience=0.1).agree([0])


def test_nobody_waits_for_one_that_has_left():
    board = Board(2)
    lockstep(board, 1).leave()
    with pytest.raises(LeftError):
        lockstep(board, 0).agree([0])


def test_one_that_leaves_after_a_step_does_not_spoil_it():
    board, found = Board(2), []

    def last():
        mine = lockstep(board, 1)
        mine.agree([7])
        mine.leave()

    thread = threading.Thread(target=last, daemon=True)
    thread.start()
    other = lockstep(board, 0)
    found = other.agree([5])
    thread.join(PATIENCE)
    assert found == [[5], [7]]
    with pytest.raises(LeftError):
        other.agree([0])


def test_only_who_has_begun_and_not_left_can_be_silent():
    """However long others wait for one that starts: its silence counts from its first beat on."""
    board = Board(3)
    first, second, third = (lockstep(board, rank) for rank in range(3))
    assert [first.beat(2.0) for _ in range(3)] == [{1: 0.0, 2: 0.0}] * 3
    second.beat(2.0)
    assert [first.beat(2.0) for _ in range(3)] == [{1: 0.0, 2: 0.0}, {1: 2.0, 2: 0.0}, {1: 4.0, 2: 0.0}]
    third.beat(2.0)
    assert first.beat(2.0) == {1: 6.0, 2: 0.0}
    second.beat(2.0)
    assert first.beat(2.0) == {1: 0.0, 2: 2.0}
    third.leave()
    assert [first.beat(2.0) for _ in range(2)] == [{1: 2.0, 2: 0.0}, {1: 4.0, 2: 0.0}]
    late = lockstep(board, 0)  # hears of all for the first time
    assert late.beat(2.0) == {1: 0.0, 2: 0.0}


def in_process(board, rank, pipe):
    mine = lockstep(board, rank)
    pipe.send([mine.agree([rank, step]) for step in range(100)])


def test_in_processes_and_without_a_name():
    before, spawn = shared_memory(), multiprocessing.get_context("spawn")
    board, (mine, theirs) = Board(2), spawn.Pipe()
    process = spawn.Process(target=in_process, args=(board, 1, theirs))
    process.start()
    here = lockstep(board, 0)
    found = [here.agree([0, step]) for step in range(100)]
    assert found == mine.recv() == [[[0, step], [1, step]] for step in range(100)]
    process.join(PATIENCE)
    assert process.exitcode == 0 and shared_memory() <= before


def test_a_step_has_room_for_what_engines_say():
    from tritonllm.engine.step.common_steps import Need

    assert len(Need()) <= module.WORDS
