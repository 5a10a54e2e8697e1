"""Sums between GPUs that write to each other's memory; and, without them, what a group leaves to NCCL."""

import threading
import time

import pytest
import torch
from support.compare import assert_close
from support.gpu_ranks import SOME_GPUS, run_gpu_ranks
from support.ranks import run_ranks

from tritonllm.dist.group import ConnectedGroup, share_of
from tritonllm.dist.peer_memory import DriverError
from tritonllm.dist.symmetric import FURTHER, Reach, SymmetricGroup
from tritonllm.kernels import best_of_shards, fused_add_rms_norm, sample, sample_limited_shards, sample_shard
from tritonllm.kernels.collective import AddedNorm, all_reduce_ref, sum_rows

CPU = torch.device("cpu")


class MadeUpDriver:
    """Addresses are numbers; what is exported is the address."""

    def __init__(self, rank, failing=()):
        self.rank, self.failing, self.given_back = rank, failing, None

    def allocate(self, nbytes, word):
        if "allocate" in self.failing:
            raise DriverError("out of memory")
        assert nbytes % 4 == 0 and word in (0x80008000, 0)
        return (self.rank + 1) << 20

    def export(self, address):
        return address.to_bytes(64, "little")

    def open(self, handle):
        if "open" in self.failing:
            raise DriverError("no way to that GPU")
        return int.from_bytes(handle, "little") + 7

    def give_back(self, own, opened):
        self.given_back = own, list(opened)


def with_made_up_memory(group, failing=()):
    """The group of this rank over gloo, and its driver; nothing may be summed up by a kernel."""
    found = SymmetricGroup(group._backend, CPU)
    driver = MadeUpDriver(group.rank, failing)
    found._driver = lambda: driver
    return found, driver


