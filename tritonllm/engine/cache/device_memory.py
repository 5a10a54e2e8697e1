"""Addresses that stay while the memory behind them goes and comes back: what a sleeping engine stands on.

CUDA graphs hold addresses. So an :class:`Arena` reserves a range of addresses once, and maps memory behind them piece
by piece; tensors in it are plain tensors. On a GPU that is CUDA's virtual memory management, called through ``libcuda``
(torch has no public call that takes memory from under a tensor). On the CPU it is an anonymous mapping whose pages are
given back.
"""

import ctypes
import mmap
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol
from weakref import finalize

import torch

CHUNK = 256 << 20  # bytes that are mapped, and kept on the host, as one; a power of two, as torch pins no other sizes
ALIGNMENT = 512  # of tensors, as torch's own allocator has it


class DevicePages(Protocol):
    """A range of addresses; offsets and sizes are multiples of ``granularity``, as far as the range goes."""

    granularity: int

    def map(self, offset: int, size: int) -> None:
        """Put memory behind ``size`` bytes of the range, from ``offset`` on.

        Raises:
            MemoryError: there is not enough; nothing was mapped.
        """

    def unmap(self, offset: int, size: int) -> None:
        """Give the memory there back, which was mapped with the same numbers. Its contents are lost."""

    def bytes(self) -> torch.Tensor:
        """All of the range as a uint8 tensor, of which what is mapped may be touched. Something must be mapped."""

    def synchronize(self) -> None:
        """Wait for all work that may touch the memory."""


class HostPages:
    """A range of the CPU's memory. Memory comes when it is touched, so to map does nothing."""

    granularity = mmap.PAGESIZE

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def map(self, offset: int, size: int) -> None:
        pass

    def unmap(self, offset: int, size: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, offset, size)

    def bytes(self) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def synchronize(self) -> None:
        pass


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The struct ``CUmemAllocationProp`` of the CUDA driver."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """The struct ``CUmemAccessDesc`` of the CUDA driver."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Piece(NamedTuple):
    handle: ctypes.c_ulonglong
    size: int


_PINNED, _DEVICE, _READ_WRITE, _MINIMUM, _OUT_OF_MEMORY = 1, 1, 3, 0, 2


class CudaPages:
    """A range of a GPU's addresses. Memory and addresses are given back when neither this object nor a tensor of it
    lives.

    Args:
        size: bytes of the range; it is rounded up to the granularity.
        device: the GPU, with its index; torch must have used it, which makes its context.
        driver: the library ``libcuda``.

    Raises:
        RuntimeError: the driver refuses.
    """

    def __init__(self, size: int, device: torch.device, driver: Any = None) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = device = torch.device("cuda", index)
        self._location = _Location(_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=self._location)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), _MINIMUM)
        self.granularity = granularity.value
        self._size = -(-size // self.granularity) * self.granularity
        self._pieces: dict[int, _Piece] = {}  # by offset
        base = ctypes.c_ulonglong()
        zero = ctypes.c_ulonglong(0)
        self._call(
            "cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(self._size), ctypes.c_size_t(0), zero, zero
        )
        self._base = base.value
        finalize(self, _free, self._driver, device, self._base, self._size, self._pieces).atexit = False

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._driver, name)(*args)
        if status == _OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the GPU has not enough free memory")
        if status:
            raise RuntimeError(f"{name} failed: CUDA error {status}")

    def map(self, offset: int, size: int) -> None:
        handle, length, nothing = ctypes.c_ulonglong(), ctypes.c_size_t(size), ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(self._properties), nothing)
        address = ctypes.c_ulonglong(self._base + offset)
        try:
            self._call("cuMemMap", address, length, ctypes.c_size_t(0), handle, nothing)
        except BaseException:
            self._call("cuMemRelease", handle)
            raise
        self._pieces[offset] = _Piece(handle, size)
        access = _Access(self._location, _READ_WRITE)
        try:
            self._call("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
        except BaseException:
            self.unmap(offset, size)
            raise

    def unmap(self, offset: int, size: int) -> None:
        self._call("cuMemUnmap", ctypes.c_ulonglong(self._base + offset), ctypes.c_size_t(size))
        self._call("cuMemRelease", self._pieces.pop(offset).handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._size,), "typestr": "|u1", "data": (self._base, False), "version": 3}

    def bytes(self) -> torch.Tensor:
        return torch.as_tensor(self, device=self._device)  # which keeps this object as long as a tensor lives

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _free(driver: Any, device: torch.device, base: int, size: int, pieces: dict[int, _Piece]) -> None:
    """Give back memory and addresses that no tensor looks at any more."""
    if pieces:
        torch.cuda.synchronize(device)  # a kernel may still run on what Python has forgotten
    for offset, piece in pieces.items():
        driver.cuMemUnmap(ctypes.c_ulonglong(base + offset), ctypes.c_size_t(piece.size))
        driver.cuMemRelease(piece.handle)
    driver.cuMemAddressFree(ctypes.c_ulonglong(base), ctypes.c_size_t(size))


