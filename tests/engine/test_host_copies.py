"""Blocks on their way to the host's memory and back: contents, order, and memory that is given back."""

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.cache import host_copies
from tritonllm.engine.cache.host_copies import HostCopies, device_bytes, runs, staging_bytes
from tritonllm.engine.data.copy_batches import Transfers


def make(device, blocks=12, slots=9, dtype=torch.bfloat16, layers=(2, 1), on_device=False):
    pools = [torch.randn(count, 2, blocks, 4, 2, 8, device=device).to(dtype) for count in layers]
    return pools, HostCopies(pools, slots, on_device)


@given(slots=st.lists(st.integers(0, 20)))
def test_runs_are_the_slots(slots):
    found = [*runs(slots)]
    assert [slot + i for _, slot, count in found for i in range(count)] == slots
    assert [at for at, _, _ in found] == [sum(count for _, _, count in found[:i]) for i in range(len(found))]
    assert all(b[1] != a[1] + a[2] for a, b in itertools.pairwise(found))  # no two that could be one


@given(data=st.data(), staged=st.integers(1, 4), on_device=st.booleans())
def test_what_was_stored_comes_back(device, data, staged, on_device):
    """Of every model, in pieces of any size, into other blocks."""
    count = data.draw(st.integers(0, 6))
    there = data.draw(st.permutations(range(12)))
    slots = data.draw(st.permutations(range(9)))[:count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "STAGING_BYTES", staged * 3 * 2 * 4 * 2 * 8 * 2)
        pools, copies = make(device, on_device=on_device)
    assert len(copies._parts[0].staging) == (0 if on_device else staged)
    want = [pool.clone() for pool in pools]
    stores = tuple(zip(there[:count], slots, strict=True))
    loads = tuple(zip(slots, there[count : 2 * count], strict=True))
    copies.run(Transfers(1, stores, ()))
    copies.run(Transfers(2, (), loads, wait=2))
    for pool, before in zip(pools, want, strict=True):
        for (source, _), (_, target) in zip(stores, loads, strict=True):
            before[:, :, target] = before[:, :, source]
        assert torch.equal(pool, before)


@pytest.mark.parametrize("on_device", [False, True])
def test_stores_come_before_loads(device, on_device):
    pools, copies = make(device, on_device=on_device)
    first = pools[0][:, :, 3].clone()
    copies.run(Transfers(1, ((3, 5),), ((5, 4),), wait=1))
    assert torch.equal(pools[0][:, :, 4], first)


def test_slots_that_follow_each_other_are_one_copy(device, monkeypatch):
    """In whatever order the tier names them."""
    found = []
    monkeypatch.setattr(host_copies, "runs", lambda slots: found.append(list(runs(slots))) or found[-1])
    _, copies = make(device, layers=(2,))
    copies.run(Transfers(1, tuple((block, block + 1) for block in (3, 1, 0, 4, 2)), (), wait=1))
    copies.run(Transfers(2, (), tuple((slot, slot + 4) for slot in (5, 2, 3, 1, 4)), wait=2))
    assert found == [[(0, 1, 5)]] * 2


def test_staging_memory():
    assert staging_bytes(1 << 20, 0) == 0
    assert staging_bytes(1 << 20, 5) == 5 << 20
    assert staging_bytes(1 << 20, 1000) == host_copies.STAGING_BYTES
    assert staging_bytes(1 << 30, 1000) == 1 << 30  # one block at least


def test_memory_of_the_device():
    assert device_bytes(1 << 20, 500, on_device=False) == staging_bytes(1 << 20, 500)
    assert device_bytes(1 << 20, 500, on_device=True) == 500 << 20
    assert device_bytes(1 << 20, 0, on_device=True) == 0


