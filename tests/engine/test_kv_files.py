"""A folder of blocks: what is read is what was written, whatever happens to the files and to those who write them."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.examples import examples
from support.foreign_files import make_old, what_is
from support.waiting import PATIENCE

from tritonllm.engine.transfer import files as kv_files
from tritonllm.engine.transfer import folder as kv_folder
from tritonllm.engine.transfer.files import HEADER, BlockFiles
from tritonllm.engine.transfer.folder import HEAD, MARKER

KEY, OTHER = b"k" * 16, b"o" * 16
PARTS = b"keys and values", b"of a draft model"
SIZES = tuple(map(len, PARTS))
SIZE = HEADER.size + sum(SIZES)


def write(files, key=KEY, parts=PARTS):
    return files.write(key, [memoryview(part) for part in parts])


def read(files, key=KEY, sizes=SIZES):
    """The contents, or ``None``."""
    parts = [bytearray(size) for size in sizes]
    return tuple(map(bytes, parts)) if files.read(key, [memoryview(part) for part in parts]) else None


def of_age(files, key, seconds):
    """It was used so many seconds ago."""
    os.utime(files.path_of(key), (time.time() - seconds,) * 2)


def test_what_was_written_is_read_by_whoever_opens_the_folder(tmp_path):
    files = BlockFiles(tmp_path / "a" / "b", 10_000)
    assert not files.has(KEY) and read(files) is None
    assert write(files) and files.has(KEY) and read(files) == PARTS
    assert not write(files, parts=(b"others", b"")) and read(files) == PARTS  # a key says what the contents are
    assert not files.has(OTHER) and read(files, OTHER) is None
    assert [files.count(keys) for keys in ([], [KEY, KEY], [KEY, OTHER, KEY], [OTHER, KEY])] == [0, 2, 1, 0]
    later = BlockFiles(tmp_path / "a" / "b", 10_000)
    assert later.has(KEY) and read(later) == PARTS
    assert [entry.size for entry in later.entries()] == [SIZE]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"path=.*file.* cannot be written to"):
        BlockFiles(tmp_path / "file", 100)


def key_of(number):
    return bytes([number]) * 16


def plant_all(folder, elsewhere):
    """Files of others in a store, also at the places of blocks 1 to 5 and at those of files that are being written; a
    list of them."""
    store, group = BlockFiles(folder, 10**9), lambda number: folder / key_of(number).hex()[:2]
    block = b"tritonkv1" + bytes(100)
    for name in ("01" * 16, "en", "file"):
        (elsewhere / name).write_bytes(block)
    for name in ("size", "notes.txt", "new/notes.txt", "en/a.txt", "de/a.txt", "de/" + "ab" * 16, "de/" + "DE" * 16):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(block)
    planted = [folder / name for name in ("size", "notes.txt", "new/notes.txt", "en", "de")]
    group(1).symlink_to(elsewhere)
    for number in range(2, 6):
        group(number).mkdir()
    store.path_of(key_of(2)).symlink_to(elsewhere / "file")
    store.path_of(key_of(3)).mkdir()
    os.mkfifo(store.path_of(key_of(4)))
    store.path_of(key_of(5)).symlink_to(elsewhere / "nothing")
    planted += [group(1), *(store.path_of(key_of(number)) for number in range(2, 6))]
    (folder / "new" / ("0" * 32)).symlink_to(elsewhere / "file")
    (folder / "new" / ("1" * 32)).mkdir()
    os.mkfifo(folder / "new" / ("2" * 32))
    planted += [folder / "new" / (digit * 32) for digit in "012"]
    for path in [*elsewhere.iterdir(), *planted, *(folder / "de").iterdir(), *(folder / "en").iterdir()]:
        make_old(path)
    return planted


@pytest.mark.parametrize("max_age", [None, 1e-3])
def test_nothing_of_others_is_touched_whatever_it_is(tmp_path, max_age):
    """Neither when the store begins, nor for its limits, nor if it has the name of a block."""
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted = plant_all(folder, elsewhere)
    before = [what_is(path) for path in [elsewhere, *planted]]
    for limit in (10**6, 5 * SIZE, 1):
        files = BlockFiles(folder, limit, max_age)
        for _ in range(2):
            for number in range(30):
                written = write(files, key_of(number))
                assert not (written and 1 <= number <= 5)
                assert not (files.has(key_of(number)) and 1 <= number <= 5)
                assert read(files, key_of(number)) in (None, PARTS)
        assert [what_is(path) for path in [elsewhere, *planted]] == before
    assert [*files.entries()] == []
    assert sorted(path.name for path in (folder / "new").iterdir()) == [*(digit * 32 for digit in "012"), "notes.txt"]


def test_the_blocks_of_an_earlier_versions_store_can_be_kept(tmp_path):
    write(BlockFiles(tmp_path, 10**6))
    (tmp_path / MARKER).unlink()
    (tmp_path / "size").write_bytes(bytes(8))
    with pytest.raises(
        ValueError, match=r"holds other files .* If it is the store of an earlier version, empty it, or"
    ):
        BlockFiles(tmp_path, 10**6)
    (tmp_path / MARKER).touch()  # as the message says
    assert read(BlockFiles(tmp_path, 10**6)) == PARTS and (tmp_path / "size").read_bytes() == bytes(8)


def test_a_block_that_has_another_name_keeps_its_time(tmp_path):
    """A copy of the store by links is somebody else's."""
    files = BlockFiles(tmp_path / "store", 10**6)
    write(files)
    of_age(files, KEY, 2 * kv_files.TOUCH)
    os.link(files.path_of(KEY), tmp_path / "copy")
    before = what_is(tmp_path / "copy")
    assert read(files) == PARTS and not write(files)
    assert what_is(tmp_path / "copy") == before


