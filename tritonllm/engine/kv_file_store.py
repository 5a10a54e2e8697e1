"""The connector that keeps blocks as files of a folder (:mod:`tritonllm.engine.kv_files`): prefixes survive a restart,
and engines that share the folder find each other's. No torch."""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tritonllm.config_checks import is_count
from tritonllm.engine.kv_connector import Params, Slots, arrays
from tritonllm.engine.kv_files import BlockFiles

MAX_BYTES = 64 << 30
CLOSING = 5.0  # seconds in which blocks that wait to be saved still are
THREADS = 4  # reads and checksums release Python's lock; one thread brings some GB/s


@dataclass(frozen=True, kw_only=True)
class FileStoreSettings:
    """What a user can choose; it is checked here, without a folder.

    Args:
        path: the folder.
        max_bytes: of all files in it.
        max_age: seconds after its last use that a block is kept; ``None`` as long as there is room.
        threads: that read, and as many that write.

    Raises:
        ValueError: a bad value.
    """

    path: str | Path | None = None
    max_bytes: int = MAX_BYTES
    max_age: float | None = None
    threads: int = THREADS

    def __post_init__(self) -> None:
        name, age = "kv_transfer_config: kv_connector_extra_config: ", self.max_age
        if not isinstance(self.path, str | Path) or not str(self.path).strip():
            raise ValueError(f"{name}path must be the folder for FileStore's blocks, got {self.path!r}")
        is_count(name + "max_bytes", self.max_bytes)
        is_count(name + "threads", self.threads)
        if age is not None and (not isinstance(age, int | float) or isinstance(age, bool) or not age > 0):
            raise ValueError(f"{name}max_age must be a number of seconds above 0, got {age!r}")

    @property
    def folder(self) -> Path:
        return Path(self.path or "")


class FileStore:
    """Blocks in files.

    Raises:
        ValueError: a folder that cannot be written to.
    """

    def __init__(self, settings: FileStoreSettings) -> None:
        threads = settings.threads
        self.files = BlockFiles(settings.folder, settings.max_bytes, settings.max_age)
        self._threads = threads
        self._ends = float("inf")
        self._memory: Sequence[np.ndarray] = ()
        self._readers = ThreadPoolExecutor(threads, "kv-load")
        self._writers = ThreadPoolExecutor(threads, "kv-save")

    def register(self, memory: Sequence[Slots]) -> None:
        self._memory = arrays(memory)
        self.check_size(sum(part.shape[1] for part in memory))

    def check_size(self, size: int) -> None:
        if size > self.files.max_bytes // 2:
            raise ValueError(
                f"kv_transfer_config: kv_connector_extra_config: max_bytes={self.files.max_bytes} holds not even two "
                f"blocks of {size} bytes: raise it"
            )

    def lookup(self, keys: Sequence[bytes], params: Params) -> "Future[int]":
        return self._readers.submit(self._count, keys)

    def load(self, keys: Sequence[bytes], slots: Sequence[int], params: Params) -> "Future[list[bool]]":
        return self._deal_out(self._readers, self._read, keys, slots)

    def save(self, keys: Sequence[bytes], slots: Sequence[int], ready: Callable[[], bool]) -> "Future[int]":
        saved: Future[int] = Future()

        def write(key: bytes, slot: int) -> bool:
            return time.monotonic() < self._ends and ready() and self.files.write(key, self._views(slot))

        each = self._deal_out(self._writers, write, keys, slots)
        each.add_done_callback(lambda done: saved.set_result(sum(done.result())))
        return saved

    def close(self) -> None:
        self._ends = time.monotonic() + CLOSING
        self._readers.shutdown(cancel_futures=True)
        self._writers.shutdown()

    def _count(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if not self.files.has(key)), len(keys))

    def _read(self, key: bytes, slot: int) -> bool:
        return self.files.read(key, self._views(slot))

    def _views(self, slot: int) -> list[memoryview]:
        return [memoryview(part[slot]) for part in self._memory]

    def _deal_out(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[bytes, int], bool],
        keys: Sequence[bytes],
        slots: Sequence[int],
    ) -> "Future[list[bool]]":
        """Do this for all blocks, with all threads; what each returns, when the last is done."""
        results, done = [False] * len(keys), Future[list[bool]]()
        finished = itertools.count(1)  # drawing from it is atomic

        def share(first: int) -> None:
            try:
                for at in range(first, len(keys), self._threads):
                    results[at] = work(keys[at], slots[at])
            finally:
                if next(finished) == self._threads:
                    done.set_result(results)

        for first in range(self._threads):
            pool.submit(share, first)
        return done
