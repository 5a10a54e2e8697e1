"""The connector that keeps blocks as files of a folder (:mod:`tritonllm.engine.transfer.files`): prefixes survive a
restart, and engines that share the folder find each other's. No torch.

The disk may be slow, or never answer. So all that touches it is done by threads that nobody waits for without an end:
neither a start, nor an end, nor a request. What is not there by then is computed.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tritonllm.config.checks import is_count, one_of
from tritonllm.engine.transfer.connector import Params, Slots, arrays
from tritonllm.engine.transfer.files import BlockFiles, check_folder
from tritonllm.engine.transfer.folder import ACCESS
from tritonllm.engine.transfer.workers import Workers, within

logger = logging.getLogger(__name__)
MAX_BYTES = 64 << 30
OPENING = 10.0  # seconds that a start waits for the folder
AGAIN = 30.0  # seconds until it is tried again
CLOSING = 5.0  # seconds in which blocks that wait to be saved still are
LEAVING = 5.0  # seconds after which what has begun is left
THREADS = 4  # reads and checksums release Python's lock; one thread brings some GB/s


@dataclass(frozen=True, kw_only=True)
class FileStoreSettings:
    """What a user can choose; it is checked here, without a folder.

    Args:
        path: the folder.
        max_bytes: how many bytes all files of the folder may take together.
        max_age: seconds after its last use that a block is kept; ``None`` as long as there is room.
        threads: how many threads read, and as many write.
        access: ``"owner"``: files are for the user who runs the engine alone; ``"group"``: for the group, too.

    Raises:
        ValueError: a bad value.
    """

    path: str | Path | None = None
    max_bytes: int = MAX_BYTES
    max_age: float | None = None
    threads: int = THREADS
    access: str = "owner"

    def __post_init__(self) -> None:
        name, age = "kv_transfer_config: kv_connector_extra_config: ", self.max_age
        if not isinstance(self.path, str | Path) or not str(self.path).strip():
            raise ValueError(f"{name}path must be the folder for FileStore's blocks, got {self.path!r}")
        is_count(name + "max_bytes", self.max_bytes)
        is_count(name + "threads", self.threads)
        one_of(name + "access", self.access, tuple(ACCESS))
        if age is not None and (not isinstance(age, int | float) or isinstance(age, bool) or not age > 0):
            raise ValueError(f"{name}max_age must be a number of seconds above 0, got {age!r}")

    @property
    def folder(self) -> Path:
        return Path(self.path or "")

    def check_folder(self) -> None:
        """Check that the folder can be used for the store.

        Raises:
            ValueError: the folder is not there and cannot be made, it cannot be written to, or it is not the store's.
        """
        try:
            within(OPENING, lambda: check_folder(self.folder, self.access))
        except TimeoutError:
            logger.warning("%s has not answered for %.3g s: it is not checked", self.folder, OPENING)


class FileStore:
    """A connector that keeps blocks as files of a folder.

    Attributes:
        files: the files; ``None`` while the folder cannot be used; then nothing is found or saved.

    Raises:
        ValueError: a folder that cannot be written to, or is not the store's.
    """

    def __init__(self, settings: FileStoreSettings) -> None:
        threads = settings.threads
        self.files: BlockFiles | None = None
        self._settings, self._threads = settings, threads
        self._ends, self._goes_on = float("inf"), False
        self._closing = threading.Event()
        self._memory: Sequence[np.ndarray] = ()
        self._wait_for_folder()
        self._readers = Workers(threads, "kv-load")
        self._writers = Workers(threads, "kv-save")

    def register(self, memory: Sequence[Slots]) -> None:
        self._memory = arrays(memory)
        self.check_size(sum(part.shape[1] for part in memory))

    def check_size(self, size: int) -> None:
        most = self._settings.max_bytes
        if size > most // 2:
            raise ValueError(
                f"kv_transfer_config: kv_connector_extra_config: max_bytes={most} holds not even two blocks of {size} "
                "bytes: raise it"
            )

    def lookup(self, keys: Sequence[bytes], params: Params) -> "Future[int]":
        return self._readers.submit(partial(self._count, keys))

    def load(self, keys: Sequence[bytes], slots: Sequence[int], params: Params) -> "Future[list[bool]]":
        return self._deal_out(self._readers, self._read, keys, slots)

    def save(self, keys: Sequence[bytes], slots: Sequence[int], ready: Callable[[], bool]) -> "Future[int]":
        saved: Future[int] = Future()

        def write(key: bytes, slot: int) -> bool:
            files = self.files
            goes = files is not None and time.monotonic() < self._ends and ready()
            return goes and files is not None and files.write(key, self._views(slot))

        each = self._deal_out(self._writers, write, keys, slots)
        each.add_done_callback(lambda done: saved.set_result(sum(done.result())))
        return saved

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._ends = time.monotonic() + CLOSING
        self._closing.set()
        ended = self._writers.close(CLOSING + LEAVING)
        if not (self._readers.close(max(0.0, self._ends + LEAVING - time.monotonic()), drop=True) and ended):
            logger.warning(
                "reads and writes in %s have not ended within %.3g s: they are left, and what was not saved is lost",
                self._settings.folder,
                CLOSING + LEAVING,
            )

    def _wait_for_folder(self) -> None:
        """Open the folder, and wait for it no longer than ``OPENING`` seconds.

        Raises:
            ValueError: as of the class.
        """
        tried: Future[str] = Future()
        threading.Thread(target=self._open, args=(tried,), name="kv-open", daemon=True).start()
        try:
            why = tried.result(OPENING)
        except TimeoutError:
            why = f"{self._settings.folder} has not answered for {OPENING:.3g} s"
        if why:
            self._goes_on = True
            logger.warning("%s: the engine goes on without the store, until it can be used", why)

    def _open(self, tried: "Future[str]") -> None:
        """Open the folder, as soon as it can be.

        Args:
            tried: hears why the first try was in vain.
        """
        settings, folder = self._settings, self._settings.folder
        while True:
            try:
                self.files = BlockFiles(folder, settings.max_bytes, settings.max_age, settings.access)
                break
            except TimeoutError as error:
                if not tried.done():
                    tried.set_result(str(error))
            except ValueError as error:
                if not tried.done():
                    tried.set_exception(error)
                if self._goes_on:
                    logger.warning("%s: the engine goes on without the store", error)
                return
            if self._closing.wait(AGAIN):
                return
        if self._goes_on:
            logger.warning("%s can be used now: blocks are found and saved there", folder)
        if not tried.done():
            tried.set_result("")

    def _count(self, keys: Sequence[bytes]) -> int:
        files = self.files
        return 0 if files is None else files.count(keys)

    def _read(self, key: bytes, slot: int) -> bool:
        return self.files is not None and self.files.read(key, self._views(slot))

    def _views(self, slot: int) -> list[memoryview]:
        return [memoryview(part[slot]) for part in self._memory]

    def _deal_out(
        self, workers: Workers, work: Callable[[bytes, int], bool], keys: Sequence[bytes], slots: Sequence[int]
    ) -> "Future[list[bool]]":
        """Do this for all blocks, with all threads; what each returned, when the last is done, and false of those for
        which it was not done."""
        results, done = [False] * len(keys), Future[list[bool]]()
        finished = itertools.count(1)  # drawing from it is atomic

        def share(first: int) -> None:
            for at in range(first, len(keys), self._threads):
                results[at] = work(keys[at], slots[at])

        def ended(one: "Future[None]") -> None:
            if not one.cancelled() and (error := one.exception()) is not None:
                logger.warning("blocks in %s were left out", self._settings.folder, exc_info=error)
            if next(finished) == self._threads:
                done.set_result(results)

        for first in range(self._threads):
            workers.submit(partial(share, first)).add_done_callback(ended)
        return done
