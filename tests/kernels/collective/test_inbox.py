"""The protocol of the inboxes, in all orders in which ranks can take their steps and writes can arrive."""

import itertools

import pytest
import torch

from tritonllm.kernels.collective import layout_for

ONE, TWO = False, True  # in one shot, in two


def moves(rank, size, launches):
    """What program 0 of a rank does, one element at a time: ``(launch, what, with which ranks)``. Row 0 is its only
    one, and rank 0's to sum up."""
    others = tuple(other for other in range(size) if other != rank)
    for launch, two_shot in enumerate(launches):
        if not two_shot:
            steps = [*(("send", to) for to in others), ("take", others)]
        elif rank == 0:
            steps = [("take", others), *(("send", to) for to in range(size)), ("take", (0,))]
        else:
            steps = [("send", 0), ("take", (0,))]
        yield from ((launch, *step) for step in steps)


def next_states(state, plans, sets):
    """Every state that one step of a rank, or the arrival of one element, leads to.

    A state: how many moves each rank has made, what its inbox holds, ``((rank, set, sender), launch)``, and what is on
    its way to one.
    """
    done, held, sent = state
    there = dict(held)
    for arriving in sent:
        assert arriving[0] not in there, "an element arrives where another one has not been read"
        yield done, held | {arriving}, sent - {arriving}
    for rank, plan in enumerate(plans):
        if done[rank] == len(plan):
            continue
        launch, what, whom = plan[done[rank]]
        further = (*done[:rank], done[rank] + 1, *done[rank + 1 :])
        if what == "take":
            found = {place: there.get(place) for place in ((rank, launch % sets, sender) for sender in whom)}
            if None in found.values():
                continue  # it waits
            assert set(found.values()) == {launch}, "a launch takes what belongs to another"
            yield further, held - frozenset(found.items()), sent
        else:
            yield further, held, sent | {((whom, launch % sets, rank), launch)}


def explore(size, sets, launches):
    """All states; an assertion fails in a bad one. Returns those in which nobody can do anything any more."""
    plans = [list(moves(rank, size, launches)) for rank in range(size)]
    begin = (0,) * size, frozenset(), frozenset()
    seen, open_states, last = {begin}, [begin], []
    while open_states:
        state = open_states.pop()
        following = list(next_states(state, plans, sets))
        if not following:
            last.append(state)
        for other in following:
            if other not in seen:
                seen.add(other)
                open_states.append(other)
    assert all(done == tuple(map(len, plans)) for done, _, _ in last), "somebody waits for ever"
    return last


@pytest.mark.parametrize("launches", list(itertools.product((ONE, TWO), repeat=5)))
def test_two_ranks_in_all_orders(launches):
    """Nobody overwrites what is not read, or reads what is not its own; nobody waits for ever; all places are empty."""
    ((_, held, sent),) = explore(2, 2, launches)
    assert not held and not sent


@pytest.mark.parametrize("launches", [(ONE, ONE, ONE), (ONE, TWO, ONE, TWO), (TWO, TWO, TWO, TWO)])
def test_three_ranks_in_all_orders(launches):
    ((_, held, sent),) = explore(3, 2, launches)
    assert not held and not sent


@pytest.mark.parametrize("launches", [(ONE, ONE), (ONE, TWO)])
def test_one_set_of_places_is_too_few(launches):
    """A rank that is ahead writes to a place that another one still reads."""
    with pytest.raises(AssertionError, match=r"an element arrives|a launch takes"):
        explore(2, 1, launches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1, 64, 1000, 4096, 8192, 32768])
@pytest.mark.parametrize("size", [2, 8])
def test_layouts(columns, dtype, size):
    layout = layout_for(columns, dtype, size, 132)
    assert layout.width >= columns and layout.width * dtype.itemsize % 16 == 0
    assert layout.rows == layout.programs * layout.slots and layout.slots >= 1
    assert layout.nbytes % 4 == 0
    program = layout.program
    assert program.num_warps * 32 * layout.programs <= 132 * 1024
    assert program.registers * program.num_warps * 32 * (layout.programs // 132) <= 65536


@pytest.mark.parametrize(("columns", "size", "launches"), [(1024, 2, 1), (4096, 2, 1), (4096, 4, 2), (8192, 4, 4)])
def test_few_launches_take_the_rows_of_a_large_step(columns, size, launches):
    """Each begins and ends with an idle link. Of short rows there are no more places than such a step has rows."""
    layout = layout_for(columns, torch.bfloat16, size, 132)
    assert 8192 / launches <= layout.rows < 8192 + layout.programs
    assert layout.nbytes <= 320 << 20


@pytest.mark.parametrize(("columns", "dtype"), [(0, torch.bfloat16), (1 << 16, torch.bfloat16)])
def test_rows_that_no_program_takes(columns, dtype):
    with pytest.raises(ValueError, match="columns must be from 1 to"):
        layout_for(columns, dtype, 2, 132)


def test_elements_without_a_negative_zero_of_their_size():
    with pytest.raises(ValueError, match="dtype must be float16, bfloat16 or float32"):
        layout_for(64, torch.int32, 2, 132)