def test_files_are_for_the_owner_or_the_group(tmp_path):
    for access, file, folder in (("owner", 0o600, 0o700), ("group", 0o660, 0o2770)):
        files = BlockFiles(tmp_path / access, 10**6, access=access)
        write(files)
        path = files.path_of(KEY)
        assert path.stat().st_mode & 0o7777 == file
        assert {one.stat().st_mode & 0o7777 for one in (path.parent, tmp_path / access, files.folder / "new")} == {
            folder
        }


@pytest.mark.parametrize("how", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_while_another_keeps_the_lock_blocks_are_read_and_not_saved(tmp_path, monkeypatch, caplog, how):
    monkeypatch.setattr(kv_folder, "PATIENCE", 0.01)
    write(BlockFiles(tmp_path, 10**6))
    with open(tmp_path / MARKER) as marker:
        fcntl.flock(marker, how)
        files = BlockFiles(tmp_path, 10**6)
        assert read(files) == PARTS
        assert not any(write(files, key_of(number)) for number in range(3))
        files._locked_until = 0.0  # later
        assert not write(files, OTHER)
    assert caplog.text.count("has had the lock on") == 1 and str(tmp_path / MARKER) in caplog.text
    assert not write(files, OTHER)  # not asked for yet
    files._locked_until = 0.0
    assert write(files, OTHER) and "the lock is free" in caplog.text
    assert [*(tmp_path / "new").iterdir()] == []


def test_a_stopped_process_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_folder, "PATIENCE", 0.01)
    code = """
import sys, time
from pathlib import Path
from tritonllm.engine.transfer.files import BlockFiles
with BlockFiles(Path(sys.argv[1]), 10**9)._lock():
    print("locked", flush=True)
    time.sleep(10**6)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"locked\n"
            os.kill(other.pid, signal.SIGSTOP)
            files = BlockFiles(tmp_path, 10**9)
            assert not write(files) and read(files) is None
        finally:
            other.kill()
    assert write(BlockFiles(tmp_path, 10**9))


@settings(max_examples=examples(60))
@given(data=st.data())
def test_damage_of_any_kind_is_a_miss(data):
    with TemporaryDirectory() as folder:
        files = BlockFiles(Path(folder), 10_000)
        write(files)
        path = files.path_of(KEY)
        good = path.read_bytes()
        kind = data.draw(st.sampled_from(["flipped", "cut", "longer", "anything", "another"]))
        if kind == "flipped":
            bad = bytearray(good)
            for bit in data.draw(st.sets(st.integers(0, 8 * len(good) - 1), min_size=1, max_size=4)):
                bad[bit // 8] ^= 1 << bit % 8
        elif kind == "cut":
            bad = good[: data.draw(st.integers(0, len(good) - 1))]
        elif kind == "longer":
            bad = good + data.draw(st.binary(min_size=1, max_size=20))
        elif kind == "anything":
            bad = data.draw(st.binary(max_size=2 * len(good)))
        else:  # a good file under another's name
            write(files, OTHER)
            bad = files.path_of(OTHER).read_bytes()
        path.write_bytes(bad)
        assert read(files) is None
        assert not path.exists()  # it does not stand in the way of a good one
        assert write(files) and read(files) == PARTS


def test_a_block_of_another_size_is_a_miss(tmp_path, caplog):
    files = BlockFiles(tmp_path, 10_000)
    write(files)
    assert read(files, sizes=(len(PARTS[0]), len(PARTS[1]) + 1)) is None
    assert "damaged, or of another kind" in caplog.text


def test_what_cannot_be_read_or_written_is_logged(tmp_path, caplog, monkeypatch):
    files = BlockFiles(tmp_path, 10_000)
    files.path_of(KEY).mkdir(parents=True)
    assert read(files) is None and "cannot be read" in caplog.text
    files.path_of(KEY).rmdir()

    def full(*args, **folders):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        assert not write(files) and "No space left on device" in caplog.text
    assert [*files.entries()] == [] and [*(tmp_path / "new").iterdir()] == []
    assert write(files) and read(files) == PARTS


def test_a_full_disk(tmp_path):
    """A real one: the limit on this process's files stands in for it."""
    code = """
import logging, resource, signal, sys
from pathlib import Path
from tritonllm.engine.transfer.files import BlockFiles
logging.basicConfig()
files = BlockFiles(Path(sys.argv[1]), 10**9)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
print([files.write(bytes([n]) * 16, [memoryview(bytes(size))]) for n, size in enumerate((4000, 6000, 4900))])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, False, True]", done.stderr
    assert "cannot be saved" in done.stderr
    assert sorted(entry.size for entry in BlockFiles(tmp_path, 10**9).entries()) == [
        4000 + HEADER.size,
        4900 + HEADER.size,
    ]
    assert [*(tmp_path / "new").iterdir()] == []


def test_the_ones_used_longest_ago_go_first(tmp_path):
    files = BlockFiles(tmp_path, 10 * SIZE)
    keys = [bytes([n]) * 16 for n in range(11)]
    for age, key in enumerate(reversed(keys[:10])):
        assert write(files, key)
        of_age(files, key, 100 + age)  # the first one is the oldest
    assert read(files, keys[0]) == PARTS  # used now
    assert write(files, keys[10])
    assert [files.has(key) for key in keys] == [True, False, False, *[True] * 8]  # 0.9 of the limit are left
    assert not write(files, OTHER, (bytes(10 * SIZE),))  # which no folder of this size holds
    assert len([*files.entries()]) == 9


def test_old_ones_are_neither_read_nor_kept(tmp_path):
    files = BlockFiles(tmp_path, 10_000, max_age=60.0)
    write(files)
    write(files, OTHER)
    of_age(files, KEY, 50)
    assert read(files) == PARTS
    of_age(files, KEY, 59)
    assert files.has(KEY)
    of_age(files, KEY, 61)
    assert not files.has(KEY) and read(files) is None
    assert BlockFiles(tmp_path, 10_000).has(KEY)  # no limit, no age
    assert [entry.path for entry in BlockFiles(tmp_path, 10_000, max_age=60.0).entries()] == [files.path_of(OTHER)]


def test_a_use_makes_a_block_young_again(tmp_path):
    files = BlockFiles(tmp_path, 10_000)
    write(files)
    for use in (read, write):
        of_age(files, KEY, 2 * kv_files.TOUCH)
        use(files)
        assert next(files.entries()).used > time.time() - kv_files.TOUCH


def test_several_processes_keep_to_one_limit_and_to_what_is_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_folder, "PATIENCE", PATIENCE)
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted = [elsewhere, *plant_all(folder, elsewhere)]
    before = [what_is(path) for path in planted]
    code = """
