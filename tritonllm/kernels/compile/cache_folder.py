"""A folder of compiled kernels that can be built on one machine and used on another.

Triton's own cache folder can almost do it. Two things tie it to where it was made: its entries hold absolute paths, and
their names depend on the compiler's binary, which differs between builds for Python 3.11 and 3.12 of one release. Here
an entry's files are found beside it, and its name depends on the release and on the compiler's Python sources instead.
What else decides a kernel stays in the name: its source, arguments and options, the architecture, ptxas.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime import cache
from triton.runtime.cache import CacheManager, FileCacheManager

from tritonllm.system.whole_files import replace_text

MARK = "tritonllm-kernels.json"  # says what the folder is


@functools.cache
def portable_triton_key() -> str:
    """Stands for the compiler in a kernel's name: its release and its Python sources."""
    root = Path(triton.__file__).parent
    digest = hashlib.sha256(triton.__version__.encode())
    for part in ("backends", "compiler", "experimental/gluon", "language"):
        for path in sorted((root / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def describe() -> dict[str, str]:
    """What must be equal where a folder is made and where it is used."""
    return {"triton": triton.__version__, "compiler": portable_triton_key()}


def write_kernels_to(folder: Path, *, binary_only: bool = True) -> None:
    """Let this process compile into ``folder`` from now on; unless ``binary_only``, with the stages before the
    binary."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / MARK, json.dumps(describe(), indent=1) + "\n")
    cache.triton_key = portable_triton_key
    knobs.cache.dir = str(folder.resolve())
    knobs.cache.manager_class = _manager(folder.resolve())
    knobs.compilation.store_binary_only = binary_only  # 13 MB instead of 31 for a model


def keep_binaries(folder: Path) -> None:
    """Remove the stages before the binary from what ``folder`` holds: files only that lie in it, beside the list that
    names them."""
    for group in folder.glob("*/__grp__*.json"):
        if group.parent.is_symlink() or group.is_symlink():
            continue
        files = json.loads(group.read_text())["child_paths"]
        kept = {name: path for name, path in files.items() if name.endswith((".cubin", ".hsaco", ".json"))}
        replace_text(group, json.dumps({"child_paths": kept}))
        for name in files.keys() - kept.keys():
            if Path(name).name == name:
                (group.parent / name).unlink(missing_ok=True)


def read_kernels_from(folder: Path) -> None:
    """Let this process take kernels from ``folder`` from now on, if they are there; others it compiles as ever.

    The folder is only read. It holds for the whole process, as Triton's cache does.

    Raises:
        ValueError: not such a folder, or one that another Triton made.
    """
    mark = folder / MARK
    if not mark.is_file():
        raise ValueError(f"kernel_cache={str(folder)!r} was not made by `tritonllm precompile`: it has no {MARK}")
    made_by = json.loads(mark.read_text())
    if made_by != describe():
        there, here = made_by.get("triton"), triton.__version__
        raise ValueError(
            f"kernel_cache={str(folder)!r} was made with Triton {there}, here is {here} or another build: make it "
            "again with `tritonllm precompile`"
        )
    cache.triton_key = portable_triton_key
    knobs.cache.manager_class = _manager(folder.resolve())


def _manager(folder: Path) -> type[CacheManager]:
    class FolderFirst(CacheManager):
        """An entry of Triton's cache: files of ``folder`` where there are any, else those of the usual place."""

        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self._open = functools.partial(FileCacheManager, key, override, dump)  # not yet: that makes a directory
            self._path = folder / key

        def get_file(self, filename: str) -> str | None:
            path = self._path / filename
            return str(path) if path.exists() else self._open().get_file(filename)

        def get_group(self, filename: str) -> dict[str, str] | None:
            group = self._path / f"__grp__{filename}"
            if not group.exists():
                return self._open().get_group(filename)
            return {name: str(self._path / name) for name in json.loads(group.read_text())["child_paths"]}

        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            return self._open().put(data, filename, binary)

        def put_group(self, filename: str, group: dict[str, str]) -> None:
            self._open().put_group(filename, group)

    return FolderFirst
