"""Copies of blocks in this process's memory, which others may ask for until there is no room or they are too old. No
torch."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple


class KeptBlock(NamedTuple):
    """A block: the head of the frame that it is sent in, or what else tells it from others that had its place; its
    contents, if they are in the host's memory; the number of its place if it has one
    (:mod:`tritonllm.engine.transfer.nixl`, :mod:`tritonllm.engine.transfer.ipc`); its bytes; and when it was used last,
    which matters only where there is a ``max_age``."""

    head: bytes
    contents: bytes | memoryview
    place: int
    size: int
    used: float


class KeptBlocks:
    """Blocks by key; those used longest ago go first. For any thread.

    Args:
        max_bytes: how many bytes the contents of all blocks may take together.
        max_age: seconds after its last use that a block is kept; ``None`` as long as there is room.
        gone: is told of each block that is kept no more, or was not taken; it must not ask this one.
    """

    def __init__(
        self, max_bytes: int, max_age: float | None = None, gone: Callable[[KeptBlock], None] = lambda kept: None
    ) -> None:
        self.max_bytes, self.max_age = max_bytes, max_age
        self._gone = gone
        self._blocks: OrderedDict[bytes, KeptBlock] = OrderedDict()  # the most recently used one is the last
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def has(self, key: bytes) -> bool:
        """Whether it is there; it is used now."""
        with self._changed:
            return self._use(key) is not None

    def put(
        self, key: bytes, head: bytes, contents: bytes | memoryview, place: int = 0, size: int | None = None
    ) -> bool:
        """Keep a block; false if it was there, or is longer than all may be.

        Args:
            size: bytes of contents that are not in the host's memory.
        """
        kept = KeptBlock(head, contents, place, len(contents) if size is None else size, time.monotonic())
        with self._changed:
            if self._closed or kept.size > self.max_bytes or self._use(key) is not None:
                self._gone(kept)
                return False
            self._make_room(kept.size)
            self._blocks[key] = kept
            self._bytes += kept.size
            self._changed.notify_all()
            return True

    def make_room(self, size: int) -> None:
        """Give blocks up until there is room for so many bytes, at most all."""
        with self._changed:
            self._make_room(size)

    def get(self, key: bytes, until: float) -> KeptBlock | None:
        """A block, as soon as it is there; ``None`` if it is not at that time of ``time.monotonic``."""
        with self._changed:
            while (kept := self._use(key)) is None and self._wait(until):
                pass
            return kept

    def find(self, keys: Sequence[bytes]) -> list[KeptBlock | None]:
        """Each of these blocks, if it is there now."""
        with self._changed:  # of a sequence the end goes first
            return [self._use(key) for key in reversed(keys)][::-1]

    def still(self, keys: Sequence[bytes], found: Sequence[KeptBlock | None]) -> list[bool]:
        """Whether each of these blocks has been there since it was found."""
        with self._changed:
            now = [self._blocks.get(key) for key in keys]
        pairs = zip(found, now, strict=True)
        return [a is b is not None or _same(a, b) for a, b in pairs]

    def count(self, keys: Sequence[bytes], until: float) -> int:
        """How many of the leading ones are there: all, as soon as they are, or those that are at that time."""
        with self._changed:
            at = 0
            while True:
                while at < len(keys) and keys[at] in self._blocks:
                    at += 1
                if at == len(keys) or not self._wait(until):
                    break
            # of a sequence the end goes first; and what was there may be gone or too old by now
            there = [self._use(key) is not None for key in reversed(keys[:at])]
            return next((i for i, found in enumerate(reversed(there)) if not found), at)

    def close(self) -> None:
        """Forget all, and let nobody wait."""
        with self._changed:
            self._closed = True
            while self._blocks:
                self._remove(next(iter(self._blocks)))
            self._changed.notify_all()

    def _wait(self, until: float) -> bool:
        """For a change; false if there is no time left."""
        seconds = until - time.monotonic()
        if seconds <= 0 or self._closed:
            return False
        self._changed.wait(seconds)
        return True

    def _use(self, key: bytes) -> KeptBlock | None:
        now = time.monotonic()
        while self.max_age is not None and self._blocks:
            oldest, kept = next(iter(self._blocks.items()))
            if now - kept.used <= self.max_age:
                break
            self._remove(oldest)
        kept_one = self._blocks.get(key)
        if kept_one is not None:
            if self.max_age is not None:
                self._blocks[key] = kept_one._replace(used=now)
            self._blocks.move_to_end(key)
        return kept_one

    def _make_room(self, size: int) -> None:
        while self._blocks and self._bytes + size > self.max_bytes:
            self._remove(next(iter(self._blocks)))

    def _remove(self, key: bytes) -> None:
        kept = self._blocks.pop(key)
        self._bytes -= kept.size
        self._gone(kept)


def _same(a: KeptBlock | None, b: KeptBlock | None) -> bool:
    """Whether both are entries of the same block in the same place; when they were last used may differ."""
    return a is not None and b is not None and (a.head, a.place) == (b.head, b.place)
