"""What an exchange of rows relies on, in all orders in which the programs of ranks can take their steps; and layouts.

A write may arrive at any time before the flag that its program sets behind it does, which is when others may read it.
Here it arrives at once, the earliest time, at which it might overwrite what is still read.
"""

import itertools

import pytest
import torch
from support.inboxes import local_memories

from tritonllm.kernels.collective import exchange_layout
from tritonllm.kernels.collective.exchange_memory import ALIGNMENT

PROGRAMS = 2  # of a launch, at most
DISPATCH, COMBINE = "dispatch", "combine"


def kernels_of(rank, size, steps, without):
    """What a rank launches, one after the other: of each kernel what its programs do. ``steps`` says for how many rows
    of a rank each has room; a move in ``without`` is left out."""
    others = [other for other in range(size) if other != rank]

    def flags(phase, epoch, program):
        sets = [("set", (other, phase, program, rank), epoch) for other in others]
        waits = [] if (phase, "wait") in without else [("wait", [(rank, phase, program, o) for o in others], epoch)]
        return sets, waits

    ran = dict.fromkeys(itertools.product((DISPATCH, COMBINE), range(PROGRAMS)), 0)
    for step, rows in enumerate(steps):
        programs = min(rows, PROGRAMS)
        epochs = {}
        for key in itertools.product((DISPATCH, COMBINE), range(programs)):
            epochs[key] = ran[key] = ran[key] + 1
        mine = [range(program, rows, programs) for program in range(programs)]
        dispatch = []
        for program in range(programs):
            sets, waits = flags(DISPATCH, epochs[DISPATCH, program], program)
            writes = [("write", ("row", other, rank, row), step) for row in mine[program] for other in others]
            dispatch.append([*writes, *sets, *waits])
        yield dispatch
        received = list(itertools.product(others, range(rows)))
        reads = [("read", ("row", rank, *place), step) for place in received]
        yield [[*reads, *(("write", ("part", rank, *place), step) for place in received)]]  # the experts
        combine = []
        for program in range(programs):
            sets, waits = flags(COMBINE, epochs[COMBINE, program], program)
            reads = [("read", ("part", other, rank, row), step) for row in mine[program] for other in others]
            combine.append([*sets, *waits, *reads])
        yield combine


def next_states(state, plans):
    """Every state that one move of a program leads to: how far each rank's programs are, and what is in memory."""
    places, memory = state
    there = dict(memory)
    for rank, (kernel, done) in enumerate(places):
        if kernel == len(plans[rank]):
            continue
        programs = plans[rank][kernel]
        for number, program in enumerate(programs):
            if done[number] == len(program):
                continue
            what, where, value = program[done[number]]
            if what == "wait" and any(there.get(flag, 0) < value for flag in where):
                continue
            if what == "read":
                assert there.get(where) == value, "a rank reads what belongs to another step"
            after = frozenset((there | {where: value}).items()) if what in ("set", "write") else memory
            further = kernel, (*done[:number], done[number] + 1, *done[number + 1 :])
            if all(count == len(moves) for count, moves in zip(further[1], programs, strict=True)):
                following = plans[rank][kernel + 1] if kernel + 1 < len(plans[rank]) else []
                further = kernel + 1, (0,) * len(following)
            yield (*places[:rank], further, *places[rank + 1 :]), after


def explore(size, steps, without=()):
    """All states; an assertion fails in a bad one, and where somebody waits for ever."""
    plans = [list(kernels_of(rank, size, steps, without)) for rank in range(size)]
    begin = tuple((0, (0,) * len(plan[0])) for plan in plans), frozenset()
    seen, open_states = {begin}, [begin]
    while open_states:
        state = open_states.pop()
        following = list(next_states(state, plans))
        ended = all(kernel == len(plan) for (kernel, _), plan in zip(state[0], plans, strict=True))
        assert following or ended, "somebody waits for ever"
        for other in following:
            if other not in seen:
                seen.add(other)
                open_states.append(other)
    return len(seen)


@pytest.mark.parametrize("steps", [(1, 1, 1), (2, 2), (1, 2, 1), (2, 1, 2), (3, 1), (1, 3)])
def test_two_ranks_in_all_orders(steps):
    """With one set of places, also where steps have other numbers of rows and of programs."""
    assert explore(2, steps) > 10


def test_three_ranks_in_all_orders():
    assert explore(3, (1, 1)) > 10


@pytest.mark.parametrize("phase", [DISPATCH, COMBINE])
def test_both_phases_have_to_wait(phase):
    with pytest.raises(AssertionError, match="belongs to another step"):
        explore(2, (1, 1), without={(phase, "wait")})


def test_what_lies_where():
    """Nothing overlaps, and all begins at a multiple of 256 bytes."""
    layout = exchange_layout(70, torch.bfloat16, 3, 5, 11, 10)
    places = 3 * 11
    pieces = [(0, places * 70 * 2), (layout.weights_at, places * 20), (layout.ids_at, places * 20)]
    pieces += [(layout.parts_at, places * 70 * 2), (layout.flags_at, 2 * layout.programs * 3 * 4)]
    ends = [*(start for start, _ in pieces[1:]), layout.nbytes]
    for (start, nbytes), end in zip(pieces, ends, strict=True):
        assert start % ALIGNMENT == 0 and start + nbytes <= end < start + nbytes + ALIGNMENT
    assert layout.programs == 40 and layout.programs_of(3) == 3 and layout.programs_of(41) == 40


def test_a_rank_sees_its_own_memory():
    layout = exchange_layout(6, torch.float16, 2, 3, 4, 2)
    memory, other = local_memories(layout, torch.device("cpu"))
    start = memory.links[0]
    found = [memory.x, memory.weights, memory.ids, memory.parts]
    assert [t.data_ptr() - start for t in found] == [0, layout.weights_at, layout.ids_at, layout.parts_at]
    assert [tuple(t.shape) for t in found] == [(8, 6), (8, 3), (8, 3), (8, 6)]
    assert [t.dtype for t in found] == [torch.float16, torch.float32, torch.int32, torch.float16]
    assert other.x.data_ptr() == memory.links[1] and memory.epochs.shape == (2, layout.programs)


@pytest.mark.parametrize("columns", [1, 64, 1000, 4096, 7168, 16384])
@pytest.mark.parametrize("size", [2, 8])
def test_all_programs_have_registers(columns, size):
    layout = exchange_layout(columns, torch.bfloat16, size, 8, 64, 132)
    each, program = layout.programs // 132, layout.program
    assert 1 <= each <= 4 and program.registers * program.num_warps * 32 * each <= 65536


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"dtype": torch.int32}, "dtype must be float16, bfloat16 or float32"),
        ({"columns": 0}, "columns must be from 1"),
        ({"columns": 1 << 15}, "columns must be from 1"),
        ({"top_k": 0}, "top_k must be from 1"),
        ({"rows": 0}, "size and rows must be at least 1"),
    ],
)
def test_bad_layouts(kwargs, names):
    good = {"columns": 8, "dtype": torch.float32, "size": 2, "top_k": 2, "rows": 3, "processors": 2}
    with pytest.raises(ValueError, match=names):
        exchange_layout(**(good | kwargs))
