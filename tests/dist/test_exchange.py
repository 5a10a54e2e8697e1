"""Rows to their experts and back: by collectives, and between GPUs that write to each other's memory."""

import random
import threading
import time

import pytest
import torch
from support.compare import assert_close
from support.gpu_ranks import SOME_GPUS, run_gpu_ranks
from support.ranks import run_ranks

from tritonllm.dist.exchange import NO_EXCHANGE, Exchange
from tritonllm.dist.peer_memory import DriverError
from tritonllm.dist.symmetric_exchange import SymmetricExchange
from tritonllm.kernels import fused_moe_ref
from tritonllm.kernels.collective import AddedNorm, combine_rows_ref, dispatch_rows_ref

CPU = torch.device("cpu")
COLUMNS, TOP_K, HELD = 64, 3, 4


def made_up(size, rows, columns=COLUMNS, top_k=TOP_K, held=HELD, dtype=torch.float32, device=CPU, seed=0):
    """``x, weights, ids, marks`` of all ranks, the same on each of them: at most ``rows``, some of them padding."""
    generator = torch.Generator(device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    counts = random.Random(seed).choices(range(rows + 1), k=size)
    sent = []
    for count in counts:
        x = torch.randn(count, columns, **options).to(dtype)
        weights = torch.rand(count, top_k, **options)
        ids = torch.randint(-1, size * held, (count, top_k), dtype=torch.int32, **options)
        sent.append((x, weights, ids, torch.randint(-1, 4, (count,), **options)))
    return sent


def stream_of(x, seed=1):
    """A residual stream for rows, and a norm's weight."""
    generator = torch.Generator(x.device).manual_seed(seed)
    options = {"generator": generator, "device": x.device}
    return torch.randn(x.shape, **options).to(x.dtype), torch.randn(x.shape[1], **options).to(x.dtype)


def parts_of(size, rank, rows, like, seed):
    """What the experts of a rank might make of what it has received, the same on each rank that asks."""
    generator = torch.Generator(like.device).manual_seed(1000 * seed + rank)
    return torch.randn(size * rows, like.shape[1], generator=generator, device=like.device).to(like.dtype)


def check_step(exchange, sent, held, rows, seed, form):
    """One step of this rank, whose results are the reference's."""
    size, rank = exchange.size, exchange.rank
    found, expected = exchange.dispatch(*sent[rank], held, rows), dispatch_rows_ref(sent, rank, held, rows)
    assert torch.equal(found.ids, expected[2])
    here = (found.ids >= 0).any(1)
    assert torch.equal(found.x[here], expected[0][here])
    assert torch.equal(found.weights.where(found.ids >= 0, 0), expected[1].where(found.ids >= 0, 0))
    x, _, ids, marks = sent[rank]
    everyones = [parts_of(size, other, rows, x, seed) for other in range(size)]
    parts, place = everyones[rank], exchange.parts(rows, x)
    if place is not None and seed % 2:
        parts = place.copy_(parts)
    choice = ids, marks, held, rows
    residual, weight = stream_of(x)
    stream = residual.clone()
    if form == "alone":
        out = exchange.combine(parts, *choice)
        assert torch.equal(out, combine_rows_ref(everyones, rank, *choice))
    elif form == "out":
        out = torch.full_like(x, float("nan"))
        assert exchange.combine(parts, *choice, out) is out
        assert torch.equal(out, combine_rows_ref(everyones, rank, *choice))
    elif form == "added":
        assert exchange.combine_added(parts, *choice, stream, 0.5) is stream
        assert torch.equal(stream, combine_rows_ref(everyones, rank, *choice, residual=residual, scale=0.5))
    else:
        normed = exchange.combine_normed(parts, *choice, AddedNorm(stream, weight, 1e-5))
        expected_norm = combine_rows_ref(everyones, rank, *choice, added=AddedNorm(residual, weight, 1e-5))
        assert torch.equal(stream, residual)
        assert_close(normed, expected_norm)


FORMS = "alone", "out", "added", "normed"


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_give_the_reference(size):
    def meet(group):
        exchange = Exchange(group)
        for seed, form in enumerate(FORMS * 2):
            check_step(exchange, made_up(size, 5, seed=seed), HELD, 5 + seed % 2, seed, form)
        return exchange.parts(5, torch.empty(0, COLUMNS))

    assert run_ranks(size, meet) == [None] * size


def test_the_whole_way_is_a_mixture_of_experts():
    """Each rank computes its experts for what came; the sums are those of one rank that has all experts."""

    def meet(group):
        generator = torch.Generator().manual_seed(3)
        w_gate_up = torch.randn(2 * HELD, 32, COLUMNS, generator=generator) / 8
        w_down = torch.randn(2 * HELD, COLUMNS, 16, generator=generator) / 4
        x, weights, ids, marks = made_up(2, 9, seed=3)[group.rank]
        exchange, here = Exchange(group), slice(group.rank * HELD, (group.rank + 1) * HELD)
        arrived = exchange.dispatch(x, weights, ids, marks, HELD, 9)
        parts = fused_moe_ref(arrived.x, w_gate_up[here], w_down[here], arrived.weights, arrived.ids)
        out = exchange.combine(parts, ids, marks, HELD, 9)
        all_ids = ids.masked_fill(marks[:, None] < 0, -1)
        assert_close(out, fused_moe_ref(x, w_gate_up, w_down, weights, all_ids))
        return len(x)

    assert sum(run_ranks(2, meet)) > 0


def test_one_rank_keeps_its_rows():
    sent = made_up(1, 5, seed=2)
    for seed, form in enumerate(FORMS):
        check_step(NO_EXCHANGE, sent, HELD, 6, seed, form)


class MadeUpDriver:
    """Memory of this process, which all ranks are threads of: what is exported is the address."""

    def __init__(self, failing=()):
        self.failing, self.held, self.given_back = failing, [], []

    def allocate(self, nbytes, word):
        if "allocate" in self.failing:
            raise DriverError("out of memory")
        assert nbytes % 4 == 0 and word == 0
        self.held.append(torch.zeros(nbytes, dtype=torch.uint8))
        return self.held[-1].data_ptr()

    def export(self, address):
        return address.to_bytes(64, "little")

    def open(self, handle):
        if "open" in self.failing:
            raise DriverError("no way to that GPU")
        return int.from_bytes(handle, "little")

    def give_back(self, own, opened):
        self.given_back.append((own, list(opened)))


def with_made_up_memory(group, failing=()):
    """The exchange of this rank over gloo, and its driver; no kernel may be launched."""
    found, driver = SymmetricExchange(group, CPU), MadeUpDriver(failing)
    found._driver = lambda: driver
    found._bytes_at = lambda address, nbytes: next(t for t in driver.held if t.data_ptr() == address)
    return found, driver


def test_ranks_learn_where_the_others_receive():
    def meet(group):
        found, driver = with_made_up_memory(group)
        found.reserve(COLUMNS, torch.bfloat16, TOP_K, 5)
        memory = found.memory
        found.reserve(COLUMNS, torch.bfloat16, TOP_K, 5)  # what is there already
        assert found.memory is memory and not driver.given_back
        place = found.parts(4, torch.empty(0, COLUMNS, dtype=torch.bfloat16))
        assert place.shape == (3 * 4, COLUMNS) and place.data_ptr() == memory.parts.data_ptr()
        others = [(6, COLUMNS, torch.bfloat16), (4, COLUMNS, torch.float16), (4, 32, torch.bfloat16)]
        assert all(found.parts(rows, torch.empty(0, n, dtype=dtype)) is None for rows, n, dtype in others)
        found.reserve(COLUMNS, torch.bfloat16, TOP_K, 6)
        links = found.memory.links.tolist()
        group.least(0)  # nobody gives anything back before
        return links[:3], driver.held[-1].data_ptr(), len(driver.given_back), links[3] == found._stop.data_ptr()

    results = run_ranks(3, meet)
    addresses = [own for _, own, _, _ in results]
    assert [result[0] for result in results] == [addresses] * 3 and all(result[3] for result in results)


def test_what_there_is_no_memory_for_goes_by_collectives():
    """Other columns, dtypes and choices, and more rows: gloo has them, no kernel is launched."""

    def meet(group):
        found, driver = with_made_up_memory(group)
        found.reserve(COLUMNS, torch.float32, TOP_K, 5)
        others = [{"columns": 32}, {"top_k": TOP_K - 1}, {"dtype": torch.float16}, {"rows": 6}]
        for seed, other in enumerate(others):
            for form in FORMS:
                sent = made_up(2, **({"rows": 5, "seed": seed} | other))
                check_step(found, sent, HELD, other.get("rows", 5), 2 * seed, form)
        return len(driver.held)

    assert run_ranks(2, meet) == [1, 1]


@pytest.mark.parametrize("what", ["allocate", "open"])
def test_where_one_rank_fails_all_use_collectives(what, caplog):
    def meet(group):
        found, driver = with_made_up_memory(group, {what} if group.rank == 1 else ())
        found.reserve(COLUMNS, torch.float32, TOP_K, 5)
        assert found.memory is None and len(driver.given_back) == 1
        for seed, form in enumerate(FORMS):
            check_step(found, made_up(2, 5, seed=seed), HELD, 5, seed, form)

    run_ranks(2, meet)
    assert "rows go to their experts by collectives" in caplog.text


def test_an_exchange_that_is_shut_tells_its_kernels():
    def meet(group):
        found, _ = with_made_up_memory(group)
        before = int(found._stop)
        found.shut()
        return before, int(found._stop)

    assert run_ranks(2, meet) == [(0, 1)] * 2


def reserved(group, *shape):
    """An exchange of this rank whose GPUs share memory."""
    exchange = SymmetricExchange(group, torch.device("cuda", torch.cuda.current_device()))
    exchange.reserve(*shape)
    assert exchange.memory is not None, "the GPUs do not share memory"
    return exchange


def many_steps(group, say, columns, dtype):
    """Of all sizes and in all forms, while ranks come late in turns."""
    most, top_k, held = 600, 8, 16
    exchange = reserved(group, columns, dtype, top_k, most)
    seed = 0
    for rows in (1, 2, 3, 17, 64, 132, 257, most) * 4:
        for form in FORMS:
            say(f"step {seed}: {rows} rows of {columns}, {form}")
            sent = made_up(group.size, rows, columns, top_k, held, dtype, torch.device("cuda"), seed)
            if seed % (5 * group.size) == group.rank:
                time.sleep(0.01)
            check_step(exchange, sent, held, rows, seed, form)
            seed += 1
    return True


def of_all_kinds(group, say):
    for columns in (100, 2048, 7168):
        for dtype in (torch.bfloat16, torch.float32):
            many_steps(group, say, columns, dtype)
    return True


def replays(group, say):
    """A graph of many layers, each of what the one before has left, with other choices in each replay.

    What an expert makes of a row is the row times the number of experts chosen, there and in all; the sum of the parts
    is the row then. So the stream must double in each layer, whatever is chosen and whoever is late.
    """
    columns, top_k, held, most, layers = 512, 4, 8, 200, 6
    exchange = reserved(group, columns, torch.float32, top_k, most)
    device, generator = torch.device("cuda"), torch.Generator("cuda").manual_seed(group.rank)
    marks = torch.zeros(most, dtype=torch.int64, device=device)
    ids = torch.zeros(most, top_k, dtype=torch.int32, device=device)
    weights = torch.full((most, top_k), 1 / top_k, device=device)
    stream = torch.zeros(most, columns, device=device)
    start = torch.randint(1, 9, (most, columns), generator=generator, device=device).float()

    def layer(rows, count):
        choice = ids[:count], marks[:count], held, rows
        arrived = exchange.dispatch(stream[:count], weights[:count], *choice)
        share = arrived.weights.where(arrived.ids >= 0, 0.0).sum(1, keepdim=True)
        parts = exchange.parts(rows, stream)
        parts.copy_((arrived.x * share).masked_fill(share == 0, float("nan")))
        exchange.combine_added(parts, *choice, stream[:count])

    def step():
        for number in range(layers):
            rows = (most, 3, 64)[number % 3]
            layer(rows, rows - group.rank)

    say("before the capture")
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(300):
        say(f"replay {turn}")
        ids.copy_(torch.randint(0, group.size * held, ids.shape, generator=generator, device=device))
        marks.copy_(torch.randint(-1, 4, marks.shape, generator=generator, device=device))
        stream.copy_(start)
        if turn % (3 * group.size) == group.rank:
            time.sleep(0.01)
        graph.replay()
        times = torch.zeros(most, device=device)
        for number in range(layers):
            times[: (most, 3, 64)[number % 3] - group.rank] += 1
        factor = torch.exp2(times.where(marks >= 0, 0.0))
        assert torch.equal(stream, start * factor[:, None]), f"replay {turn}"
    return True


def left_alone(group, say):
    """Rank 0 sends rows, and nobody else does; another thread ends the exchange."""
    exchange = reserved(group, 1024, torch.bfloat16, 8, 300)
    sent = made_up(group.size, 300, 1024, 8, 8, torch.bfloat16, torch.device("cuda"), 1)
    check_step(exchange, sent, 8, 300, 0, "alone")
    torch.cuda.synchronize()
    if group.rank:
        time.sleep(3.0)
        return 0.0
    _, _, ids, marks = sent[0]
    exchange.dispatch(*sent[0], 8, 300)
    exchange.combine(exchange.parts(300, sent[0][0]), ids, marks, 8, 300)
    threading.Timer(1.0, exchange.shut).start()
    begin = time.monotonic()
    say("alone")
    torch.cuda.synchronize()
    return time.monotonic() - begin


@pytest.mark.parametrize("size", SOME_GPUS)
def test_many_steps_between_gpus(size):
    assert run_gpu_ranks(size, of_all_kinds, timeout=300.0) == [True] * size


@pytest.mark.parametrize("size", SOME_GPUS)
def test_replays_of_a_graph(size):
    assert run_gpu_ranks(size, replays) == [True] * size


@pytest.mark.parametrize("size", SOME_GPUS[:1])
def test_kernels_that_wait_in_vain_end(size):
    alone, _ = run_gpu_ranks(size, left_alone)
    assert 0.5 < alone < 3.0