def pages_on(device: torch.device, size: int) -> DevicePages:
    return CudaPages(size, device) if device.type == "cuda" else HostPages(size)


class Arena:
    """Tensors one behind the other in a range of addresses, which can lose their memory and get it back.

    Args:
        size: bytes that all tensors together may take, each rounded up to :data:`ALIGNMENT`.
        device: where they are.
        pages: the range, at least ``size`` bytes; by default the device's own.
        chunk: bytes that are mapped as one.
    """

    def __init__(self, size: int, device: torch.device, pages: DevicePages | None = None, chunk: int = CHUNK) -> None:
        self._size, self._chunk = max(size, 1), chunk
        self._pages = pages_on(device, self._size) if pages is None else pages
        if chunk % self._pages.granularity:
            raise ValueError(f"chunk={chunk} must be a multiple of the granularity, {self._pages.granularity}")
        self._pinned = device.type == "cuda"
        self._mapped = 0  # bytes from the beginning
        self._used = 0
        self._bytes: torch.Tensor | None = None
        self._kept: list[torch.Tensor] | None = None
        self._asleep_bytes = 0

    @property
    def mapped(self) -> int:
        """Bytes of memory behind the addresses now."""
        return self._mapped

    @property
    def is_asleep(self) -> bool:
        return self._asleep_bytes > 0

    @staticmethod
    def room(tensors: Sequence[torch.Tensor]) -> int:
        """The size of an arena for such tensors."""
        return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor, not initialised.

        Raises:
            MemoryError: the device has not enough memory.
            ValueError: the arena has not enough room.
        """
        size = prod(shape) * dtype.itemsize
        begin = self._used
        if begin + _aligned(size) > _aligned(self._size):
            raise ValueError(f"an arena of {self._size} bytes has no room for {size} more")
        self._map_to(begin + size)
        self._used = begin + _aligned(size)
        if self._bytes is None:
            self._bytes = self._pages.bytes()
        return self._bytes[begin : begin + size].view(dtype).view(tuple(shape))

    def _map_to(self, end: int) -> None:
        """Map whole chunks until so many bytes are mapped; if it fails, those of this call are given back."""
        before = self._mapped
        try:
            while self._mapped < end:
                size = self._size_at(self._mapped)
                self._pages.map(self._mapped, size)
                self._mapped += size
        except BaseException:
            self._unmap_to(before)
            raise

    def _unmap_to(self, end: int) -> None:
        while self._mapped > end:
            begin = (self._mapped - 1) // self._chunk * self._chunk
            self._pages.unmap(begin, self._mapped - begin)
            self._mapped = begin

    def _size_at(self, begin: int) -> int:
        """The size in bytes of the chunk that begins at this offset: the last one is smaller."""
        return min(self._chunk, -(-self._size // self._pages.granularity) * self._pages.granularity - begin)

    def sleep(self, keep: bool) -> None:
        """Give all memory back. An arena that sleeps already stays as it is.

        Args:
            keep: hold the contents on the host until :meth:`wake_up`.

        Raises:
            RuntimeError, MemoryError: the host has not enough memory; nothing was given back.
        """
        if self.is_asleep or not self._mapped:
            return
        self._pages.synchronize()
        self._kept = [self._to_host(begin) for begin in range(0, self._used, self._chunk)] if keep else None
        self._pages.synchronize()
        self._asleep_bytes = self._mapped
        self._unmap_to(0)

    def _to_host(self, begin: int) -> torch.Tensor:
        assert self._bytes is not None
        source = self._bytes[begin : min(begin + self._chunk, self._used)]
        kept = torch.empty(len(source), dtype=torch.uint8, pin_memory=self._pinned)
        return kept.copy_(source, non_blocking=True)

    @torch.inference_mode()
    def wake_up(self) -> None:
        """Get the memory back, with what was kept in it, else zeros. An arena that is awake stays as it is.

        Raises:
            MemoryError: the device has not enough memory now; the arena sleeps on.
        """
        if not self.is_asleep:
            return
        assert self._bytes is not None
        self._map_to(self._asleep_bytes)
        self._asleep_bytes = 0
        if self._kept is None:
            self._bytes[: self._used].zero_()
        else:
            for number, kept in enumerate(self._kept):
                begin = number * self._chunk
                self._bytes[begin : begin + len(kept)].copy_(kept, non_blocking=True)
            self._pages.synchronize()
            # The pieces stay pinned in torch's allocator, which gives the same ones to the next sleep. It could only be
            # emptied with what steps use (engine/data/inputs.py, reserve_pinned), and these would wait for the driver
            # then.
            self._kept = None


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
