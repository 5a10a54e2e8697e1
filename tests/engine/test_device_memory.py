"""Arenas: addresses stay, contents come back or do not, and what fails changes nothing."""

import ctypes
import gc
import weakref

import pytest
import torch

from tritonllm.engine.cache.device_memory import ALIGNMENT, Arena, CudaPages, HostPages

CPU = torch.device("cpu")
PAGE = HostPages.granularity


class CountedPages(HostPages):
    """Knows what is mapped; refuses what is beyond ``most`` bytes."""

    def __init__(self, size):
        super().__init__(size)
        self.mapped, self.most = {}, size * 2

    def map(self, offset, size):
        if sum(self.mapped.values()) + size > self.most:
            raise MemoryError("full")
        assert offset not in self.mapped
        self.mapped[offset] = size

    def unmap(self, offset, size):
        assert self.mapped.pop(offset) == size
        super().unmap(offset, size)


def filled(chunks=3):
    """An arena of some chunks, with two tensors that fill it but for the last page."""
    size = chunks * 4 * PAGE - PAGE
    pages = CountedPages(size)
    arena = Arena(size, CPU, pages, chunk=4 * PAGE)
    first = arena.empty((5, 100), torch.float32)
    second = arena.empty((size - Arena.room([first]),), torch.uint8)
    first.copy_(torch.arange(500).view(5, 100))
    second.copy_(torch.arange(len(second)) % 251)
    return arena, pages, first, second


def test_tensors_do_not_overlap():
    tensors = [torch.empty(7), torch.empty(0, 4), torch.empty(3, 5, dtype=torch.bfloat16)]
    arena = Arena(Arena.room(tensors), CPU)
    made = [arena.empty(tensor.shape, tensor.dtype).fill_(number) for number, tensor in enumerate(tensors)]
    assert [tuple(tensor.shape) for tensor in made] == [(7,), (0, 4), (3, 5)]
    assert [tensor.dtype for tensor in made] == [torch.float32, torch.float32, torch.bfloat16]
    assert made[0].eq(0).all() and made[2].eq(2).all()
    assert made[2].data_ptr() - made[0].data_ptr() == ALIGNMENT
    with pytest.raises(ValueError, match="no room for 4 more"):
        arena.empty((1,), torch.float32)


def test_memory_comes_as_it_is_needed():
    pages = CountedPages(8 * PAGE)
    arena = Arena(8 * PAGE, CPU, pages, chunk=2 * PAGE)
    arena.empty((PAGE,), torch.uint8)
    assert pages.mapped == {0: 2 * PAGE}
    arena.empty((4 * PAGE,), torch.uint8)
    assert arena.mapped == 6 * PAGE == sum(pages.mapped.values())


@pytest.mark.parametrize("keep", [True, False])
def test_sleep_and_wake_up(keep):
    arena, pages, first, second = filled()
    addresses, before = (first.data_ptr(), second.data_ptr()), (first.clone(), second.clone())
    mapped = dict(pages.mapped)
    arena.sleep(keep)
    assert arena.is_asleep and pages.mapped == {} and arena.mapped == 0
    assert second.eq(0).all(), "its pages are gone"
    arena.sleep(keep=False)  # what sleeps stays as it is
    arena.wake_up()
    arena.wake_up()
    assert pages.mapped == mapped and not arena.is_asleep
    assert (first.data_ptr(), second.data_ptr()) == addresses
    for tensor, old in zip((first, second), before, strict=True):
        assert torch.equal(tensor, old if keep else torch.zeros_like(old))


