"""Blocks that are kept for others: which, how many bytes, and who waits for them."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waiting import PATIENCE

from tritonllm.engine.transfer import kept as kv_kept
from tritonllm.engine.transfer.kept import KeptBlocks

KEYS = [bytes([n]) * 16 for n in range(8)]
PUT, GET, COUNT = range(3)


def put(kept, number, size=4):
    return kept.put(KEYS[number], b"head", bytes([number]) * size)


def count(kept, *numbers):
    return kept.count([KEYS[number] for number in numbers], 0.0)


@settings(deadline=None)
@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.sampled_from([PUT, GET, COUNT]), st.integers(0, 7), st.integers(1, 9)), max_size=40),
)
def test_the_least_recently_used_ones_go_first_and_the_limit_holds(max_bytes, steps):
    kept, model = KeptBlocks(max_bytes), {}  # the model's last entry is the one used last
    for kind, number, size in steps:
        if kind == PUT:
            new = number not in model and size <= max_bytes
            assert put(kept, number, size) == new
            if number in model or new:
                model[number] = model.pop(number, size)
            while sum(model.values()) > max_bytes:
                del model[next(iter(model))]
        elif kind == GET:
            found = kept.get(KEYS[number], 0.0)
            assert (None if found is None else found.contents) == (
                bytes([number]) * model[number] if number in model else None
            )
            if number in model:
                model[number] = model.pop(number)
        else:
            leading = [n for n in range(number, 8) if all(m in model for m in range(number, n + 1))]
            assert count(kept, *range(number, 8)) == len(leading)
            for n in reversed(leading):
                model[n] = model.pop(n)
        assert (len(kept), kept.num_bytes) == (len(model), sum(model.values()))


def test_old_blocks_are_forgotten(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(kv_kept.time, "monotonic", lambda: now[0])
    kept = KeptBlocks(100, max_age=10.0)
    put(kept, 0)
    put(kept, 1)
    now[0] = 108.0
    assert kept.has(KEYS[0])  # it is used now
    now[0] = 111.0
    assert kept.get(KEYS[1], 0.0) is None and count(kept, 0, 1) == 1
    assert len(kept) == 1


@pytest.mark.parametrize("ask", ["get", "count"])
def test_who_waits_gets_it_when_it_comes(ask):
    kept, found = KeptBlocks(100), []
    put(kept, 0)

    def wait():
        until = time.monotonic() + PATIENCE
        found.append(kept.get(KEYS[1], until) if ask == "get" else kept.count(KEYS[:2], until))

    thread = threading.Thread(target=wait)
    thread.start()
    put(kept, 2)
    assert not found
    put(kept, 1)
    thread.join(PATIENCE)
    assert (found[0].contents == bytes([1]) * 4) if ask == "get" else found == [2]


def test_nobody_waits_for_one_that_is_closed():
    kept, found = KeptBlocks(100), []
    threads = [
        threading.Thread(target=lambda: found.append(kept.get(KEYS[1], time.monotonic() + 600))),
        threading.Thread(target=lambda: found.append(kept.count(KEYS, time.monotonic() + 600))),
    ]
    put(kept, 0)
    for thread in threads:
        thread.start()
    kept.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(found, key=repr) == [0, None] and not put(kept, 3) and kept.num_bytes == 0


def test_whoever_gave_a_place_hears_that_it_is_free():
    gone = []
    kept = KeptBlocks(8, None, lambda one: gone.append(one.place))
    for number in (0, 1, 2):
        assert kept.put(KEYS[number], b"head", b"1234", place=10 + number)
    assert gone == [10]  # there was no room for it
    assert not kept.put(KEYS[1], b"head", b"1234", place=13) and not kept.put(KEYS[5], b"head", b"123456789", place=14)
    assert gone == [10, 13, 14]  # not taken
    assert kept.get(KEYS[1], 0.0).place == 11
    kept.close()
    assert sorted(gone) == [10, 11, 12, 13, 14] and kept.num_bytes == 0


def test_what_was_found_is_still_there_until_it_is_given_up():
    kept = KeptBlocks(12, max_age=1e6)
    for number in range(3):
        kept.put(KEYS[number], b"%d" % number, b"", place=number, size=4)
    found = kept.find(KEYS[:4])
    assert [one and one.place for one in found] == [0, 1, 2, None] and kept.num_bytes == 12
    assert kept.still(KEYS[:4], found) == [True, True, True, False]
    kept.has(KEYS[0])  # to be used is no change
    assert kept.still(KEYS[:4], found) == [True, True, True, False]
    kept.put(KEYS[3], b"3", b"", place=2, size=4)  # instead of the last one: of a sequence the end goes first
    assert kept.still(KEYS[:4], found) == [True, True, False, False]
    kept.put(KEYS[2], b"4", b"", place=1, size=4)
    assert kept.still(KEYS[:4], found) == [True, False, False, False]
    kept.put(KEYS[1], b"5", b"", place=1, size=4)
    assert kept.still(KEYS[1:2], found[1:2]) == [False]  # at the same place, after another one


def test_room_is_made_and_who_goes_is_told():
    gone = []
    kept = KeptBlocks(12, gone=lambda one: gone.append(one.place))
    for number in range(3):
        kept.put(KEYS[number], b"", b"", place=number, size=4)
    kept.make_room(0)
    assert gone == []
    kept.make_room(5)
    assert gone == [0, 1] and kept.num_bytes == 4
    kept.make_room(100)
    assert gone == [0, 1, 2] and not len(kept)
