"""Copies of rows by the driver, which a library in its place makes in the host's memory: sizes, places and order."""

import ctypes
import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.dist.peer_memory import (
    DEVICE,
    HOST,
    IN_STREAM_ORDER,
    CudaDriver,
    DriverError,
    _Copy2D,
    _CopyAttributes,
)
from tritonllm.engine.cache.host_copies import HostCopies


class Library:
    """Reads a description as the driver does, in the layout of its header."""

    def __init__(self, code=0):
        self.streams, self.code = [], code

        def copy(address, stream):
            words = (ctypes.c_uint64 * 16).from_address(address)
            x, y, kind, _, source, array, pitch, to_x, to_y, to_kind, to, _, to_array, to_pitch, width, height = words
            assert (x, y, array, to_x, to_y, to_array) == (0,) * 6
            assert (kind & 0xFFFFFFFF, to_kind & 0xFFFFFFFF) == (DEVICE, HOST)
            if not self.code:
                for row in range(height):
                    ctypes.memmove(to + row * to_pitch, source + row * pitch, width)
            self.streams.append(stream)
            return self.code

        self.cuMemcpy2DAsync_v2 = copy
        self.cuGetErrorString = lambda code, text: 0


class CopyLibrary:
    """Copies what it is told to, in an order of its own where that is allowed.

    Args:
        together: it takes many copies in one call.
    """

    def __init__(self, together, code=0):
        self.calls = []

        def one(to, source, nbytes, stream):
            self.calls.append((1, stream))
            if not code:
                ctypes.memmove(to, source, nbytes)
            return code

        def many(targets, sources, sizes, count, attributes, starts, kinds, refused, stream):
            assert (kinds.value, starts._obj.value, refused._obj.value) == (1, 0, 0)
            assert bytes(attributes._obj) == IN_STREAM_ORDER.to_bytes(4, "little") + bytes(20)
            self.calls.append((count.value, stream.value))
            columns = [(ctypes.c_uint64 * count.value).from_address(a.value) for a in (targets, sources, sizes)]
            for to, source, nbytes in [] if code else reversed(list(zip(*columns, strict=True))):
                ctypes.memmove(to, source, nbytes)
            return code

        self.cuMemcpyAsync = type("Function", (), {"__call__": staticmethod(one)})()
        if together:
            self.cuMemcpyBatchAsync = many
        self.cuGetErrorString = lambda code, text: 0


def driver(library):
    made = CudaDriver.__new__(CudaDriver)
    made._library = library
    made.current = nullcontext
    return made


def test_the_description_is_as_long_as_the_drivers():
    assert ctypes.sizeof(_Copy2D) == 128 and ctypes.sizeof(_CopyAttributes) == 24


@given(
    slots=st.lists(st.integers(0, 8), unique=True, min_size=1),
    first=st.integers(0, 3),
    count=st.integers(1, 4),
)
def test_a_column_of_scattered_slots(slots, first, count):
    """Nothing else of the host's memory is written."""
    rows, elements = 8, 24
    host = torch.full((9, rows, elements), -1, dtype=torch.bfloat16)
    staging = torch.randn(12, count, elements).to(torch.bfloat16)
    want = host.clone()
    want[slots, first : first + count] = staging[: len(slots)]
    library = Library()
    copies = SimpleNamespace(_driver=driver(library), _stream=SimpleNamespace(cuda_stream=7))
    HostCopies._to_host(copies, staging, host[:, first : first + count], slots)
    assert torch.equal(host, want)
    runs = 1 + sum(b != a + 1 for a, b in itertools.pairwise(slots))
    assert library.streams == [7] * runs


@given(order=st.permutations(range(6)), count=st.integers(0, 6), size=st.integers(1, 9), together=st.booleans())
def test_copies_of_scattered_rows(order, count, size, together):
    rows, found = torch.randint(0, 256, (6, 9), dtype=torch.uint8), torch.zeros(6, 9, dtype=torch.uint8)
    spans = [(found[to].data_ptr(), rows[source].data_ptr(), size) for to, source in enumerate(order[:count])]
    library = CopyLibrary(together)
    driver(library).copy(spans, 7)
    want = torch.zeros_like(found)
    want[:count, :size] = rows[list(order[:count]), :size]
    assert torch.equal(found, want)
    assert library.calls == ([(count, 7)] if together and count > 1 else [(1, 7)] * count)


@pytest.mark.parametrize("together", [False, True])
def test_copies_that_the_driver_refuses_are_an_error(together):
    memory = torch.zeros(8)
    spans = [(memory.data_ptr(), memory.data_ptr() + 16, 4)] * 2
    with pytest.raises(DriverError, match="cuMemcpyBatchAsync: unknown" if together else "cuMemcpyAsync: unknown"):
        driver(CopyLibrary(together, code=700)).copy(spans, 7)


def test_what_the_driver_refuses_is_an_error():
    memory = torch.zeros(4, 8)
    with pytest.raises(DriverError, match="cuMemcpy2DAsync: unknown error"):
        driver(Library(code=700)).copy_to_host([(memory.data_ptr(), memory.data_ptr(), 1)], 4, 32, 0)


def test_one_piece_of_memory_that_cannot_be_given_back_keeps_no_other(caplog):
    made, asked = driver(Library()), []

    def call(name, address):
        asked.append((name, address.value))
        if address.value in (2, 9):
            raise DriverError(f"{name}: {address.value}")

    made._call = call
    made.give_back(9, [1, 2, 3])
    assert asked == [*(("cuIpcCloseMemHandle", address) for address in (1, 2, 3)), ("cuMemFree_v2", 9)]
    assert "2 of 4 pieces of memory were not given back: cuIpcCloseMemHandle: 2" in caplog.text
    caplog.clear()
    made.give_back(None, [1])
    assert not caplog.text
