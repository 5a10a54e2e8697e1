"""A device whose memory is shared memory of the host, so that processes without a GPU can open each other's."""

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from tritonllm.engine.transfer.connector import DeviceSlots
from tritonllm.engine.transfer.ipc_memory import MakeDevice, Span


class Host:
    """Makes devices, and fails as a test wishes.

    Attributes:
        fault: of copies that begin now: ``refuse``: none is begun; ``break``: half of it is done, then it fails.
            ``closed``: no memory can be opened; ``full``: none can be allocated.
        machine: of devices that are made from now on.
        before_copy: is called when a copy begins, with its spans.
        owned, opened: addresses that are in use, with their mappings.
        running: spans of copies that have not ended.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self.machine = 1
        self.before_copy: Callable[[Sequence[Span]], None] = lambda spans: None
        self.owned: dict[int, tuple[mmap.mmap, int]] = {}
        self.opened: dict[int, mmap.mmap] = {}
        self.running: list[Span] = []

    def device(self, index: int | None) -> "StandInDevice":
        assert index is None
        return StandInDevice(self)


class StandInDevice:
    def __init__(self, host: Host) -> None:
        self.host, self.machine = host, host.machine

    def allocate(self, nbytes: int) -> int:
        if self.host.fault == "full":
            raise OSError("out of memory")
        file = os.memfd_create("stand-in")
        os.ftruncate(file, nbytes)
        memory = mmap.mmap(file, nbytes)
        self.host.owned[address_of(memory)] = memory, file
        return address_of(memory)

    def free(self, address: int) -> None:
        memory, file = self.host.owned.pop(address)
        self.check_unused(address, len(memory))
        memory.close()
        os.close(file)

    def export(self, address: int) -> bytes:
        return f"{os.getpid()} {self.host.owned[address][1]}".encode()

    def open(self, handle: bytes) -> int:
        if self.host.fault == "closed":
            raise OSError("no way to that GPU")
        process, number = map(int, handle.rstrip(b"\0").split())
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        try:
            memory = mmap.mmap(file, 0)
        finally:
            os.close(file)
        self.host.opened[address_of(memory)] = memory
        return address_of(memory)

    def extent(self, address: int) -> int | None:
        return len(self.host.opened[address])

    def close(self, address: int) -> None:
        memory = self.host.opened.pop(address)
        self.check_unused(address, len(memory))
        memory.close()

    def check_unused(self, address: int, nbytes: int) -> None:
        for to, source, _ in list(self.host.running):
            assert not any(address <= place < address + nbytes for place in (to, source)), "a copy is under way"

    def copy(self, spans: Sequence[Span]) -> Callable[[], None]:
        self.host.before_copy(spans)
        if self.host.fault == "refuse":
            raise OSError("the device is gone")
        broken = self.host.fault == "break"
        self.host.running.extend(spans)

        def wait() -> None:
            """Copies are as late as they may be."""
            for to, source, nbytes in list(spans)[: len(spans) // 2 if broken else None]:
                ctypes.memmove(to, source, nbytes)
            for span in spans:
                self.host.running.remove(span)
            if broken:
                raise OSError("the device has failed")

        return wait


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def device_slots(arrays: Sequence[np.ndarray]) -> list[DeviceSlots]:
    """Contiguous uint8 ``[slots, bytes]`` arrays as slots of the stand-in's memory."""
    assert all(part.flags.c_contiguous and part.dtype == np.uint8 for part in arrays)
    return [DeviceSlots(part.ctypes.data, (len(part), part.shape[1]), None, part) for part in arrays]


def stand_in() -> MakeDevice:
    """What makes devices of a host without faults; for other processes."""
    return Host().device
