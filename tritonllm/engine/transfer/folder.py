"""A folder that several processes keep their files in, and in which nothing is touched that they did not make. No
torch.

- **Marked.** A folder is used if it was empty, and has a marker from then on. One that holds other files and no marker
  is refused. An empty file with the marker's name, which only a user can have put there, lets it be used.
- **Without links.** What lies in it is opened step by step, each name in the folder that is open already
  (``openat``), and no name may be a symbolic link. So neither a link that was planted, nor one that takes a folder's
  place later, leads out of it. Only the path that the user gives may have links.
- **Never waiting without an end.** The lock is on the marker. It is asked for until there is no time left, never waited
  for: whoever holds it may have been stopped. Pipes and devices are opened without waiting, and are no files here.
- **For its owner**, unless the group is to share it.
"""

import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

MARKER = "tritonllm-kv-store"
KIND = b"tritonllm FileStore "
HEAD = KIND + b"1: files named by 32 hexadecimal digits come and go. Claimed bytes:\n"
CLAIMED = 21  # bytes of the number behind the head
IGNORED = re.compile(rf"lost\+found|{MARKER}-probe-[0-9a-f]{{32}}")  # in a folder that counts as empty
PATIENCE = 5.0  # seconds that a lock is waited for
PAUSE = 0.02  # seconds between two tries, at most
WAY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Access(NamedTuple):
    """Permissions of new files and folders."""

    file: int
    folder: int


ACCESS = {"owner": Access(0o600, 0o700), "group": Access(0o660, 0o2770)}


class StoreFolder:
    """The folder, once it is known to be one.

    Args:
        path: is made if it is not there.
        access: ``"owner"`` or ``"group"``, a key of :data:`ACCESS`.

    Raises:
        ValueError: it holds other files and no marker, or another version's.
        TimeoutError: it is new, and another process that has its lock has not marked it.
        OSError: it cannot be used.
    """

    def __init__(self, path: Path, access: str = "owner") -> None:
        self.path, self._access = path, ACCESS[access]
        self._mine = threading.Lock()  # one thread of this process asks for the lock on the marker
        make_folder(path, self._access)
        with opened(path, os.O_DIRECTORY) as root:
            self._identity = identity(os.fstat(root))
            marked = self._is_marked(root)
        if not marked:
            self._mark()

    @contextmanager
    def root(self) -> Iterator[int]:
        """The folder's descriptor.

        Raises:
            OSError: it is gone, or another one has its place.
        """
        with opened(self.path, os.O_DIRECTORY) as root:
            if identity(os.fstat(root)) != self._identity:
                raise OSError(f"{self.path} is not the folder that it was at the start")
            yield root

    @contextmanager
    def inner(self, name: str, *, make: bool = False) -> Iterator[int]:
        """The descriptor of a folder in it.

        Raises:
            OSError: it is not there, or it is a link or a file.
        """
        with self.root() as root:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, self._access.folder, dir_fd=root)
                    with opened(name, os.O_DIRECTORY | WAY, root) as made:
                        os.fchmod(made, self._access.folder)
            with opened(name, os.O_DIRECTORY | WAY, root) as folder:
                yield folder

    def create(self, name: str, folder: int) -> int:
        """The descriptor of a new file, to be closed.

        Raises:
            OSError: something has this name, or it cannot be made.
        """
        return _create(name, folder, self._access)

    @contextmanager
    def lock(self) -> Iterator[int]:
        """The marker's descriptor, while no other process and no other thread of this one has the lock.

        Raises:
            TimeoutError: another one has had it for :data:`PATIENCE`.
            OSError: the folder or its marker is gone.
        """
        seconds = PATIENCE
        end = time.monotonic() + seconds
        if not self._mine.acquire(timeout=seconds):
            raise self._is_locked("another thread of this process", seconds)
        try:
            with self.root() as root, opened(MARKER, os.O_RDWR | WAY, root) as marker:
                _check_regular(marker, self.path / MARKER)
                pause = 1e-4
                while not _take(marker):
                    if time.monotonic() >= end:
                        raise self._is_locked("another process, perhaps a stopped one,", seconds)
                    time.sleep(pause)
                    pause = min(2 * pause, PAUSE)
                yield marker
        finally:
            self._mine.release()

    def _is_locked(self, who: str, seconds: float) -> TimeoutError:
        return TimeoutError(f"{who} has had the lock on {self.path / MARKER} for {seconds:.3g} s (`fuser -v` names it)")

    def _is_marked(self, root: int) -> bool:
        """Whether the marker is whole; if there is none, it is made, empty."""
        marked = marker_of(root, self.path)
        if marked is None:
            with suppress(FileExistsError):  # another process was first
                os.close(_create(MARKER, root, self._access))
        return bool(marked)

    def _mark(self) -> None:
        with self.lock() as marker, self.root() as root:
            if marker_of(root, self.path):
                return  # by another process, meanwhile
            if os.fstat(marker).st_nlink > 1:
                raise ValueError(f"path={str(self.path)!r}: its {MARKER} has another name elsewhere: remove it")
            os.pwrite(marker, HEAD, 0)  # what is there already, nobody has measured