def test_each_sleep_takes_the_same_pieces_of_the_host(monkeypatch):
    """So that torch, which keeps pinned memory by size, has them already. The arena itself keeps none when awake."""
    arena, _, _, second = filled()
    before, pieces, allocate = second.clone(), [], torch.empty

    def recorded(*size, **options):
        piece = allocate(*size, **options)
        pieces.append(weakref.ref(piece))
        sizes.append(piece.numel())
        return piece

    monkeypatch.setattr(torch, "empty", recorded)
    asked = []
    for _ in range(3):
        sizes: list[int] = []
        arena.sleep(keep=True)
        assert all(piece() is not None for piece in pieces)
        arena.wake_up()
        assert torch.equal(second, before)
        assert all(piece() is None for piece in pieces), "the host's memory is still held"
        asked.append(sizes)
        pieces.clear()
    assert asked[0] == asked[1] == asked[2]
    assert asked[0] == [4 * PAGE, 4 * PAGE, 3 * PAGE]


def test_too_little_memory_changes_nothing():
    arena, pages, first, _ = filled()
    arena.sleep(keep=True)
    pages.most = 6 * PAGE  # somebody else has taken the rest
    with pytest.raises(MemoryError):
        arena.wake_up()
    assert pages.mapped == {} and arena.is_asleep
    pages.most = 100 * PAGE
    arena.wake_up()
    assert torch.equal(first, torch.arange(500.0).view(5, 100))


class Driver:
    """In the place of libcuda: keeps account, and can run out of memory."""

    def __init__(self, free=16):
        self.free, self.mapped, self.reserved, self.fails = free, {}, 0, ""

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: 1 if name == self.fails else getattr(self, "_" + name)(*args)

    def _cuMemGetAllocationGranularity(self, out, properties, option):
        assert (properties._obj.type, properties._obj.location.type, properties._obj.location.id) == (1, 1, 1)
        out._obj.value = 1024
        return 0

    def _cuMemAddressReserve(self, out, size, alignment, address, flags):
        out._obj.value, self.reserved = 1 << 40, size.value
        return 0

    def _cuMemCreate(self, out, size, properties, flags):
        if size.value // 1024 > self.free:
            return 2
        self.free -= size.value // 1024
        out._obj.value = size.value
        return 0

    def _cuMemMap(self, address, size, offset, handle, flags):
        self.mapped[address.value] = size.value
        return 0

    def _cuMemSetAccess(self, address, size, access, count):
        assert address.value in self.mapped and access._obj.flags == 3
        return 0

    def _cuMemUnmap(self, address, size):
        assert self.mapped.pop(address.value) == size.value
        return 0

    def _cuMemRelease(self, handle):
        self.free += handle.value // 1024
        return 0

    def _cuMemAddressFree(self, address, size):
        assert size.value == self.reserved
        self.reserved = 0
        return 0


def test_calls_of_the_driver(monkeypatch):
    driver = Driver()
    pages = CudaPages(5000, torch.device("cuda", 1), driver)
    assert driver.reserved == 5120 and pages.granularity == 1024
    pages.map(0, 2048)
    pages.map(2048, 3072)
    assert driver.mapped == {1 << 40: 2048, (1 << 40) + 2048: 3072} and driver.free == 11
    pages.unmap(2048, 3072)
    assert driver.free == 14
    with pytest.raises(MemoryError, match="cuMemCreate"):
        driver.free = 1
        pages.map(2048, 3072)
    driver.free = 14
    for name in ("cuMemMap", "cuMemSetAccess"):
        driver.fails = name
        with pytest.raises(RuntimeError, match=f"{name} failed: CUDA error 1"):
            pages.map(2048, 3072)
        assert driver.free == 14 and len(driver.mapped) == 1
    driver.fails = ""
    interface = pages.__cuda_array_interface__
    assert (interface["shape"], interface["data"]) == ((5120,), (1 << 40, False))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    del pages
    gc.collect()
    assert (driver.free, driver.mapped, driver.reserved) == (16, {}, 0), "nothing is left when nobody looks at it"


def test_structures_are_as_the_driver_has_them():
    from tritonllm.engine.cache import device_memory

    assert ctypes.sizeof(device_memory._Properties) == 32
    assert device_memory._Properties.win32_handle_meta_data.offset == 16
    assert ctypes.sizeof(device_memory._Access) == 12
