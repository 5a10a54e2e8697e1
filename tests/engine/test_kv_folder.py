"""A folder of several processes: whose it is, who may read it, and how long somebody waits for it."""

import fcntl
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.foreign_files import make_old, what_is
from support.waiting import PATIENCE

from tritonllm.engine.transfer import folder as kv_folder
from tritonllm.engine.transfer.folder import HEAD, MARKER, StoreFolder, check_folder, claim, claimed_of


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def held(path, how):
    """Somebody else has the lock on this file."""
    file = os.open(path, os.O_RDWR)
    fcntl.flock(file, how)
    try:
        yield
    finally:
        os.close(file)


def mode_of(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.mark.parametrize(
    ("access", "mask", "file", "folder"), [("owner", 0o000, 0o600, 0o700), ("group", 0o077, 0o660, 0o2770)]
)
def test_what_is_made_is_for_its_owner_or_its_group(tmp_path, access, mask, file, folder):
    with umask(mask):
        path = tmp_path / "a" / "store"
        store = StoreFolder(path, access)
        with store.inner("new", make=True) as new:
            os.close(store.create("x", new))
    assert [mode_of(one) for one in (path, path / "new")] == [folder] * 2
    assert [mode_of(one) for one in (path / MARKER, path / "new" / "x")] == [file] * 2


def test_a_folder_of_ones_own_keeps_its_permissions(tmp_path):
    tmp_path.chmod(0o755)
    StoreFolder(tmp_path)
    assert mode_of(tmp_path) == 0o755 and mode_of(tmp_path / MARKER) == 0o600


def old_store(folder):
    (folder / "size").write_bytes(bytes(8))
    (folder / "new").mkdir()
    (folder / "ab").mkdir()
    (folder / "ab" / ("ab" * 16)).write_bytes(b"tritonkv1")


FOREIGN = {
    "a file": lambda folder: (folder / "size").write_bytes(b"12345678 and more"),
    "a folder": lambda folder: (folder / "en").mkdir(),
    "a link": lambda folder: (folder / "new").symlink_to(".."),
    "an earlier version's": old_store,
    "another version's": lambda folder: (folder / MARKER).write_bytes(HEAD.replace(b"1", b"2")),
    "another marker": lambda folder: (folder / MARKER).write_bytes(b"mine"),
    "a link for a marker": lambda folder: (folder / MARKER).symlink_to(folder.parent / "elsewhere"),
    "a pipe for a marker": lambda folder: os.mkfifo(folder / MARKER),
    "a folder for a marker": lambda folder: (folder / MARKER).mkdir(),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_folder_with_other_contents_is_refused_and_left_as_it_is(tmp_path, kind):
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_bytes(b"")
    FOREIGN[kind](folder)
    for path in folder.rglob("*"):
        make_old(path)
    before = what_is(tmp_path)
    for refuse in (StoreFolder, check_folder):
        with pytest.raises((ValueError, OSError), match=r"store' |tritonllm-kv-store"):
            refuse(folder)
    assert what_is(tmp_path) == before


def test_a_user_says_that_a_folder_may_be_used(tmp_path):
    old_store(tmp_path)
    with pytest.raises(ValueError, match=f"keep its blocks: `touch {tmp_path / MARKER}`"):
        StoreFolder(tmp_path)
    (tmp_path / MARKER).touch()
    StoreFolder(tmp_path)
    assert (tmp_path / MARKER).read_bytes().startswith(HEAD)


def test_a_marker_that_has_another_name_is_not_written_to(tmp_path):
    other = tmp_path / "other"
    other.touch()
    (tmp_path / "store").mkdir()
    os.link(other, tmp_path / "store" / MARKER)
    with pytest.raises(ValueError, match="has another name elsewhere: remove it"):
        StoreFolder(tmp_path / "store")
    assert other.read_bytes() == b""


def test_a_disk_of_its_own_counts_as_empty(tmp_path):
    (tmp_path / "lost+found").mkdir()
    check_folder(tmp_path)
    StoreFolder(tmp_path)


def test_a_check_leaves_nothing(tmp_path):
    check_folder(tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == []
    StoreFolder(tmp_path / "a")
    check_folder(tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / MARKER]


@pytest.mark.parametrize("left", [b"", HEAD[:7]])
def test_a_marker_that_was_not_finished_is(tmp_path, left):
    (tmp_path / MARKER).write_bytes(left)
    with StoreFolder(tmp_path).lock() as marker:
        assert claimed_of(marker) is None  # whoever claims measures first
    assert (tmp_path / MARKER).read_bytes() == HEAD


def test_what_was_claimed(tmp_path):
    with StoreFolder(tmp_path).lock() as marker:
        claim(marker, 1 << 50)
    with StoreFolder(tmp_path).lock() as marker:
        assert claimed_of(marker) == 1 << 50
        for damage in (b"", b"x", b"-0000000000000000001\n", b"\0" * 21):
            os.ftruncate(marker, len(HEAD))
            os.pwrite(marker, damage, len(HEAD))
            assert claimed_of(marker) is None


def test_many_begin_at_once(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        for n in range(5):
            begin = threading.Barrier(8)

            def start(path, begin=begin):
                begin.wait(PATIENCE)
                check_folder(path)
                return StoreFolder(path)

            stores = list(threads.map(start, [tmp_path / str(n)] * 8))
            assert len({store._identity for store in stores}) == 1


@pytest.mark.parametrize("how", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_a_lock_is_not_waited_for_without_an_end(tmp_path, monkeypatch, how):
    monkeypatch.setattr(kv_folder, "PATIENCE", 0.01)
    store = StoreFolder(tmp_path)
    with held(tmp_path / MARKER, how):
        with pytest.raises(TimeoutError, match=f"has had the lock on {tmp_path / MARKER} for 0.01 s"), store.lock():
            pass
        StoreFolder(tmp_path)  # it is marked: nobody's lock is needed
    with store.lock(), pytest.raises(TimeoutError, match="another thread"), store.lock():  # which this could be
        pass
    with store.lock():
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MARKER).touch()
    with held(tmp_path / "other" / MARKER, how), pytest.raises(TimeoutError, match="the lock on"):
        StoreFolder(tmp_path / "other")


def test_another_folder_in_its_place_is_not_used(tmp_path):
    store, folder = StoreFolder(tmp_path / "store"), tmp_path / "store"
    folder.rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError), store.root():
        pass
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    for use in (store.root, lambda: store.inner("new", make=True), store.lock):
        with pytest.raises(OSError, match="is not the folder that it was at the start"), use():
            pass
    assert list((tmp_path / "elsewhere").iterdir()) == []
    folder.unlink()
    folder.symlink_to(tmp_path / "gone")
    with store.inner("new", make=True), store.lock():
        pass  # it is the same folder: a user may move it


@pytest.mark.parametrize("plant", [lambda path: path.symlink_to(".."), os.mkfifo, Path.touch])
def test_a_folder_in_it_is_no_link_and_no_file(tmp_path, plant):
    store = StoreFolder(tmp_path)
    plant(tmp_path / "ab")
    for make in (False, True):
        with pytest.raises(OSError, match="'ab'"), store.inner("ab", make=make):
            pass


def test_a_marker_that_is_gone_is_not_made_again(tmp_path):
    store = StoreFolder(tmp_path)
    (tmp_path / MARKER).unlink()
    with pytest.raises(FileNotFoundError), store.lock():
        pass
    assert list(tmp_path.iterdir()) == []