def claimed_of(marker: int) -> int | None:
    """Bytes that all processes have claimed; ``None``: nobody knows."""
    data = os.pread(marker, CLAIMED, len(HEAD))
    return int(data) if re.fullmatch(rb"[0-9]{20}\n", data) else None


def claim(marker: int, size: int) -> None:
    """Note that number of bytes."""
    os.pwrite(marker, b"%0*d\n" % (CLAIMED - 1, size), len(HEAD))


def check_folder(path: Path, access: str = "owner") -> None:
    """What can be known before the folder is used: it is made if it is not there, and left as it was.

    Raises:
        ValueError: it holds other files and no marker, or another version's.
        OSError: it cannot be made, or not written to.
    """
    make_folder(path, ACCESS[access])
    with opened(path, os.O_DIRECTORY) as root:
        marker_of(root, path)
        probe = f"{MARKER}-probe-{uuid4().hex}"
        os.close(_create(probe, root, ACCESS[access]))
        os.unlink(probe, dir_fd=root)


def marker_of(root: int, path: Path) -> bool | None:
    """Whether the folder's marker is whole; false: it is empty, or whoever wrote it was killed; ``None``: there is
    none, and nothing else.

    Raises:
        ValueError: the folder is not to be used.
    """
    found = _read_marker(root, path)
    if found is None:
        others = sorted(name for name in os.listdir(root) if not IGNORED.fullmatch(name))
        found = _read_marker(root, path) if others else None  # another process may have begun since
        if found is None and others:
            raise ValueError(
                f"path={str(path)!r} holds other files (as {others[0]!r}) and no {MARKER}: FileStore takes an empty "
                "folder, or one that it has made. Name another folder. If it is the store of an earlier version, empty "
                f"it, or keep its blocks: `touch {path / MARKER}`"
            )
    if found is None or HEAD.startswith(found):
        return None if found is None else found == HEAD
    if found.startswith(KIND):
        raise ValueError(f"path={str(path)!r} is the store of another version: name another folder, or empty it")
    raise ValueError(f"path={str(path)!r}: its {MARKER} is not FileStore's: name another folder")


def _read_marker(root: int, path: Path) -> bytes | None:
    try:
        with opened(MARKER, os.O_RDONLY | WAY, root) as marker:
            _check_regular(marker, path / MARKER)
            return os.pread(marker, len(HEAD), 0)
    except FileNotFoundError:
        return None


def _check_regular(descriptor: int, path: Path) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(f"{path} is no file")


def make_folder(path: Path, access: Access) -> None:
    """Make a folder with its parents, if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(access.folder)
    except FileExistsError:
        return
    with opened(path, os.O_DIRECTORY) as made:
        os.fchmod(made, access.folder)


@contextmanager
def opened(name: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """A descriptor for the block."""
    descriptor = os.open(name, flags | os.O_CLOEXEC, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def identity(status: os.stat_result) -> tuple[int, int]:
    """What tells a file from all others: the device and number of its inode."""
    return status.st_dev, status.st_ino


def _create(name: str, folder: int, access: Access) -> int:
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | WAY, access.file, dir_fd=folder)
    if access.file & 0o077:  # which the umask takes away
        os.fchmod(descriptor, access.file)
    return descriptor


def _take(marker: int) -> bool:
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