import sys
from pathlib import Path
from tritonllm.engine.transfer import folder as kv_folder
from tritonllm.engine.transfer.files import BlockFiles
kv_folder.PATIENCE = float(sys.argv[3])
files = BlockFiles(Path(sys.argv[1]), 50_000)
for n in range(200):
    files.write(bytes([int(sys.argv[2]), n]) * 8, [memoryview(bytes(936))])
"""
    command = [sys.executable, "-c", code, str(folder)]
    writers = [subprocess.Popen([*command, str(n), str(PATIENCE)]) for n in range(3)]
    files = BlockFiles(folder, 50_000)
    while any(writer.poll() is None for writer in writers):
        with files._lock():  # nobody removes what was counted
            assert sum(entry.size for entry in files.entries()) <= 50_000
    assert all(writer.returncode == 0 for writer in writers)
    sizes = [entry.size for entry in files.entries()]
    assert 35_000 <= sum(sizes) <= 50_000 and set(sizes) == {936 + HEADER.size}
    assert [what_is(path) for path in planted] == before


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_wrong(tmp_path):
    code = """
import sys
from pathlib import Path
from tritonllm.engine.transfer.files import BlockFiles
files = BlockFiles(Path(sys.argv[1]), 10**9)
for n in range(10**6):
    files.write(n.to_bytes(16, "big"), [memoryview(n.to_bytes(8, "big") * 25_000)])
    if n == 3:
        print("begun", flush=True)
