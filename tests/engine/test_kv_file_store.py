"""The connector over files: what it answers, and what it does when it is closed."""

import fcntl
import os
import threading
import time

import numpy as np
import pytest
from support.waiting import PATIENCE, eventually

from tritonllm.engine.transfer import file_store as kv_file_store
from tritonllm.engine.transfer import folder as kv_folder
from tritonllm.engine.transfer.file_store import FileStore, FileStoreSettings
from tritonllm.engine.transfer.files import BlockFiles
from tritonllm.engine.transfer.folder import MARKER

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
    store, begun, begin = opened(tmp_path, threads=1), threading.Event(), threading.Event()
    first = store.save(KEYS[:1], [0], lambda: begun.set() or begin.wait(PATIENCE))
    rest = store.save(KEYS[1:4], [1, 2, 3], lambda: True)
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=store.close)
    closing.start()
    while store._ends > time.monotonic() + 2 * PATIENCE:  # it has begun
        time.sleep(1e-3)
    begin.set()
    closing.join(PATIENCE)
    assert first.result(PATIENCE) == 1  # it was being saved
    assert rest.result(PATIENCE) == opened(tmp_path).lookup(KEYS[1:], {}).result(PATIENCE) == (3 if patience else 0)


def results_of(store):
    """How many blocks are found, loaded and saved."""
    found = store.lookup(KEYS, {}).result(PATIENCE)
    came = store.load(KEYS, range(7), {}).result(PATIENCE)
    return found, sum(came), store.save(KEYS, range(7), lambda: True).result(PATIENCE)


def test_a_store_that_another_process_keeps_is_read_and_neither_stops_a_start_nor_an_end(tmp_path, monkeypatch, caplog):
    opened(tmp_path).save(KEYS[:3], [0, 1, 2], lambda: True).result(PATIENCE)
    monkeypatch.setattr(kv_folder, "PATIENCE", 0.01)
    with open(tmp_path / MARKER) as marker:
        fcntl.flock(marker, fcntl.LOCK_SH)
        store = opened(tmp_path)
        assert results_of(store) == (3, 3, 0)
        store.close()
    assert caplog.text.count(str(tmp_path / MARKER)) == 1


def test_a_store_that_cannot_be_used_is_once_it_can_be(tmp_path, monkeypatch, caplog):
    """Another process has begun it, and was stopped."""
    monkeypatch.setattr(kv_folder, "PATIENCE", 0.01)
    monkeypatch.setattr(kv_file_store, "AGAIN", 0.01)
    (tmp_path / MARKER).touch()
    with open(tmp_path / MARKER) as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        store = opened(tmp_path)
        assert results_of(store) == (0, 0, 0)
        assert "the engine goes on without the store" in caplog.text and str(tmp_path / MARKER) in caplog.text
        with pytest.raises(ValueError, match="holds not even two blocks"):
            store.check_size(1 << 50)
    monkeypatch.setattr(kv_folder, "PATIENCE", PATIENCE)  # the store's threads wait for one another
    eventually(lambda: store.files is not None)
    assert results_of(store)[2] == 7
    eventually(lambda: "can be used now" in caplog.text)
    store.close()


def test_a_disk_that_does_not_answer_stops_neither_a_start_nor_an_end(tmp_path, monkeypatch, caplog):
    answers, really = threading.Event(), os.mkdir

    def mkdir(*args, **more):
        answers.wait(PATIENCE)
        really(*args, **more)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(kv_file_store, "OPENING", 0.01)
    settings = FileStoreSettings(path=str(tmp_path / "store"))
    settings.check_folder()
    assert "has not answered for 0.01 s: it is not checked" in caplog.text
    store, ends = opened(tmp_path / "store"), opened(tmp_path / "store")
    assert caplog.text.count("has not answered for 0.01 s: the engine goes on without the store") == 2
    assert results_of(store) == (0, 0, 0)
    ends.close()
    answers.set()
    eventually(lambda: store.files is not None)
    assert results_of(store)[2] == 7


@pytest.mark.parametrize("what", ["read", "write"])
def test_an_end_does_not_wait_for_a_disk_that_does_not_answer(tmp_path, monkeypatch, caplog, what):
    monkeypatch.setattr(kv_file_store, "CLOSING", 0.01)
    monkeypatch.setattr(kv_file_store, "LEAVING", 0.01)
    answers, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(BlockFiles, what, lambda *args: begun.set() or answers.wait(PATIENCE))
    store = opened(tmp_path, threads=1)
    first = store.load(KEYS[:1], [0], {}) if what == "read" else store.save(KEYS[:1], [0], lambda: True)
    later = store.lookup(KEYS, {}) if what == "read" else store.save(KEYS[1:], range(1, 7), lambda: True)
    assert begun.wait(PATIENCE)
    store.close()
    assert "have not ended within 0.02 s: they are left" in caplog.text and str(tmp_path) in caplog.text
    assert later.cancelled() == (what == "read")
    assert store.load(KEYS, range(7), {}).result(PATIENCE) == [False] * 7  # asked too late
    assert store.save(KEYS, range(7), lambda: True).result(PATIENCE) == 0
    answers.set()
    assert first.result(PATIENCE) == ([True] if what == "read" else 1)
    assert what == "read" or later.result(PATIENCE) == 0


def test_a_pipe_at_a_blocks_place_is_a_miss(tmp_path):
    store = opened(tmp_path)
    path = store.files.path_of(KEYS[0])
    path.parent.mkdir()
    os.mkfifo(path)
    assert results_of(store) == (0, 0, 6)
    assert store.load(KEYS, range(7), {}).result(PATIENCE) == [False] + [True] * 6
    store.close()


def test_a_failure_that_nobody_expects_is_logged_and_a_miss(tmp_path, monkeypatch, caplog):
    store = opened(tmp_path)
    monkeypatch.setattr(BlockFiles, "read", lambda *args: 1 / 0)
    assert store.load(KEYS, range(7), {}).result(PATIENCE) == [False] * 7
    assert "were left out" in caplog.text and "ZeroDivisionError" in caplog.text


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for use in (opened, lambda folder: FileStoreSettings(path=folder).check_folder()):
        with pytest.raises(ValueError, match=r"kv_connector_extra_config: path=.*holds other files \(as 'notes.txt'\)"):
            use(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"access": "all"}, "access must be one of owner, group, got 'all'"),
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
