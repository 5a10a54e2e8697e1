"""A folder of blocks: one file for each, named by its key, which several processes share. No torch.

- **Whole or absent.** A file is written under another name and renamed. What a killed process left is removed later.
- **Checked.** A header repeats key and length, and a checksum (xxh3, 128 bits) covers header and contents. A file that
  does not agree is removed and counts as absent. So the disk may take things in any order, and nothing is synced.
- **Bounded.** The folder's file ``size`` holds the bytes that all processes have claimed. Who claims more than the
  limit measures what is there and removes what was used longest ago. The lock on that file goes with a process that
  dies.
- **Never in the way.** Whatever the disk says is logged, and is a miss or a block that was not saved.

Files are trusted as far as their folder is: a checksum finds damage, not forgery.
"""

import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple
from uuid import uuid4

import xxhash

logger = logging.getLogger(__name__)
MAGIC = b"tritonkv1\0\0\0\0\0\0\0"
HEADER = struct.Struct("<16s16sQ16s")  # magic, key, bytes of the contents, checksum
CLAIMED = struct.Struct("<q")
KEY_BYTES = 16
ABANDONED = 600.0  # seconds after which a file that is being written is nobody's any more
KEPT = 0.9  # of the limit, after old files were removed
TOUCH = 60.0  # seconds within which a second use of a file is not noted


class Entry(NamedTuple):
    """A file: when it was used last, its size in bytes and where it is."""

    used: float
    size: int
    path: Path


class BlockFiles:
    """The files of a folder.

    Args:
        folder: is made if it is not there.
        max_bytes: of all files together, those of other models in the folder included.
        max_age: seconds after its last use that a file may be read; ``None`` for ever.

    Raises:
        ValueError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, max_bytes: int, max_age: float | None = None) -> None:
        self.folder, self.max_bytes, self.max_age = folder, max_bytes, max_age
        self._new = folder / "new"
        with written_to(folder):
            self._new.mkdir(parents=True, exist_ok=True)
            with self._lock() as size:
                self._measure(size, 0)

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name

    def has(self, key: bytes) -> bool:
        """Whether there is such a file, which may still turn out to be bad."""
        try:
            return not self._is_old(self.path_of(key).stat().st_mtime)
        except OSError:
            return False

    def read(self, key: bytes, into: Sequence[memoryview]) -> bool:
        """Fill these with a block's contents; false, and they hold anything, if it is not there as it was written."""
        path = self.path_of(key)
        try:
            with open(path, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                if self._is_old(status.st_mtime):
                    return False
                header = file.read(HEADER.size)
                whole = status.st_size == HEADER.size + sum(part.nbytes for part in into)
                whole = whole and all(file.readinto(part) == part.nbytes for part in into)
            if whole and header == _header(key, into):
                if time.time() - status.st_mtime > TOUCH:
                    os.utime(path)
                return True
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("the block in %s cannot be read (%s): it is computed", path, error)
            return False
        logger.warning("the block in %s is damaged, or of another kind: it is removed and computed", path)
        self._remove(path)
        return False

    def write(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Keep a block; false if it is there already, or cannot be kept."""
        path = self.path_of(key)
        size = HEADER.size + sum(part.nbytes for part in parts)
        if size > self.max_bytes * KEPT:
            return False
        new = self._new / uuid4().hex
        try:
            if self.has(key):
                os.utime(path)
                return False
            self._claim(new, size)
            path.parent.mkdir(exist_ok=True)
            with open(new, "r+b", buffering=0) as file:
                for part in (memoryview(_header(key, parts)), *parts):
                    if file.write(part) != part.nbytes:
                        raise OSError("the disk took only a part of it")
            new.rename(path)
        except OSError as error:
            logger.warning("a block cannot be saved in %s (%s): it is left out", self.folder, error)
            self._remove(new)
            return False
        return True

    def entries(self) -> Iterator[Entry]:
        """The blocks' files, in no order."""
        for path in self.folder.glob("??/*"):
            with suppress(OSError):  # another process has removed it
                status = path.stat()
                yield Entry(status.st_mtime, status.st_size, path)

    def _is_old(self, used: float) -> bool:
        return self.max_age is not None and time.time() - used > self.max_age

    def _claim(self, new: Path, size: int) -> None:
        """Make room for a file, which is made with its size, so that others count it."""
        with self._lock() as claimed:
            data = os.pread(claimed, CLAIMED.size, 0)
            total = CLAIMED.unpack(data)[0] if len(data) == CLAIMED.size else self.max_bytes
            if not 0 <= total <= self.max_bytes - size:
                self._measure(claimed, size)
            else:
                os.pwrite(claimed, CLAIMED.pack(total + size), 0)
            with open(new, "xb") as file:
                file.truncate(size)

    def _measure(self, claimed: int, size: int) -> None:
        """See what is there, and remove what is too old, abandoned or too much beside ``size`` more bytes."""
        now, total = time.time(), 0
        for path in self._new.iterdir():
            with suppress(OSError):
                status = path.stat()
                if now - status.st_mtime > ABANDONED:
                    path.unlink()
                else:
                    total += status.st_size
        entries = sorted(self.entries())
        total += sum(entry.size for entry in entries)
        most = self.max_bytes if total + size <= self.max_bytes else int(KEPT * self.max_bytes)
        for entry in entries:
            if not self._is_old(entry.used) and total + size <= most:
                break
            self._remove(entry.path)
            total -= entry.size
        os.pwrite(claimed, CLAIMED.pack(total + size), 0)

    @contextmanager
    def _lock(self) -> Iterator[int]:
        """The file ``size``, which no other process, and no other thread of this one, has meanwhile."""
        file = os.open(self.folder / "size", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def check_folder(folder: Path) -> None:
    """Raises:
    ValueError: the folder is not there and cannot be made, or it cannot be written to. What is in it is not looked at.
    """
    with written_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Inside the block a failure means that the folder of the settings cannot be used."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"kv_transfer_config: kv_connector_extra_config: path={str(folder)!r} cannot be written to ({error})"
        ) from error


def _header(key: bytes, parts: Sequence[memoryview]) -> bytes:
    size = sum(part.nbytes for part in parts)
    checksum = xxhash.xxh3_128(HEADER.pack(MAGIC, key, size, b""))
    for part in parts:
        checksum.update(part)
    return HEADER.pack(MAGIC, key, size, checksum.digest())
