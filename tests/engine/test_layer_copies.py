"""Which layers of a step's blocks are copied when: as data, beside a recorder, and by contents that change with each
layer."""

import itertools
import time
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.cache import host_copies
from tritonllm.engine.cache.host_copies import HostCopies
from tritonllm.engine.cache.layer_copies import LayerCopies, LayerGroup, copies_of, group_sizes
from tritonllm.engine.cache.layer_marks import LayerMarks
from tritonllm.engine.data.copy_batches import Fills, Transfers

BLOCKS, SLOTS = 12, 9


@given(layers=st.integers(1, 200), most=st.integers(1, 16))
def test_groups_are_small_at_both_ends(layers, most):
    sizes = group_sizes(layers, most)
    assert sum(sizes) == layers and max(sizes) <= most and sizes[0] == sizes[-1] == 1
    half = len(sizes) // 2
    growing = sizes[: half - 1]
    assert growing == sorted(growing) and sizes[::-1][: half - 1] == growing
    assert all(later <= 2 * size for size, later in itertools.pairwise(growing))


def test_groups_of_32_layers():
    assert group_sizes(32) == [1, 2, 4, 8, 2, 8, 4, 2, 1]
    assert [group_sizes(layers) for layers in (1, 2, 3, 5)] == [[1], [1, 1], [1, 1, 1], [1, 3, 1]]
    assert group_sizes(28) == [1, 2, 4, 7, 7, 4, 2, 1]


@given(layers=st.lists(st.integers(1, 40), min_size=1, max_size=3), by_layer=st.booleans())
def test_every_layer_of_every_model_is_copied_once_and_behind_itself(layers, by_layer):
    groups = copies_of(layers, [range(layers[0])] if by_layer else [])
    found = [(group.pool, layer) for group in groups for layer in group.rows]
    assert sorted(found) == [(model, layer) for model, count in enumerate(layers) for layer in range(count)]
    told = [group for group in groups if group.after is not None]
    assert groups[: len(told)] == told  # those that wait for the whole step come last
    assert all(group.pool == 0 and group.after == group.rows[-1] for group in told)
    assert [group.after for group in told] == sorted(group.after for group in told)
    assert bool(told) == by_layer and len(groups) - len(told) == len(layers) - by_layer


@given(data=st.data(), kinds=st.integers(1, 3), layers=st.integers(1, 40))
def test_layers_of_several_pools_are_copied_in_their_order(data, kinds, layers):
    """Of a model whose layers differ in shape, or have no cache of their own."""
    kind = data.draw(st.lists(st.integers(0, kinds), min_size=layers, max_size=layers))  # the last kind has no cache
    pools = [found for i in range(kinds) if (found := [layer for layer in range(layers) if kind[layer] == i])]
    groups = copies_of([*map(len, pools), 2], pools) if pools else []
    told = [group for group in groups if group.after is not None]
    found = [[pools[group.pool][row] for row in group.rows] for group in told]
    assert sorted(layer for group in found for layer in group) == sorted(layer for pool in pools for layer in pool)
    assert all(layer <= group.after for group, copied in zip(told, found, strict=True) for layer in copied)
    assert [group.after for group in told] == sorted(group.after for group in told)
    sizes = Counter(group.after for group, copied in zip(told, found, strict=True) for _ in copied)
    assert list(sizes.values()) == (group_sizes(sum(map(len, pools))) if pools else [])
    assert groups[len(told) :] == ([(None, len(pools), range(2))] if pools else [])  # another model's


def recorded(groups):
    done = []
    return done, LayerCopies(groups, done.append, lambda: done.append("ended"))


@given(layers=st.integers(1, 40), models=st.integers(1, 2), by_layer=st.booleans())
def test_a_group_is_copied_when_its_last_layer_is_launched(layers, models, by_layer):
    groups = copies_of([layers] * models, [range(layers)] if by_layer else [])
    done, copies = recorded(groups)
    for layer in range(layers):
        copies.computed(layer)
        assert done == [group for group in groups if group.after is not None and group.after <= layer]
    copies.end()
    assert done == [*groups, "ended"]


@given(order=st.permutations(range(6)), by_layer=st.booleans())
def test_layers_in_another_order_are_copied_at_the_end(order, by_layer):
    groups = copies_of([6], [range(6)] if by_layer else [])
    done, copies = recorded(groups)
    launched = set()
    for layer in order:
        launched.add(layer)
        copies.computed(layer)
        assert {one for group in done for one in group.rows} <= launched
    copies.end()
    assert done == [*groups, "ended"]


def test_a_step_that_is_broken_off_ends_nothing():
    done, copies = recorded(copies_of([4], [range(4)]))
    copies.computed(0)
    assert done == [LayerGroup(0, 0, range(1))]


