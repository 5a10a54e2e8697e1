"""A folder of blocks: what is read is what was written, whatever happens to the files and to those who write them."""

import os
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

from tritonllm.engine import kv_files
from tritonllm.engine.kv_files import HEADER, BlockFiles

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
    later = BlockFiles(tmp_path / "a" / "b", 10_000)
    assert later.has(KEY) and read(later) == PARTS
    assert [entry.size for entry in later.entries()] == [SIZE]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"path=.*file.* cannot be written to"):
        BlockFiles(tmp_path / "file", 100)


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

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        assert not write(files) and "No space left on device" in caplog.text
    assert [*files.entries()] == [] and [*(tmp_path / "new").iterdir()] == []
    assert write(files) and read(files) == PARTS


def test_a_full_disk(tmp_path):
    """A real one: the limit on this process's files stands in for it."""
    code = """
import logging, resource, signal, sys
from pathlib import Path
from tritonllm.engine.kv_files import BlockFiles
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


def test_several_processes_keep_to_one_limit(tmp_path):
    code = """
import sys
from pathlib import Path
from tritonllm.engine.kv_files import BlockFiles
files = BlockFiles(Path(sys.argv[1]), 50_000)
for n in range(200):
    files.write(bytes([int(sys.argv[2]), n]) * 8, [memoryview(bytes(936))])
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(n)]) for n in range(3)]
    files = BlockFiles(tmp_path, 50_000)
    while any(writer.poll() is None for writer in writers):
        with files._lock():  # nobody removes what was counted
            assert sum(entry.size for entry in files.entries()) <= 50_000
    assert all(writer.returncode == 0 for writer in writers)
    sizes = [entry.size for entry in files.entries()]
    assert 35_000 <= sum(sizes) <= 50_000 and set(sizes) == {936 + HEADER.size}


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_wrong(tmp_path):
    code = """
import sys
from pathlib import Path
from tritonllm.engine.kv_files import BlockFiles
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
    """Two openers of one folder beside a dictionary; damage, removal and new openings at any time. What is read is what
    was written for that key, and with room for all, nothing is missing that nobody has taken away."""

    @initialize(room=st.sampled_from([6, 1000]))
    def start(self, room):
        self.folder = TemporaryDirectory()
        self.limit, self.room = room * SIZE, room
        self.openers = [BlockFiles(Path(self.folder.name), self.limit) for _ in range(2)]
        self.there = set()

    def contents(self, number):
        return tuple(bytes([number]) * len(part) for part in PARTS)

    @rule(who=st.integers(0, 1), number=st.integers(0, 9))
    def write(self, who, number):
        new = write(self.openers[who], bytes([number]) * 16, self.contents(number))
        if self.room == 1000:
            assert new == (number not in self.there)
        self.there.add(number)

    @rule(who=st.integers(0, 1), number=st.integers(0, 9))
    def read(self, who, number):
        found = read(self.openers[who], bytes([number]) * 16)
        assert found in (None, self.contents(number)) and (found is None or number in self.there)
        assert found is not None or number not in self.there or self.room < 1000

    @rule(number=st.integers(0, 9), at=st.integers(0, SIZE - 1))
    def damage(self, number, at):
        path = self.openers[0].path_of(bytes([number]) * 16)
        with suppress(FileNotFoundError):
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)
            assert read(self.openers[0], bytes([number]) * 16) is None
        self.there.discard(number)

    @rule(number=st.integers(0, 9))
    def remove(self, number):
        self.openers[0].path_of(bytes([number]) * 16).unlink(missing_ok=True)
        self.there.discard(number)

    @rule(who=st.integers(0, 1))
    def open_again(self, who):
        self.openers[who] = BlockFiles(Path(self.folder.name), self.limit)

    @rule(size=st.sampled_from([b"", b"\xff" * 8, b"\0" * 8, b"abc"]))
    def damage_the_size(self, size):
        if self.room == 1000:
            (Path(self.folder.name) / "size").write_bytes(size)

    @invariant()
    def bounded(self):
        if hasattr(self, "openers"):
            assert sum(entry.size for entry in self.openers[0].entries()) <= self.limit

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestFilesBesideAModel = FilesBesideAModel.TestCase
