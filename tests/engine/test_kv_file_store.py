"""The connector over files: what it answers, and what it does when it is closed."""

import threading
import time

import numpy as np
import pytest
from support.waiting import PATIENCE

from tritonllm.engine import kv_file_store
from tritonllm.engine.kv_file_store import FileStore, FileStoreSettings

KEYS = [bytes([n]) * 16 for n in range(7)]


def memory(fill=0):
    """7 slots, each with its number plus ``fill`` everywhere."""
    numbers = np.arange(7, dtype=np.uint8)[:, None] + np.uint8(fill)
    return [np.repeat(numbers, size, axis=1) for size in (24, 5)]


def opened(folder, slots=None, **settings):
    store = FileStore(FileStoreSettings(path=folder if folder is None else str(folder), **settings))
    store.register(memory() if slots is None else slots)
    return store


@pytest.mark.parametrize("threads", [1, 3, 9])
def test_blocks_go_from_slots_to_slots(tmp_path, threads):
    first, there = opened(tmp_path, threads=threads), memory(100)
    assert first.lookup(KEYS, {}).result(PATIENCE) == 0
    assert first.save(KEYS[:5], [4, 3, 2, 1, 0], lambda: True).result(PATIENCE) == 5
    assert first.save(KEYS[:5], [4, 3, 2, 1, 0], lambda: True).result(PATIENCE) == 0  # they are there
    second = opened(tmp_path, there, threads=threads)
    assert second.lookup(KEYS, {}).result(PATIENCE) == 5
    assert second.lookup(KEYS[5:] + KEYS, {}).result(PATIENCE) == 0  # only leading ones are of use
    assert second.load(KEYS, [0, 1, 2, 3, 4, 5, 6], {}).result(PATIENCE) == [True] * 5 + [False] * 2
    assert [part[:5, 0].tolist() for part in there] == [[4, 3, 2, 1, 0]] * 2
    assert all((part[:5] == part[:5, :1]).all() for part in there)
    assert second.load([], [], {}).result(PATIENCE) == [] and second.save([], [], lambda: True).result(PATIENCE) == 0


def test_what_is_not_in_its_slot_is_not_saved(tmp_path):
    store = opened(tmp_path)
    assert store.save(KEYS[:2], [0, 1], lambda: False).result(PATIENCE) == 0
    assert store.lookup(KEYS, {}).result(PATIENCE) == 0


@pytest.mark.parametrize("patience", [PATIENCE, 0.0])
def test_closing_saves_what_waits_but_not_for_ever(tmp_path, monkeypatch, patience):
    monkeypatch.setattr(kv_file_store, "CLOSING", patience)
    store, begin = opened(tmp_path, threads=1), threading.Event()
    first = store.save(KEYS[:1], [0], lambda: begin.wait(PATIENCE))
    rest = store.save(KEYS[1:4], [1, 2, 3], lambda: True)
    closing = threading.Thread(target=store.close)
    closing.start()
    while store._ends > time.monotonic() + 2 * PATIENCE:  # it has begun
        time.sleep(1e-3)
    begin.set()
    closing.join(PATIENCE)
    assert first.result(PATIENCE) == 1  # it was being saved
    assert rest.result(PATIENCE) == opened(tmp_path).lookup(KEYS[1:], {}).result(PATIENCE) == (3 if patience else 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": None}, "path must be the folder for FileStore's blocks, got None"),
        ({"path": " "}, "path must be the folder"),
        ({"max_bytes": 0}, "max_bytes must be an integer of at least 1"),
        ({"max_bytes": None}, "max_bytes must be an integer of at least 1"),
        ({"threads": 0}, "threads must be an integer of at least 1"),
        ({"max_age": 0}, "max_age must be a number of seconds above 0"),
        ({"max_age": True}, "max_age must be a number of seconds above 0"),
        ({"max_bytes": 57}, "max_bytes=57 holds not even two blocks of 29 bytes"),
    ],
)
def test_bad_settings(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        opened(**{"folder": tmp_path} | {"folder" if key == "path" else key: value for key, value in settings.items()})