def make(device, layers, staged=None, on_device=False, blocks=BLOCKS, slots=SLOTS):
    pools = [torch.zeros(count, 2, blocks, 4, 2, 8, device=device, dtype=torch.bfloat16) for count in layers]
    block_bytes = sum(pool[:, :, 0].nbytes for pool in pools)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "STREAMED_BYTES", 0)
        if staged:
            patch.setattr(host_copies, "STAGING_BYTES", staged * block_bytes)
        return pools, HostCopies(pools, slots, on_device)


def some_stores(data, blocks=BLOCKS, slots=SLOTS):
    count = data.draw(st.integers(1, slots))
    there, here = data.draw(st.permutations(range(blocks))), data.draw(st.permutations(range(slots)))
    return tuple(zip(there[:count], here[:count], strict=True))


@pytest.mark.also_gpu
@given(
    data=st.data(),
    layers=st.sampled_from([(1,), (2,), (5,), (7, 2), (3, 1)]),
    staged=st.integers(1, 4),
    by_layer=st.booleans(),
    on_device=st.booleans(),
)
def test_what_is_stored_is_what_the_step_has_left(device, data, layers, staged, by_layer, on_device):
    """Of any blocks in any slots, in pieces of any size; other slots keep what they have."""
    pools, copies = make(device, layers, staged, on_device)
    stores = some_stores(data)
    for part in copies._parts:
        part.host.fill_(-1)
    filled = copies.fill(Fills(1, stores), by_layer)
    for layer, rows in enumerate(pools[0]):
        rows.copy_(torch.randn_like(rows))
        if by_layer:
            filled.computed(layer)
    for pool in pools[1:]:
        pool.copy_(torch.randn_like(pool))
    assert copies.done == 0
    filled.end()
    assert copies.ending(1)() and copies.done == 1
    for pool, part in zip(pools, copies._parts, strict=True):
        want = torch.full_like(part.host, -1)
        for block, slot in stores:
            want[slot] = pool[:, :, block].flatten(2).flatten(0, 1).to(want.device)
        assert torch.equal(part.host, want)


@given(layers=st.integers(1, 9), data=st.data())
def test_each_layer_leaves_before_the_next_group_is_computed(layers, data):
    """What is written over a layer once its group is launched is not what is stored, nor is what it had before."""
    pools, copies = make(torch.device("cpu"), (layers,))
    stores = some_stores(data)
    (pool,) = pools
    filled = copies.fill(Fills(1, stores), by_layer=True)
    ends = {group.after: group.rows for group in copies_of([layers], [range(layers)])}
    pool.fill_(-1)
    for layer in range(layers):
        pool[layer] = 1 + layer
        filled.computed(layer)
        for gone in ends.get(layer, ()):
            pool[gone] = -2
    filled.end()
    host = copies._parts[0].host[[slot for _, slot in stores]].unflatten(1, (layers, 2))
    assert all(bool((host[:, layer] == 1 + layer).all()) for layer in range(layers))


@pytest.mark.also_gpu
def test_a_batch_that_was_given_up_counts_as_ended(device):
    pools, copies = make(device, (3,))
    filled = copies.fill(Fills(1, ((3, 5),)), by_layer=True)
    filled.computed(0)  # and then the step breaks off
    assert copies.done == 0
    copies.give_up(4)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert copies.done == 4
    pools[0].fill_(3)
    copies.run(Transfers(5, ((3, 5),), (), wait=5))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert copies.done == 5 and bool((copies._parts[0].host[5] == 3).all())


