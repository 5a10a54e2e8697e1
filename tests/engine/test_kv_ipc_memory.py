"""How a piece of a GPU's memory is described, and which copies blocks take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.transfer.connector import DeviceSlots
from tritonllm.engine.transfer.ipc_memory import SharedArena, arena_bytes, runs_of
from tritonllm.engine.transfer.wire import WireError


def test_a_description_is_whole_or_refused():
    arena = SharedArena(77, b"n" * 16, b"h" * 64, 9, (24, 5))
    data = arena.pack()
    assert SharedArena.unpack(data) == arena and arena.offsets == [0, 512]
    for bad in (b"", data[:-1], data + b"x", b"x" + data[1:], data[:40]):
        with pytest.raises(WireError):
            SharedArena.unpack(bad)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_runs_are_the_pairs(pairs):
    slots, places = (np.array([pair[at] for pair in pairs], np.int64) for at in (0, 1))
    found = runs_of(slots, places)
    assert [(slot + i, place + i) for slot, place, count in found for i in range(count)] == pairs
    ends = [(slot + count, place + count) for slot, place, count in found]
    assert not any(end == start[:2] for end, start in zip(ends, found[1:], strict=False))


def test_a_block_has_its_parts_where_those_of_all_places_are():
    arena = SharedArena(1, b"n" * 16, b"h" * 64, 30, (24, 5))
    assert arena.offsets == [0, 1024] and arena_bytes(30, (24, 5)) == 1536
    slots = [DeviceSlots(10_000, (9, 24), None, None), DeviceSlots(20_000, (9, 5), None, None)]
    pairs = np.array([3, 4, 0]), np.array([7, 8, 9])
    assert arena.spans(50_000, slots, pairs, into_slots=True) == [
        (10_000 + 3 * 24, 50_000 + 7 * 24, 48),
        (10_000, 50_000 + 9 * 24, 24),
        (20_000 + 3 * 5, 51_024 + 7 * 5, 10),
        (20_000, 51_024 + 9 * 5, 5),
    ]
    there = arena.spans(50_000, slots, pairs, into_slots=False)
    assert there == [(b, a, n) for a, b, n in arena.spans(50_000, slots, pairs, into_slots=True)]