def test_ranks_learn_where_the_others_receive():
    def meet(group):
        found, _ = with_made_up_memory(group)
        before = found.fused_rows
        found.reserve(64, torch.bfloat16)
        again = found.inbox
        found.reserve(64, torch.bfloat16)  # what is there already
        return before, found.fused_rows, found.inbox.links.tolist()[:3], again is found.inbox, found.inbox.rank

    for rank, (before, rows, links, same, place) in enumerate(run_ranks(3, meet)):
        expected = [((other + 1) << 20) + (0 if other == rank else 7) for other in range(3)]
        assert (before, rows, links, same, place) == (-1, FURTHER.most // 128, expected, True, rank)


@pytest.mark.parametrize("what", ["allocate", "open"])
def test_where_one_rank_fails_all_leave_it_to_nccl(what, caplog):
    def meet(group):
        found, driver = with_made_up_memory(group, {what} if group.rank == 1 else ())
        found.reserve(64, torch.bfloat16)
        return found.inbox, found.fused_rows, driver.given_back[0], float(found.all_reduce(torch.ones(2, 64))[0, 0])

    own = [1 << 20, None if what == "allocate" else 2 << 20]
    assert run_ranks(2, meet) == [(None, -1, own[rank], 2.0) for rank in range(2)]
    assert "left to NCCL" in caplog.text


def test_what_the_kernels_do_not_take_goes_the_other_way():
    """Other columns, dtypes and dimensions, and more bytes than pay: gloo has the sum, no kernel is launched."""

    def meet(group):
        found, _ = with_made_up_memory(group)
        found.reach = Reach(one_shot=256)
        found.reserve(64, torch.bfloat16)
        others = [torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(2, 64), torch.ones(64), torch.ones(1, 2, 64)]
        others.append(torch.ones(3, 64, dtype=torch.bfloat16))
        return [bool((found.all_reduce(x) == 2).all()) for x in others]

    assert run_ranks(2, meet) == [[True] * 5] * 2


def test_ranks_that_do_not_share_memory_have_no_shared_rows(caplog):
    def meet(group):
        found, driver = with_made_up_memory(group, ("allocate",) if group.rank == 1 else ())
        return found.share_rows(4, 128), driver.given_back

    assert run_ranks(2, meet) == [(None, (1 << 20, [])), (None, (None, []))]
    assert "limits of draws are found on rank 0" in caplog.text


def test_a_group_that_is_shut_tells_its_kernels():
    def meet(group):
        found, _ = with_made_up_memory(group)
        before = int(found._stop)
        found.shut()
        return before, int(found._stop)

    assert run_ranks(2, meet) == [(0, 1)] * 2


def parts_of(size, rows, columns, dtype, whole, seed):
    """Of all ranks, the same on each of them; ``whole`` numbers, whose sums are exact, or any."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = size, rows, columns
    if whole:
        return torch.randint(-8, 9, shape, generator=generator, device="cuda").to(dtype)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def sums(group, say, columns, dtype):
    """Both ways of ours are NCCL's sums, of whole numbers exactly, and the reference's of all."""
    group.reserve(columns, dtype)
    assert group.inbox is not None, "the GPUs do not share memory"
    for rows in (1, 2, 3, 64, 257, 1000, 4096):
        for whole in (True, False):
            parts = parts_of(group.size, rows, columns, dtype, whole, rows)
            expected = all_reduce_ref(list(parts))
            if whole:
                say(f"NCCL, {rows} rows")
                assert torch.equal(ConnectedGroup.all_reduce(group, parts[group.rank].clone()), expected)
            for two_shot in (False, True):
                say(f"{rows} rows of {columns}, two_shot={two_shot}, whole={whole}")
                out = torch.full_like(expected, float("nan"))
                sum_rows(parts[group.rank], group.inbox, None, out, two_shot=two_shot)
                assert torch.equal(out, expected)


def fused_sums(group, say, columns, dtype):
    """The residual stream has the bits that NCCL and the norm's own launch give; the norm, those of any order."""
    group.reserve(columns, dtype)
    weight = parts_of(1, 1, columns, dtype, False, 5)[0, 0]
    for rows in (1, 2, 63, 256, 2000):
        parts = parts_of(group.size, rows, columns, dtype, False, rows)
        residual = parts_of(1, rows, columns, dtype, False, 7)[0]
        expected = residual.clone()
        normed, _ = fused_add_rms_norm(all_reduce_ref(list(parts)), expected, weight, 1e-5)
        for two_shot in (False, True):
            say(f"{rows} rows of {columns}, two_shot={two_shot}")
            stream, part = residual.clone(), parts[group.rank].clone()
            sum_rows(part, group.inbox, AddedNorm(stream, weight, 1e-5), part, two_shot=two_shot)
            assert torch.equal(stream, expected)
            assert_close(part, normed)


def of_all_kinds(group, say, work):
    for columns in (1024, 2880, 4096, 8192):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            work(group, say, columns, dtype)
    return True


def replays(group, say, two_shot):
    """A graph of sums of all sizes, each of the one before, while ranks come late in turns."""
    columns = 1024
    group.reserve(columns, torch.bfloat16)
    sizes = [1, 300, 2, 64, 1, 1100, 5]
    x = torch.zeros(max(sizes), columns, dtype=torch.bfloat16, device="cuda")

    def step():
        for rows in sizes:
            sum_rows(x[:rows], group.inbox, None, x[:rows], two_shot=two_shot)
            x[:rows].mul_(1 / group.size)

    say("before the capture")
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    start = torch.arange(columns, device="cuda").remainder(64).to(torch.bfloat16).expand(len(x), columns)
    for turn in range(300):
        say(f"replay {turn}")
        x.copy_(start)
        x[:, 0] = group.rank  # the mean is the ranks' on all of them after the first sum
        if turn % (3 * group.size) == group.rank:
            time.sleep(0.01)
        graph.replay()
        if turn % 50 == 0:
            mean = (group.size - 1) / 2
            assert torch.equal(x[:, 1:], start[:, 1:]) and bool((x[:, 0] == mean).all())
    torch.cuda.synchronize()
    return True


def limited_draws(group, say, vocab):
    """Every rank draws what `sample` does from all columns, turn for turn, of rows in shared memory."""
    each, device = share_of(vocab, group.size), torch.device("cuda", group.rank)
    shared = group.share_rows(64, each)
    assert shared is not None, "the GPUs do not share memory"
    generator = torch.Generator(device="cuda").manual_seed(vocab)
    first = group.rank * each
    for turn in range(20):
        say(f"turn {turn} of {vocab}")
        rows = (64, 1, 7)[turn % 3]
        logits = torch.randn(rows, vocab, generator=generator, device="cuda") * (0.5 + turn % 4)
        noise = torch.ones(rows, device="cuda"), *torch.randint(2**40, (2, rows), generator=generator, device="cuda")
        limits = (
            torch.arange(rows, device="cuda", dtype=torch.int32) % 3 * 25,
            torch.full((rows,), 0.8, device="cuda"),
            None,
        )
        part, own = shared.first(rows), logits[:, first : first + each]
        part.logits[:, : own.shape[1]] = own
        drawn = sample_shard(part.logits[:, : own.shape[1]], *noise, first=first, found=part.found)
        out = best_of_shards(group.stack(drawn))
        where = {"rank_steps": part.rank_steps, "vocab": vocab, "out": out}
        sample_limited_shards(part.logits, *part.found, noise[0], *limits, *noise[1:], **where)
        assert torch.equal(out, sample(logits, noise[0], *limits, *noise[1:]))
        group.all_reduce(torch.zeros(1, 64, device=device))  # as a step does before it has logits again
    torch.cuda.synchronize()
    return True


def left_alone(group, say):
    """Rank 0 sums up, and nobody else does; another thread ends the group."""
    group.reserve(1024, torch.bfloat16)
    x = torch.ones(300, 1024, dtype=torch.bfloat16, device="cuda")
    group.all_reduce(x)
    torch.cuda.synchronize()
    if group.rank:
        time.sleep(3.0)
        return 0.0
    group.all_reduce(x)
    threading.Timer(1.0, group.shut).start()
    begin = time.monotonic()
    say("alone")
    torch.cuda.synchronize()
    return time.monotonic() - begin


@pytest.mark.parametrize("size", SOME_GPUS)
@pytest.mark.parametrize("work", [sums, fused_sums])
def test_of_all_sizes(work, size):
    """From one row to more than one launch takes."""
    assert run_gpu_ranks(size, of_all_kinds, work) == [True] * size


@pytest.mark.parametrize("size", SOME_GPUS)
@pytest.mark.parametrize("two_shot", [False, True])
def test_replays_of_a_graph(two_shot, size):
    assert run_gpu_ranks(size, replays, two_shot) == [True] * size


@pytest.mark.parametrize("size", SOME_GPUS)
@pytest.mark.parametrize("vocab", [128256, 151936])
def test_limited_draws_read_where_logits_lie(vocab, size):
    assert run_gpu_ranks(size, limited_draws, vocab) == [True] * size


@pytest.mark.parametrize("size", SOME_GPUS[:1])
def test_a_kernel_that_waits_in_vain_ends(size):
    alone, _ = run_gpu_ranks(size, left_alone)
    assert 0.5 < alone < 3.0


def test_ways_are_chosen_by_bytes_and_ranks():
    """Two ranks send the same bytes in one shot and wait once; of other numbers than four nobody knows."""

    def meet(group):
        found, _ = with_made_up_memory(group)
        found.reserve(64, torch.bfloat16)
        small, large = found.reach.one_shot // 128, found.reach.most // 128  # rows
        ways = [found._in_two(torch.empty(rows, 64, dtype=torch.bfloat16)) for rows in (1, small, small + 1)]
        return ways, found.fused_rows == large, large > small

    expected = {2: ([False, False, True], True, False), 3: ([False, False, True], True, False)}
    expected[4] = [False, False, True], True, True
    for size, ways in expected.items():
        assert run_ranks(size, meet) == [ways] * size