@pytest.mark.gpu
def test_of_few_blocks_all_layers_leave_together(device):
    pool = torch.zeros(4, 2, 64, 16, 8, 128, dtype=torch.bfloat16, device=device)  # 256 KB each
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copies, "STREAMED_BYTES", 2 << 20)
        copies = HostCopies([pool], 16)
    for count in (7, 8):
        left = copies.fill(Fills(1, tuple((i, i) for i in range(count))), by_layer=True)._left
        assert len(left) == (1 if count == 7 else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("shuffled", [False, True])
def test_real_shapes_beside_a_step(device, shuffled):
    """Blocks of Llama-3.1-8B that a step on the main stream fills, and which other work overwrites behind it."""
    layers, blocks, slots = 32, 300, 256
    pool = torch.zeros(layers, 2, blocks, 16, 8, 128, dtype=torch.bfloat16, device=device)
    copies = HostCopies([pool], slots)
    copies.warm_up()
    there = torch.randperm(blocks)[:slots].tolist()
    here = torch.randperm(slots).tolist() if shuffled else list(range(slots))
    want = torch.randn_like(pool)
    a = torch.randn(2048, 2048, device=device)
    filled = copies.fill(Fills(1, tuple(zip(there, here, strict=True))), by_layer=True)
    for layer in range(layers):
        for _ in range(4):
            a = a @ a / 48
        pool[layer].copy_(want[layer])
        filled.computed(layer)
    filled.end()
    copies.run(Transfers(0, (), (), wait=1))  # what follows overwrites these blocks
    pool.fill_(-1)
    assert copies.ending(1)()
    host = copies._parts[0].host
    for block, slot in zip(there, here, strict=True):
        assert torch.equal(host[slot], want[:, :, block].flatten(2).flatten(0, 1).cpu())


@pytest.mark.parametrize(
    ("passes", "marked"),
    [([0, 1, 2, 3, 4], [0, 2, 4]), ([0, 1, 2, 3, 4] * 2, [0, 2, 4]), ([0, 2, 1, 3, 4], [0]), ([4, 3, 2, 1, 0], [0])],
)
def test_layers_in_another_order_are_not_marked(monkeypatch, passes, marked):
    """Their event would stand before layers of its group, or would never be recorded."""
    recorded = []

    class Event:
        def __init__(self, external):
            assert external

        def record(self):
            recorded.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    marks = LayerMarks([0, 2, 4])
    for layer in passes:
        marks.note(layer)
    assert list(marks.events) == marked and all(event in recorded for event in marks.events.values())


@pytest.mark.gpu
def test_layers_of_a_captured_step_leave_while_it_is_replayed(device, monkeypatch):
    """In every replay anew: what is copied is of this one, and of a layer that it has computed."""
    layers, blocks = 12, 64
    pool = torch.zeros(layers, 2, blocks, 16, 8, 128, dtype=torch.bfloat16, device=device)
    monkeypatch.setattr(host_copies, "STREAMED_BYTES", 0)
    copies = HostCopies([pool], blocks)
    copies.warm_up()
    host, marks = copies._parts[0].host, LayerMarks(copies.marked_layers)
    a, number = torch.randn(4096, 4096, device=device), torch.zeros(1, dtype=torch.bfloat16, device=device)

    def step():
        x = a
        for layer in range(layers):
            for _ in range(4):
                x = x @ a / 64
            pool[layer].fill_(layer).add_(number)
            marks.note(layer)

    step()
    assert list(marks.events) == [group.after for group in copies_of([layers], [range(layers)])]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    stores, seen = tuple((block, block) for block in range(blocks)), []
    for replay in range(1, 6):
        number.fill_(16 * replay)
        torch.cuda.synchronize()
        filled, ended = copies.fill(Fills(replay, stores), True, marks.events), torch.cuda.Event()
        graph.replay()
        ended.record()
        filled.end()
        limit = time.monotonic() + 60
        while bool((host[-1, :2] != 16 * replay).any()) and time.monotonic() < limit:
            pass
        seen.append(ended.query())
        assert copies.ending(replay)()
        want = torch.arange(layers).repeat_interleave(2)[None, :, None] + 16 * replay
        assert bool((host == want.to(host.dtype)).all())
    assert not all(seen)  # the first layer was there before the last was computed


@pytest.mark.gpu
def test_the_first_layers_are_there_while_the_step_runs(device, monkeypatch):
    """The host waits for nothing, and the step for none of the copies."""
    monkeypatch.setattr(host_copies, "STREAMED_BYTES", 0)
    pool = torch.zeros(8, 2, 64, 16, 8, 128, dtype=torch.bfloat16, device=device)
    copies = HostCopies([pool], 64)
    copies.warm_up()
    host = copies._parts[0].host
    host.fill_(-1)
    warm = copies.fill(Fills(1, ((0, 0), (1, 1))), by_layer=True)  # a kernel's first launch waits for all that runs
    for layer in range(8):
        warm.computed(layer)
    warm.end()
    torch.cuda.synchronize()
    filled = copies.fill(Fills(2, tuple((i, i) for i in range(64))), by_layer=True)
    step = torch.cuda.Event()
    for layer in range(8):
        pool[layer].fill_(1.0 + layer)
        filled.computed(layer)
        if layer == 0:
            torch.cuda._sleep(6_000_000_000)  # some seconds
    filled.end()
    step.record()
    while not bool((host[:, :2] == 1).all()) and not step.query():
        pass
    assert not step.query() and copies.done == 1 and not bool((host[2:, 2:] != -1).any())
    assert copies.ending(2)() and step.query()
    assert all(bool((host[:, 2 * layer : 2 * layer + 2] == 1 + layer).all()) for layer in range(8))
