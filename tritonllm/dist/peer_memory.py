"""Memory of this GPU that the other ranks of the machine write to, and theirs that this one writes to.

Each rank allocates a piece, exports a handle of it, and opens those of the others (CUDA driver API, "Inter-Process
Communication"). The driver's library is called directly: torch shares tensors by the same handles, but counts
references between processes, of which some may be killed; and its symmetric memory (2.11) numbers meetings by process,
so that one which leads a second group of new ranks would wait for ever.
"""

import ctypes
import logging
import socket
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tritonllm.dist.group import ConnectedGroup

logger = logging.getLogger(__name__)
HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1


class DriverError(RuntimeError):
    """The CUDA driver refused; the message has its reason."""


class Driver(Protocol):
    """What is asked of a GPU's driver. All but :meth:`give_back` raise :class:`DriverError`."""

    def allocate(self, nbytes: int, word: int) -> int:
        """The address of so many bytes, all of them the 32-bit ``word``."""

    def export(self, address: int) -> bytes:
        """What another process opens."""

    def open(self, handle: bytes) -> int:
        """The address of another process's memory."""

    def give_back(self, own: int | None, opened: Sequence[int]) -> None:
        """Memory of this process, and of others. What cannot be given back, the log names."""


_END_OF_COPY: list[tuple[str, Any]] = [
    ("x", ctypes.c_size_t),
    ("y", ctypes.c_size_t),
    ("kind", ctypes.c_int),
    ("host", ctypes.c_void_p),
    ("device", ctypes.c_uint64),
    ("array", ctypes.c_void_p),
    ("pitch", ctypes.c_size_t),
]
HOST, DEVICE = 1, 2  # kinds of memory


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D`` of the driver's API."""

    _fields_ = [
        *((f"source_{name}", kind) for name, kind in _END_OF_COPY),
        *((f"target_{name}", kind) for name, kind in _END_OF_COPY),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


class _CopyAttributes(ctypes.Structure):
    """``CUmemcpyAttributes`` of the driver's API, for all copies of a call."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


IN_STREAM_ORDER = 1  # sources are read behind what is on the stream


class CudaDriver:
    """The functions of libcuda that are needed, on one device.

    Raises:
        OSError: there is no such library.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._device = device
        self._context: ctypes.c_void_p | None = None

    def allocate(self, nbytes: int, word: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self._call("cuMemsetD32_v2", address, ctypes.c_uint32(word), ctypes.c_size_t(nbytes // 4))
        self._call("cuCtxSynchronize")
        return address.value

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS))
        return address.value

    def extent(self, address: int) -> int | None:
        """Bytes of memory that begins there, as far as the driver says."""
        start, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        try:
            self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(nbytes), ctypes.c_uint64(address))
        except DriverError:
            return None
        return start.value + nbytes.value - address

    @contextmanager
    def current(self) -> Iterator[None]:
        """Inside the block the device's context is the thread's. A thread in which torch has done nothing has none, for
        torch leaves the first device to the runtime library, which the driver knows nothing of."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream()
            if self._context is None:
                index = torch.cuda.current_device()
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)  # torch's own, to the end
                self._context = context
            self._call("cuCtxSetCurrent", self._context)
            yield

    def copy(self, spans: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Begin copies on a stream: to an address, from an address, so many bytes; either may be on another GPU. None
        reads what another one writes. The context must be :meth:`current`.

        Drivers from 12.8 on take all of them in one call, and begin each before the one before it has ended: 512 blocks
        of 2 MB between two H200s take 3.2 ms, one after the other 4.6; of 1 MB 1.8 and 3.1.
        """
        together = getattr(self._library, "cuMemcpyBatchAsync", None)
        if together is not None and len(spans) > 1:
            self._copy_together(together, spans, stream)
            return
        function = self._library.cuMemcpyAsync
        function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        for to, source, nbytes in spans:
            code = function(to, source, nbytes, stream)
            if code:
                raise self._error("cuMemcpyAsync", code)

    def _copy_together(self, function: Any, spans: Sequence[tuple[int, int, int]], stream: int) -> None:
        columns = np.ascontiguousarray(np.array(spans, np.uint64).T)
        how, all_alike, refused = _CopyAttributes(IN_STREAM_ORDER), ctypes.c_size_t(0), ctypes.c_size_t(0)
        arrays = [ctypes.c_void_p(column.ctypes.data) for column in columns]
        rules = ctypes.byref(how), ctypes.byref(all_alike), ctypes.c_size_t(1), ctypes.byref(refused)
        code = function(*arrays, ctypes.c_size_t(len(spans)), *rules, ctypes.c_void_p(stream))
        if code:
            raise self._error("cuMemcpyBatchAsync", code)

    def copy_to_host(self, spans: Sequence[tuple[int, int, int]], width: int, pitch: int, stream: int) -> None:
        """Begin copies of rows of ``width`` bytes that lie side by side on the device into the host's page-locked
        memory, where each begins ``pitch`` bytes behind the one before: to an address there, from an address, so many
        rows. The context must be :meth:`current`."""
        function = self._library.cuMemcpy2DAsync_v2
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        ends = {"source_kind": DEVICE, "source_pitch": width, "target_kind": HOST, "target_pitch": pitch}
        copy = _Copy2D(width=width, **ends)
        for to, source, rows in spans:  # the driver has read it when it returns
            copy.target_host, copy.source_device, copy.height = to, source, rows
            code = function(ctypes.addressof(copy), stream)
            if code:
                raise self._error("cuMemcpy2DAsync", code)

    def give_back(self, own: int | None, opened: Sequence[int]) -> None:
        calls = [("cuIpcCloseMemHandle", address) for address in opened]
        calls += [] if own is None else [("cuMemFree_v2", own)]
        failed = []
        for name, address in calls:  # one that fails keeps none of the others
            try:
                self._call(name, ctypes.c_uint64(address))
            except DriverError as error:
                failed.append(str(error))
        if failed:  # as all do once a kernel has failed; then the process has no more use for the device
            logger.warning("%d of %d pieces of memory were not given back: %s", len(failed), len(calls), failed[0])

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.current_stream()  # torch has made the device's context the current one
            code = getattr(self._library, name)(*arguments)
        if code:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> DriverError:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


class Offer(NamedTuple):
    """What a rank tells the others, as 64-bit integers.

    Attributes:
        alike: a number of what must be the same on all ranks, this machine above all; 0 if it has no memory to offer.
        handle: the handle of its memory.
    """

    alike: int = 0
    handle: bytes = bytes(HANDLE_BYTES)

    def words(self) -> list[int]:
        return [self.alike, *memoryview(self.handle).cast("q").tolist()]

    @classmethod
    def of_words(cls, words: Sequence[int]) -> "Offer":
        return cls(words[0], b"".join(word.to_bytes(8, "little", signed=True) for word in words[1:]))


def number_of(shape: Sequence[int]) -> int:
    """A number of this machine since it was started, and of ``shape``; never 0."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.exists() else socket.gethostname()
    return zlib.crc32(f"{name} {list(shape)}".encode()) + 1


class PeerMemory:
    """A piece of memory on each rank. It is given back when nobody holds this any more, or at the process's end.

    Attributes:
        addresses: the address of each rank's piece, as this process sees them.
    """

    def __init__(self, driver: Driver, addresses: Sequence[int], rank: int) -> None:
        self.addresses = tuple(addresses)
        opened = [address for other, address in enumerate(addresses) if other != rank]
        weakref.finalize(self, driver.give_back, addresses[rank], opened).atexit = False


def share_memory(
    group: ConnectedGroup, make_driver: Callable[[], Driver], nbytes: int, word: int, shape: Sequence[int]
) -> PeerMemory | str:
    """Share ``nbytes`` of each rank's GPU; all ranks call it.

    Args:
        make_driver: raises ``OSError`` where there is none.
        word: 32 bits with which the memory is filled.
        shape: what must be the same on all ranks, besides the machine.

    Returns:
        The memory, once all ranks have theirs; or, on all of them, why there is none, as far as this rank knows.
    """
    driver: Driver | None = None
    own, offer, problem = None, Offer(), "another rank could not"
    opened: list[int] = []
    try:
        driver = make_driver()
        own = driver.allocate(nbytes, word)
        offer = Offer(number_of(shape), driver.export(own))
    except (OSError, DriverError) as error:
        problem = str(error)
    offers = [Offer.of_words(words) for words in group.exchange(offer.words())]
    if driver is not None and offer.alike:
        if any(other.alike not in (0, offer.alike) for other in offers):
            problem = "not all ranks are on one machine and on GPUs of one kind"
        elif all(other.alike for other in offers):
            try:
                opened += (driver.open(other.handle) for rank, other in enumerate(offers) if rank != group.rank)
            except DriverError as error:
                problem = str(error)
    if group.least(int(len(opened) == group.size - 1)):
        assert driver is not None and own is not None
        return PeerMemory(driver, [*opened[: group.rank], own, *opened[group.rank :]], group.rank)
    if driver is not None:
        driver.give_back(own, opened)
    return problem
