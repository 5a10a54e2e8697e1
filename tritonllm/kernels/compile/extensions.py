"""The C extensions that Triton builds for itself, ahead of their first use: they differ from release to release.

All releases load kernels with one, their driver. Triton 3.6 also builds a function for each signature of a kernel,
which launches it; from 3.7 on the driver launches all. Triton 3.8 and later find the driver by the folders that it is
linked with, too, so it can be built ahead only where libcuda is.
"""

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from triton import knobs
from triton.runtime import build
from triton.runtime.cache import get_cache_manager

from tritonllm.kernels.runtime.releases import TRITON


class Extension(Protocol):
    """One C extension in Triton's cache folder."""

    def is_cached(self) -> bool: ...

    def compile(self) -> None:
        """Put it where Triton will look for it."""

    @property
    def cost(self) -> int:
        """Larger for what takes longer, as a kernel's: the length of the source; but gcc is quick."""


@dataclass(frozen=True)
class FromSource:
    """An extension as Triton before 3.8 finds it: by the source alone."""

    name: str
    code: str

    def _manager(self) -> Any:
        return get_cache_manager(hashlib.sha256((self.code + build.platform_key()).encode()).hexdigest())

    @property
    def _file(self) -> str:
        return f"{self.name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    def is_cached(self) -> bool:
        return self._manager().get_file(self._file) is not None

    def compile(self) -> None:
        from triton.backends.nvidia import driver as nvidia

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.name}.c"
            path.write_text(self.code)
            libraries = [nvidia.libdevice_dir, *(_libcuda_folders() or _stand_in_for_libcuda())]
            built = build._build(self.name, str(path), folder, libraries, nvidia.include_dirs, nvidia.libraries, [])
            self._manager().put(Path(built).read_bytes(), self._file, binary=True)

    @property
    def cost(self) -> int:
        return len(self.code) // 10


class _NotBuilt(Exception):
    pass


@dataclass(frozen=True)
class FromFile:
    """From Triton 3.8 on: found by the source and the folders that it is linked with."""

    path: Path

    def _build(self) -> None:
        from triton.backends.nvidia import driver as nvidia

        build.compile_so_from_file(
            str(self.path), "cuda_utils", nvidia.library_dirs(), nvidia.include_dirs, nvidia.libraries
        )

    def is_cached(self) -> bool:
        def refuse(*args: Any) -> str:
            raise _NotBuilt

        with knobs.build.scope():
            knobs.build.impl = refuse
            try:
                self._build()
            except _NotBuilt:
                return False
        return True

    def compile(self) -> None:
        self._build()

    @property
    def cost(self) -> int:
        return len(self.path.read_text()) // 10


def driver_extensions() -> list[Extension]:
    """What Triton loads kernels with; nothing where it cannot be built ahead."""
    from triton.backends.nvidia import driver as nvidia

    path = Path(nvidia.dirname) / "driver.c"
    if TRITON < (3, 8):
        return [FromSource("cuda_utils", path.read_text())]
    return [FromFile(path)] if _libcuda_folders() else []


def launcher_extensions(source: Any, metadata: Any) -> list[Extension]:
    """What Triton launches a compiled kernel with, beside its driver.

    Args:
        source: function, signature and constants, as Triton's compiler takes them.
        metadata: the metadata of the compiled kernel.
    """
    if TRITON >= (3, 7):
        return []
    from triton.backends.nvidia import driver as nvidia

    index = {name: (i,) for i, name in enumerate(source.fn.arg_names)}
    constants = {index.get(name, name): value for name, value in source.constants.items()}
    descriptors = getattr(metadata, "tensordesc_meta", None)
    return [FromSource("__triton_launcher", nvidia.make_launcher(constants, dict(source.signature), descriptors))]


@cache
def _libcuda_folders() -> tuple[str, ...]:
    """Where libcuda is; nowhere without a driver."""
    from triton.backends.nvidia import driver as nvidia

    try:
        return tuple(nvidia.libcuda_dirs())
    except (AssertionError, OSError, subprocess.CalledProcessError):
        return ()


@cache
def _stand_in_for_libcuda() -> tuple[str, ...]:
    """A folder with an empty library of that name, which satisfies the linker: in Triton's cache, one for all."""
    name = "libcuda.so.1"
    manager = get_cache_manager(hashlib.sha256(f"stand-in {name} {build.platform_key()}".encode()).hexdigest())
    path = manager.get_file(name)
    if path is None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / name
            command = ["gcc", "-shared", f"-Wl,-soname,{name}", "-o", str(library), "-x", "c", os.devnull]
            subprocess.run(command, check=True)
            path = manager.put(library.read_bytes(), name, binary=True)
    return (str(Path(path).parent),)
