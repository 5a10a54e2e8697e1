"""A piece of a GPU's memory in which an engine keeps copies of blocks, as other processes see it. No torch.

The piece has numbered places. A block of a place is in as many parts as there are arrays of slots, and each part of all
places lies in one piece, as it does in the slots: so blocks that are neighbours on both sides are one copy for each
part.
"""

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tritonllm.engine.transfer.connector import DeviceSlots
from tritonllm.engine.transfer.wire import WireError

MAGIC = b"cudaipc1"
NAME_BYTES = 16
HANDLE_BYTES = 64
ALIGNMENT = 512  # of parts
_FACTS = struct.Struct(f"<8sQ{NAME_BYTES}s{HANDLE_BYTES}sIH")  # magic, machine, name, handle, places, parts
_SIZE = struct.Struct("<I")
Span = tuple[int, int, int]  # the address to copy to, the one to copy from, and bytes


class Device(Protocol):
    """One GPU's memory and copies there, for any thread. What goes wrong is an ``OSError``.

    Attributes:
        machine: a number of this host since it was started.
    """

    machine: int

    def allocate(self, nbytes: int) -> int:
        """The address of so many bytes, which other processes can open."""

    def free(self, address: int) -> None:
        """Free memory that :meth:`allocate` gave; nobody uses it any more, in whatever process."""

    def export(self, address: int) -> bytes:
        """``HANDLE_BYTES`` bytes that another process opens."""

    def open(self, handle: bytes) -> int:
        """The address of another process's memory, on whichever GPU of this host that is."""

    def extent(self, address: int) -> int | None:
        """Bytes of what was opened; ``None`` if the driver does not say."""

    def close(self, address: int) -> None:
        """Unmap memory that :meth:`open` mapped at this address."""

    def copy(self, spans: Sequence[Span]) -> Callable[[], None]:
        """Begin copies beside all else that the device does. Returns what waits until they have ended, which must be
        called before memory that they touch is used or given back."""


MakeDevice = Callable[[int | None], Device]  # of the GPU with that number; ValueError: there is none


class SharedArena(NamedTuple):
    """A description of the piece of memory, which another process on the machine can open.

    Attributes:
        machine: the machine that the memory is in, as :attr:`Device.machine`.
        name: the name of this piece; no other piece has it, whichever process has made it.
        handle: the handle for :meth:`Device.open`.
        places: how many blocks the piece holds.
        sizes: the size of each part of a block, in bytes.
    """

    machine: int
    name: bytes
    handle: bytes
    places: int
    sizes: tuple[int, ...]

    def pack(self) -> bytes:
        facts = _FACTS.pack(MAGIC, self.machine, self.name, self.handle, self.places, len(self.sizes))
        return facts + b"".join(map(_SIZE.pack, self.sizes))

    @classmethod
    def unpack(cls, data: bytes) -> "SharedArena":
        """Read a description that :meth:`pack` has written.

        Raises:
            WireError: another connector's description, or none.
        """
        if len(data) < _FACTS.size or data[: len(MAGIC)] != MAGIC:
            raise WireError("the other engine's copies are in no GPU's memory: it has another kv_connector")
        _, machine, name, handle, places, parts = _FACTS.unpack_from(data)
        if len(data) != _FACTS.size + parts * _SIZE.size:
            raise WireError("the description of the other engine's memory is not whole")
        sizes = tuple(size for (size,) in _SIZE.iter_unpack(data[_FACTS.size :]))
        return cls(machine, name, handle, places, sizes)

    @property
    def offsets(self) -> list[int]:
        """Where each part begins."""
        return _offsets(self.places, self.sizes)[:-1]

    def spans(
        self, base: int, slots: Sequence[DeviceSlots], pairs: tuple[np.ndarray, np.ndarray], into_slots: bool
    ) -> list[Span]:
        """The copies that blocks take from places to slots, or back.

        Args:
            base: the arena's address here.
            slots: the arrays of slots, whose rows have ``sizes``.
            pairs: int64 ``[N]`` slots and ``[N]`` places.
        """
        found = []
        for part, offset, size in zip(slots, self.offsets, self.sizes, strict=True):
            for slot, place, count in runs_of(*pairs):
                here, there = part.address + slot * size, base + offset + place * size
                found.append((here, there, count * size) if into_slots else (there, here, count * size))
        return found


def arena_bytes(places: int, sizes: Sequence[int]) -> int:
    """How many bytes ``places`` places take whose parts have these sizes in bytes."""
    return _offsets(places, sizes)[-1]


def _offsets(places: int, sizes: Sequence[int]) -> list[int]:
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-places * size // ALIGNMENT) * ALIGNMENT)
    return found


def runs_of(slots: np.ndarray, places: np.ndarray) -> list[tuple[int, int, int]]:
    """Where both follow each other: the first slot, the first place, and how many they are."""
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(places) != 1)) + 1
    starts = np.concatenate(([0], breaks)).astype(np.int64) if len(slots) else np.empty(0, np.int64)
    counts = np.diff(np.append(starts, len(slots)))
    return list(zip(slots[starts].tolist(), places[starts].tolist(), counts.tolist(), strict=True))
