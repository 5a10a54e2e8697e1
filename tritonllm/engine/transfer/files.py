"""Blocks as files of a folder, each named by its key, which several processes share. No torch.

- **Whole or absent.** A file is written under another name and renamed. What a killed process left is removed later.
- **Checked.** A header repeats key and length, and a checksum (xxh3, 128 bits) covers header and contents. A file that
  does not agree is removed and counts as absent. So the disk may take things in any order, and nothing is synced.
- **Bounded.** The folder's marker holds the bytes that all processes have claimed. Who claims more than the limit
  measures what is there and removes what was used longest ago. The lock on the marker goes with a process that dies.
- **Its own.** Only what a key names, or a file that is being written, is read or removed, and only in a folder that is
  the store's (:mod:`tritonllm.engine.transfer.folder`); links, pipes and all other names stay as they are.
- **Never in the way.** Whatever the disk says is logged, and is a miss or a block that was not saved. Reads need no
  lock. While another process keeps the lock, nothing is saved.

Files are trusted as far as their folder is: a checksum finds damage, not forgery.
"""

import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from uuid import uuid4

import xxhash

from tritonllm.engine.transfer import folder as kv_folder
from tritonllm.engine.transfer.folder import StoreFolder, claim, claimed_of, identity, opened

logger = logging.getLogger(__name__)
MAGIC = b"tritonkv1\0\0\0\0\0\0\0"
HEADER = Struct("<16s16sQ16s")  # magic, key, bytes of the contents, checksum
KEY_BYTES = 16
NEW = "new"  # the folder of files that are being written
NAME, GROUP = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{2}")  # of files, and of folders by their first digits
ABANDONED = 600.0  # seconds after which a file that is being written is nobody's any more
KEPT = 0.9  # of the limit, after old files were removed
TOUCH = 60.0  # seconds within which a second use of a file is not noted
LOCKED = 30.0  # seconds for which nothing is saved after another process has kept the lock for too long


class BlockFile(NamedTuple):
    """A file: when it was used last, its size in bytes and where it is."""

    used: float
    size: int
    path: Path


