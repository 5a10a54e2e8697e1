"""Rows with limits, whose columns lie on several ranks that read each other's memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.kernels import (
    SHARD_UNIT,
    best_of_shards,
    best_of_shards_ref,
    sample,
    sample_limited_shards,
    sample_limited_shards_ref,
    sample_shard,
    sample_shard_ref,
)
from tritonllm.kernels.sampling.common import STEP
from tritonllm.kernels.sampling.shard import Found

TEMPERATURES = [0.0, 0.4, 1.0, 30.0, torch.inf]


class Rank:
    """One's part of rows of logits, in its piece of the memory of all."""

    def __init__(self, memory, rank, rows, each):
        groups = each // SHARD_UNIT
        self.first = rank * each
        logits, *found = memory[rank].split(
            [rows * each, *[rows * groups] * 2, memory.shape[1] - rows * (each + 2 * groups)]
        )
        self.logits = logits.view(rows, each)
        self.found = Found(*(t.view(rows, groups) for t in found[:2]))
        size = memory.shape[1] // STEP.value
        self.steps = torch.arange(-rank * size, (len(memory) - rank) * size, size, device=memory.device)


def deal_out(logits, ranks, each):
    """The rows, in the memory of so many ranks; what is behind the vocabulary would win every draw."""
    rows = len(logits)
    size = -(-rows * (each + 2 * each // SHARD_UNIT) // STEP.value) * STEP.value + STEP.value
    memory = torch.full((ranks, size), torch.inf, device=logits.device)
    found = [Rank(memory, rank, rows, each) for rank in range(ranks)]
    for rank in found:
        own = logits[:, rank.first : rank.first + each]
        rank.logits[:, : own.shape[1]] = own
    return found


def draw_on_all(ranks, vocab, limits, temperature, seeds, steps, fns):
    """The tokens that each rank draws."""
    of_shard, best, of_limited = fns
    noise = temperature, seeds, steps
    drawn = []
    for rank in ranks:
        own = rank.logits[:, : max(0, vocab - rank.first)]
        drawn.append(of_shard(own, *noise, first=rank.first, found=rank.found))
    tokens = []
    for rank in ranks:
        out = best(torch.stack(drawn))
        where = {"rank_steps": rank.steps, "vocab": vocab, "out": out}
        given = rank.logits, *rank.found, temperature, *limits, seeds, steps
        assert of_limited(*given, **where) is out
        tokens.append(out)
    return tokens


KERNELS = sample_shard, best_of_shards, sample_limited_shards
REFERENCES = sample_shard_ref, best_of_shards_ref, sample_limited_shards_ref


def make_case(rows, vocab, spread, masked, seed, device):
    """Logits, the limits and the noise of rows, of which some have no limits and some are greedy."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * spread
    where = torch.rand(rows, vocab, generator=g)
    logits = logits.masked_fill(where < masked, -torch.inf).masked_fill(where < masked / 4, torch.nan)

    def any_of(values, dtype):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=g)].to(device)

    temperature = any_of(TEMPERATURES, torch.float32)
    limits = (
        any_of([0, 0, 1, 5, 60, vocab], torch.int32),
        any_of([1.0, 1.0, 0.0, 0.3, 0.9, 0.999], torch.float32),
        any_of([0.0, 0.0, 0.05, 1.0], torch.float32),
    )
    seeds, steps = torch.randint(-(2**62), 2**62, (2, rows), generator=g).to(device)
    return logits.to(device), limits, (temperature, seeds, steps)


@given(
    rows=st.integers(0, 3),
    ranks=st.integers(1, 3),
    groups=st.integers(1, 3),
    missing=st.sampled_from([0, 16, 112, 120]),
    which=st.sets(st.integers(0, 2)),
    spread=st.sampled_from([0.0, 1.0, 10.0]),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_every_rank_draws_what_one_device_does(device, rows, ranks, groups, missing, which, spread, masked, seed):
    """Token for token that of `sample`; the last rank has fewer columns, and callers may leave limits out."""
    each = groups * SHARD_UNIT
    vocab = ranks * each - missing
    logits, limits, noise = make_case(rows, vocab, spread, masked, seed, device)
    limits = [limit if i in which else None for i, limit in enumerate(limits)]
    temperature, seeds, steps = noise
    wanted = sample(logits, temperature, *limits, seeds, steps)
    for tokens in draw_on_all(deal_out(logits, ranks, each), vocab, limits, *noise, KERNELS):
        assert torch.equal(tokens, wanted)


@given(rows=st.integers(1, 3), ranks=st.integers(1, 3), seed=st.integers(0, 2**20))
def test_matches_reference(device, rows, ranks, seed):
    each = 2 * SHARD_UNIT
    vocab = ranks * each - 16
    logits, limits, noise = make_case(rows, vocab, 3.0, 0.1, seed, device)
    found = deal_out(logits, ranks, each)
    expected = draw_on_all(found, vocab, limits, *noise, REFERENCES)
    sums = [rank.found.group_sum.clone() for rank in found]
    tokens = draw_on_all(found, vocab, limits, *noise, KERNELS)
    for rank, reference in zip(found, sums, strict=True):
        torch.testing.assert_close(rank.found.group_sum, reference, rtol=1e-5, atol=1e-6)
    same = torch.stack(tokens) == torch.stack(expected)  # but where two tokens are as good as each other
    assert same.float().mean() >= 0.6


def test_a_rank_behind_the_end_has_nothing(device):
    """Of a vocabulary that the first ranks hold, the last one's memory is not read."""
    logits, limits, noise = make_case(3, 2 * SHARD_UNIT, 3.0, 0.0, 5, device)
    ranks = deal_out(logits, 3, SHARD_UNIT)
    temperature, seeds, steps = noise
    wanted = sample(logits, temperature, *limits, seeds, steps)
    drawn = [sample_shard(rank.logits, *noise, first=rank.first, found=rank.found) for rank in ranks[:2]]
    out = best_of_shards(torch.stack(drawn))
    where = {"rank_steps": ranks[2].steps, "vocab": 2 * SHARD_UNIT, "out": out}
    sample_limited_shards(ranks[2].logits, *ranks[2].found, temperature, *limits, seeds, steps, **where)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 100)}, "a multiple of 128 columns, got 100"),
        ({"logits": torch.zeros(2, 0)}, "a multiple of 128 columns, got 0"),
        ({"logits": torch.zeros(2, 128).half()}, "logits"),
        ({"group_max": torch.zeros(2, 2)}, "group_max"),
        ({"group_sum": torch.zeros(2, 2)}, "group_sum"),
        ({"top_k": torch.zeros(2)}, "top_k"),
        ({"rank_steps": torch.zeros(2, dtype=torch.int32)}, "rank_steps"),
        ({"vocab": 257}, "vocab must be from 1 to the 256 columns of all ranks, got 257"),
        ({"vocab": 0}, "vocab must be from 1"),
        ({"out": torch.zeros(2)}, "out"),
    ],
)
def test_bad_arguments(device, change, message):
    ones, numbers = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    given = {"logits": torch.zeros(2, 128), "group_max": torch.zeros(2, 1), "group_sum": torch.zeros(2, 1)}
    given |= {"temperature": ones, "top_k": None, "top_p": ones, "min_p": None, "seeds": numbers, "steps": numbers}
    given |= {"rank_steps": numbers, "vocab": 256, "out": numbers}
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in (given | change).items()}
    with pytest.raises(ValueError, match=message):
        sample_limited_shards(**moved)