def test_slots_for_which_the_device_has_no_room(device, monkeypatch):
    def no_room(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(host_copies._CopyPart, "of", no_room)
    with pytest.raises(ValueError, match=r"kv_offloading_size: the GPU has no .* GiB left.*: lower it, num_blocks or"):
        make(device, on_device=True)
    with pytest.raises(torch.OutOfMemoryError):
        make(device)


def test_slots_on_the_device_are_addresses(device):
    """Rows one behind the other, which live as long as somebody has their description."""
    _, copies = make(device, on_device=True)
    parts = [part.host for part in copies._parts]
    slots = copies.memory
    assert [(one.address, one.shape) for one in slots] == [(part.data_ptr(), (9, part[0].nbytes)) for part in parts]
    assert [one.device for one in slots] == [device.index if device.type == "cuda" else None] * 2
    assert all(part.device == one.owner.device for part, one in zip(parts, slots, strict=True))
    assert all(isinstance(one, np.ndarray) for one in make(device)[1].memory)


@pytest.mark.parametrize("on_device", [False, True])
def test_measuring_leaves_a_clean_cache(device, on_device):
    pools, copies = make(device, on_device=on_device)
    before = [pool.clone() for pool in pools]
    copies.warm_up()
    assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True))
    assert copies.measure() > 0
    for pool, old in zip(pools, before, strict=True):
        assert not pool[:, :, 0].any() and torch.equal(pool[:, :, 1:], old[:, :, 1:])
    assert copies.done == 0


@pytest.mark.parametrize("on_device", [False, True])
def test_memory_goes_with_its_owner(device, on_device):
    pools, copies = make(device, on_device=on_device)
    copies.run(Transfers(1, ((3, 5),), ()))
    memory = weakref.ref(copies._parts[0].host)
    del copies
    gc.collect()
    assert memory() is None and pools


@pytest.mark.gpu
def test_copies_run_beside_steps_and_the_host_waits_for_none(device):
    """A step that does not wait goes on while a gigabyte is copied, and one that waits reads what has arrived."""
    pool = torch.zeros(32, 2, 600, 16, 8, 128, dtype=torch.bfloat16, device=device)
    copies = HostCopies([pool], 500)
    copies.warm_up()
    copies.run(Transfers(1, tuple((i, i) for i in range(500)), ()))
    torch.zeros(8, device=device).add_(1)  # a kernel's first launch loads it, which waits for all that runs
    torch.cuda.synchronize()
    assert copies.done == 1
    for part in copies._parts:
        part.host.fill_(3.0)
    copies.run(Transfers(2, (), tuple((i, i) for i in range(500))))
    step = torch.cuda.Event()
    torch.zeros(8, device=device).add_(1)
    step.record()
    step.synchronize()
    assert copies.done == 1  # 1 GB takes some 20 ms, the step microseconds
    copies.run(Transfers(0, (), (), wait=2))
    assert bool((pool[:, :, :500] == 3).all())
    assert copies.done == 2


@pytest.mark.gpu
def test_a_copy_waits_for_the_steps_before_it(device):
    pool = torch.zeros(4, 2, 64, 16, 8, 128, dtype=torch.bfloat16, device=device)
    copies = HostCopies([pool], 64)
    a = torch.randn(4096, 4096, device=device)
    for _ in range(20):
        a = a @ a / 64
    pool[:, :, 5] = 7.0  # after all that
    copies.run(Transfers(1, ((5, 2),), ()))
    copies._stream.synchronize()
    assert bool((copies._parts[0].host[2] == 7).all())


@pytest.mark.gpu
def test_the_memory_is_page_locked_until_its_owner_goes(device):
    pools, copies = make(device, slots=64)
    memory = copies._parts[0].host
    assert memory.is_pinned()
    address = memory.data_ptr()
    del copies
    gc.collect()
    assert int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)) == 0  # it was not registered any more
    assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0
    assert pools


@pytest.mark.gpu
def test_many_scattered_slots_on_the_device(device):
    """Real shapes, from any slot to any block, beside steps."""
    pool = torch.randn(32, 2, 600, 16, 8, 128, device=device).to(torch.bfloat16)
    copies = HostCopies([pool], 500, on_device=True)
    copies.warm_up()
    want = pool.clone()
    blocks, slots = torch.randperm(600).tolist(), torch.randperm(500).tolist()
    copies.run(Transfers(1, tuple(zip(blocks[:300], slots[:300], strict=True)), ()))
    copies.run(Transfers(2, (), tuple(zip(slots[:300], blocks[300:], strict=True)), wait=2))
    want[:, :, blocks[300:]] = want[:, :, blocks[:300]]
    assert torch.equal(pool, want)