class BlockFiles:
    """The files of a folder.

    Args:
        folder: is made if it is not there.
        max_bytes: how many bytes all files may take together, those of other models in the folder included.
        max_age: seconds after its last use that a file may be read; ``None`` for ever.
        access: who may read and write them (:data:`tritonllm.engine.transfer.folder.ACCESS`).

    Raises:
        ValueError: the folder cannot be written to, or is not the store's.
        TimeoutError: another process that has its lock has not marked it.
    """

    def __init__(self, folder: Path, max_bytes: int, max_age: float | None = None, access: str = "owner") -> None:
        self.folder, self.max_bytes, self.max_age = folder, max_bytes, max_age
        self._is_locked, self._locked_until = False, 0.0  # by another process; no try before, by ``time.monotonic``
        with written_to(folder):
            self._place = StoreFolder(folder, access)
            with self._place.inner(NEW, make=True):
                pass
            try:
                with self._lock() as marker:
                    self._measure(marker, 0)
            except TimeoutError as error:
                self._pause(error)

    def path_of(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of the leading blocks there are files of, which may still turn out to be bad."""
        count = 0
        with suppress(OSError), self._place.root() as root:
            for name in map(bytes.hex, keys):
                with opened(name[:2], os.O_DIRECTORY | kv_folder.WAY, root) as group:
                    if not self._is_there(_look(name, group)):
                        break
                count += 1
        return count

    def has(self, key: bytes) -> bool:
        """Whether there is such a file."""
        return self.count([key]) == 1

    def read(self, key: bytes, into: Sequence[memoryview]) -> bool:
        """Fill these with a block's contents; false, and they hold anything, if it is not there as it was written."""
        name = key.hex()
        try:
            with self._place.inner(name[:2]) as group, opened(name, os.O_RDONLY | kv_folder.WAY, group) as file:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise OSError("it is no file")
                if self._is_old(status.st_mtime):
                    return False
                if _contents_are(key, file, status.st_size, into):
                    if time.time() - status.st_mtime > TOUCH:
                        _touch(file, status)
                    return True
                logger.warning(
                    "the block in %s is damaged, or of another kind: it is removed and computed", self.path_of(key)
                )
                _remove(name, group, status)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("the block in %s cannot be read (%s): it is computed", self.path_of(key), error)
        return False

    def write(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        """Keep a block; false if it is there already, or cannot be kept."""
        size = HEADER.size + sum(part.nbytes for part in parts)
        if size > self.max_bytes * KEPT:
            return False
        try:
            return not self._use(key) and self._save(key, parts, size)
        except TimeoutError as error:
            self._pause(error)
        except OSError as error:
            logger.warning("a block cannot be saved in %s (%s): it is left out", self.folder, error)
        return False

    def entries(self) -> Iterator[BlockFile]:
        """The blocks' files, in no order."""
        with self._place.root() as root:
            groups = [name for name in os.listdir(root) if GROUP.fullmatch(name)]
        for group in groups:
            with suppress(OSError):  # it is a link or a file
                for name, status in self._files_of(group):
                    if name.startswith(group):
                        yield BlockFile(status.st_mtime, status.st_size, self.folder / group / name)

    def _is_old(self, used: float) -> bool:
        return self.max_age is not None and time.time() - used > self.max_age

    def _is_there(self, status: os.stat_result | None) -> bool:
        return status is not None and stat.S_ISREG(status.st_mode) and not self._is_old(status.st_mtime)

    def _pause(self, error: TimeoutError) -> None:
        """Save nothing for a while."""
        if not self._is_locked:
            logger.warning("%s: until it is free, no blocks are saved in %s", error, self.folder)
        self._is_locked, self._locked_until = True, time.monotonic() + LOCKED

    @contextmanager
    def _lock(self) -> Iterator[int]:
        """The marker, which no other process has meanwhile."""
        with self._place.lock() as marker:
            if self._is_locked:
                logger.warning("the lock is free: blocks are saved in %s again", self.folder)
            self._is_locked = False
            yield marker

    def _use(self, key: bytes) -> bool:
        """Whether the block is there; it is used now."""
        name = key.hex()
        try:
            with self._place.inner(name[:2]) as group:
                there = _look(name, group)
                if not self._is_there(there):
                    return False
                with opened(name, os.O_RDONLY | kv_folder.WAY, group) as file:
                    _touch(file, os.fstat(file))
                return True
        except FileNotFoundError:
            return False

    def _save(self, key: bytes, parts: Sequence[memoryview], size: int) -> bool:
        """Write a block's parts to a file under its key; returns whether it is kept.

        Raises:
            OSError: it cannot be kept; nothing is left of it.
        """
        if time.monotonic() < self._locked_until:
            return False
        name, temporary = key.hex(), uuid4().hex
        with self._place.inner(NEW) as new:
            file = self._claim(temporary, new, size)
            try:
                for part in (memoryview(_header(key, parts)), *parts):
                    if os.write(file, part) != part.nbytes:
                        raise OSError("the disk took only a part of it")
                with self._place.inner(name[:2], make=True) as group:
                    there = _look(name, group)
                    if self._is_there(there):  # another process was first
                        return False
                    if there is not None and not stat.S_ISREG(there.st_mode):
                        raise OSError(f"{self.path_of(key)} is no file")
                    os.rename(temporary, name, src_dir_fd=new, dst_dir_fd=group)
                    return True
            finally:
                os.close(file)
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=new)

    def _claim(self, name: str, new: int, size: int) -> int:
        """Make room for a file, which is made with its size, so that others count it; returns its descriptor."""
        with self._lock() as marker:
            total = claimed_of(marker)
            if total is None or not 0 <= total <= self.max_bytes - size:
                self._measure(marker, size)
            else:
                claim(marker, total + size)
            file = self._place.create(name, new)
            try:
                os.truncate(file, size)
            except OSError:
                os.close(file)
                os.unlink(name, dir_fd=new)
                raise
            return file

    def _measure(self, marker: int, size: int) -> None:
        """See what is there, and remove what is too old, abandoned or too much beside ``size`` more bytes."""
        now, total = time.time(), 0
        for name, status in self._files_of(NEW):
            if now - status.st_mtime > ABANDONED:
                self._remove_from(NEW, name, status)
            else:
                total += status.st_size
        entries = sorted(self.entries())
        total += sum(entry.size for entry in entries)
        most = self.max_bytes if total + size <= self.max_bytes else int(KEPT * self.max_bytes)
        for entry in entries:
            if not self._is_old(entry.used) and total + size <= most:
                break
            self._remove_from(entry.path.parent.name, entry.path.name)
            total -= entry.size
        claim(marker, total + size)

    def _files_of(self, folder: str) -> list[tuple[str, os.stat_result]]:
        """The name and the ``os.stat`` result of each regular file in a folder of the store whose name is a key."""
        with self._place.inner(folder) as inner:
            found = [(name, _look(name, inner)) for name in os.listdir(inner) if NAME.fullmatch(name)]
        return [(name, status) for name, status in found if status is not None and stat.S_ISREG(status.st_mode)]

    def _remove_from(self, folder: str, name: str, status: os.stat_result | None = None) -> None:
        with suppress(OSError), self._place.inner(folder) as inner:
            _remove(name, inner, status)


def check_folder(folder: Path, access: str = "owner") -> None:
    """Check that a folder can be used for a store, without opening one.

    Raises:
        ValueError: the folder is not there and cannot be made, it cannot be written to, or it is not the store's.
    """
    with written_to(folder):
        kv_folder.check_folder(folder, access)


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Inside the block a failure means that the folder of the settings cannot be used."""
    name = "kv_transfer_config: kv_connector_extra_config: "
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise ValueError(f"{name}path={str(folder)!r} cannot be written to ({error})") from error
    except ValueError as error:
        raise ValueError(f"{name}{error}") from error


def _look(name: str, folder: int) -> os.stat_result | None:
    """What has this name; ``None``: nothing."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _remove(name: str, folder: int, status: os.stat_result | None = None) -> None:
    """Remove a file, if it is one, and still the one that was looked at."""
    there = _look(name, folder)
    if there is not None and stat.S_ISREG(there.st_mode) and (status is None or identity(status) == identity(there)):
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _touch(file: int, status: os.stat_result) -> None:
    """Set the file's time of last use to now. A file that has other names is not only the store's: its time stays."""
    if status.st_nlink == 1:
        os.utime(file)


def _contents_are(key: bytes, file: int, size: int, into: Sequence[memoryview]) -> bool:
    """Read a file's contents; whether they are what was written with this key."""
    if size != HEADER.size + sum(part.nbytes for part in into):
        return False
    header = os.read(file, HEADER.size)
    return all(os.readv(file, [part]) == part.nbytes for part in into) and header == _header(key, into)


def _header(key: bytes, parts: Sequence[memoryview]) -> bytes:
    size = sum(part.nbytes for part in parts)
    checksum = xxhash.xxh3_128(HEADER.pack(MAGIC, key, size, b""))
    for part in parts:
        checksum.update(part)
    return HEADER.pack(MAGIC, key, size, checksum.digest())