def test_what_was_found_must_be_contiguous(device):
    ones, numbers = torch.ones(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    apart, where = torch.zeros(2, 2, device=device)[:, :1], {"rank_steps": numbers, "vocab": 256, "out": numbers}
    with pytest.raises(ValueError, match="group_max must be contiguous"):
        given = torch.zeros(2, 128, device=device), apart, apart, ones, None, ones, None, numbers, numbers
        sample_limited_shards(*given, **where)


@pytest.mark.parametrize(
    "bad", [{"group_sum": None}, {"group_max": torch.zeros(2, 1)}, {"group_sum": torch.zeros(3, 2)}]
)
def test_bad_places_for_what_is_found(device, bad):
    found = {"group_max": torch.zeros(2, 2), "group_sum": torch.zeros(2, 2)} | bad
    places = Found(**{n: None if t is None else t.to(device) for n, t in found.items()})
    numbers = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"found|group_max|group_sum"):
        sample_shard(
            torch.zeros(2, 256, device=device), torch.zeros(2, device=device), numbers, numbers, first=0, found=places
        )


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("vocab", [32000, 128256, 151936, 262144])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_real_sizes(device, vocab, ranks, spread):
    """Flat rows are searched, the others settled by their candidates."""
    each = -(-vocab // (SHARD_UNIT * ranks)) * SHARD_UNIT
    logits, limits, noise = make_case(64, vocab, spread, 0.0, vocab + ranks, device)
    temperature, seeds, steps = noise
    wanted = sample(logits, temperature, *limits, seeds, steps)
    for tokens in draw_on_all(deal_out(logits, ranks, each), vocab, limits, *noise, KERNELS):
        assert torch.equal(tokens, wanted)
