"""Files that are not the project's, and what they are."""

import os
import stat
from pathlib import Path


def what_is(path: Path) -> tuple[object, ...]:
    """Kind, permissions, time and contents; of a folder, of all that is in it."""
    status = os.lstat(path)
    kind, mode = stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        return kind, mode, {one.name: what_is(one) for one in path.iterdir()}
    contents = os.readlink(path) if stat.S_ISLNK(status.st_mode) else b""
    if stat.S_ISREG(status.st_mode):
        contents = path.read_bytes()
    return kind, mode, status.st_mtime_ns, contents


def make_old(path: Path) -> None:
    """It was written in 2001."""
    os.utime(path, (1e9, 1e9), follow_symlinks=False)