"""
    checked = 0
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"begun\n"
            time.sleep(0.003 * attempt)
            os.kill(writer.pid, signal.SIGKILL)
        files = BlockFiles(folder, 10**9)  # the lock is free
        for entry in [*files.entries()]:
            number = int(entry.path.name, 16)
            assert read(files, number.to_bytes(16, "big"), (200_000,)) == (number.to_bytes(8, "big") * 25_000,)
            checked += 1
        for left in (folder / "new").iterdir():
            os.utime(left, (time.time() - 2 * kv_files.ABANDONED,) * 2)
        BlockFiles(folder, 10**9)
        assert [*(folder / "new").iterdir()] == []
    assert checked >= 9


class FilesBesideAModel(RuleBasedStateMachine):
    """Two openers of one folder beside a dictionary; damage, removal and new openings at any time, files, links and
    pipes of others at the places of blocks and elsewhere, and a lock that somebody keeps. What is read is what was
    written for that key, with room for all nothing is missing that nobody has taken away, and what is not the store's
    stays as it is."""

    @initialize(room=st.sampled_from([6, 1000]))
    def start(self, room):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(kv_folder, "PATIENCE", 0.0)
        self.patch.setattr(kv_files, "LOCKED", 0.0)
        self.root = TemporaryDirectory()
        self.folder, self.elsewhere = Path(self.root.name) / "store", Path(self.root.name) / "elsewhere"
        self.elsewhere.mkdir()
        for name in ["file", *(key_of(number).hex() for number in range(10))]:
            (self.elsewhere / name).write_bytes(b"tritonkv1" + bytes(SIZE - 9))
            make_old(self.elsewhere / name)
        self.limit, self.room = room * SIZE, room
        self.openers = [BlockFiles(self.folder, self.limit) for _ in range(2)]
        self.there, self.foreign, self.holder = set(), {self.elsewhere: what_is(self.elsewhere)}, None

    def contents(self, number):
        return tuple(bytes([number]) * len(part) for part in PARTS)

    def place(self, number):
        return self.openers[0].path_of(key_of(number))

    def is_planted(self, number):
        return not {self.place(number), self.place(number).parent}.isdisjoint(self.foreign)

    @rule(who=st.integers(0, 1), number=st.integers(0, 9))
    def write(self, who, number):
        new = write(self.openers[who], key_of(number), self.contents(number))
        if self.is_planted(number) or self.holder is not None:
            assert not new
        elif self.room == 1000:
            assert new == (number not in self.there)
        if new:
            self.there.add(number)

    @rule(who=st.integers(0, 1), number=st.integers(0, 9))
    def read(self, who, number):
        found = read(self.openers[who], key_of(number))
        assert found in (None, self.contents(number)) and (found is None or number in self.there)
        assert found is not None or number not in self.there or self.room < 1000

    @rule(number=st.integers(0, 9), at=st.integers(0, SIZE - 1))
    def damage(self, number, at):
        if self.is_planted(number):
            return
        with suppress(FileNotFoundError):
            data = bytearray(self.place(number).read_bytes())
            data[at] ^= 1
            self.place(number).write_bytes(data)
            assert read(self.openers[0], key_of(number)) is None
        self.there.discard(number)

    @rule(number=st.integers(0, 9))
    def remove(self, number):
        if not self.is_planted(number):
            self.place(number).unlink(missing_ok=True)
            self.there.discard(number)

    @rule(who=st.integers(0, 1))
    def open_again(self, who):
        self.openers[who] = BlockFiles(self.folder, self.limit)

    @rule(number=st.integers(0, 9), kind=st.sampled_from(["link", "lost link", "pipe", "folder", "linked folder"]))
    def plant_at_a_block(self, number, kind):
        path = self.place(number)
        if self.is_planted(number) or any(one.parent == path.parent for one in self.foreign):
            return
        shutil.rmtree(path.parent, ignore_errors=True)
        self.there.discard(number)
        if kind == "linked folder":
            path = path.parent
            path.symlink_to(self.elsewhere)
        else:
            path.parent.mkdir()
            if kind in ("link", "lost link"):
                path.symlink_to(self.elsewhere / ("file" if kind == "link" else "nothing"))
            else:
                (os.mkfifo if kind == "pipe" else os.mkdir)(path)
        make_old(path)
        self.foreign[path] = what_is(path)

    @rule(
        name=st.sampled_from(["size", "en", "de/a.txt", "00/x", "new/x", "new/" + 31 * "0", "0A/" + 16 * "0A"]),
        content=st.binary(max_size=20),
    )
    def plant_beside(self, name, content):
        path = self.folder / name
        if self.folder / "00" not in self.foreign and path not in self.foreign:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            make_old(path)
            self.foreign[path] = what_is(path)

    @rule(how=st.sampled_from([fcntl.LOCK_EX, fcntl.LOCK_SH]))
    def hold_the_lock(self, how):
        if self.holder is None:
            self.holder = open(self.folder / MARKER)  # noqa: SIM115 - until it is let go
            fcntl.flock(self.holder, how)

    @rule()
    def let_the_lock_go(self):
        if self.holder is not None:
            self.holder.close()
            self.holder = None

    @rule(count=st.sampled_from([b"", b"\xff" * 21, b"%020d\n" % 0, b"abc"]))
    def damage_the_count(self, count):
        if self.room == 1000:
            path = self.folder / MARKER
            path.write_bytes(HEAD + count)

    @invariant()
    def bounded(self):
        if hasattr(self, "openers"):
            assert sum(entry.size for entry in self.openers[0].entries()) <= self.limit
            assert {path: what_is(path) for path in self.foreign} == self.foreign

    def teardown(self):
        if hasattr(self, "root"):
            self.let_the_lock_go()
            self.patch.undo()
            self.root.cleanup()


TestFilesBesideAModel = FilesBesideAModel.TestCase
