"""A draw of which each part of the vocabulary does its part."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, poisoned, with_row_padding

from tritonllm.kernels import SHARD_UNIT, best_of_shards, best_of_shards_ref, sample, sample_shard, sample_shard_ref
from tritonllm.kernels.sampling.common import scan

TEMPERATURES = [0.0, 1e-6, 0.4, 1.0, 30.0, torch.inf, torch.nan]


def make_case(rows, vocab, spread, masked, seed, device):
    """Logits ``[rows, vocab]``, and a temperature, a seed and a step of each row."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * spread
    where = torch.rand(rows, vocab, generator=g)
    logits = logits.masked_fill(where < masked, -torch.inf).masked_fill(where < masked / 4, torch.nan)
    logits = logits.masked_fill(where > 1 - masked / 8, torch.inf)
    temperature = torch.tensor(TEMPERATURES)[torch.randint(len(TEMPERATURES), (rows,), generator=g)]
    seeds, steps = torch.randint(-(2**62), 2**62, (2, rows), generator=g)
    return logits.to(device), (temperature.to(device), seeds.to(device), steps.to(device))


def draw(of, best_of, logits, noise, cuts):
    """The tokens, with the vocabulary cut so, and shards in another order than their columns'."""
    bounds = [0, *cuts, logits.shape[1]]
    parts = [of(logits[:, a:b], *noise, first=a) for a, b in pairwise(bounds)]
    return best_of(torch.stack(parts[::-1]))


shards = st.lists(st.integers(1, 4), max_size=3, unique=True).map(lambda at: [SHARD_UNIT * i for i in sorted(at)])


@given(
    rows=st.integers(0, 4),
    cuts=shards,
    beyond=st.sampled_from([1, 7, 128, 129, 300]),
    dtype=st.sampled_from(FLOATS),
    spread=st.sampled_from([0.0, 1.0, 10.0, 1e30]),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_the_best_of_all_shards_is_the_draw(device, rows, cuts, beyond, dtype, spread, masked, padding, seed):
    """Token for token that of `sample`, however the vocabulary is cut."""
    vocab = (cuts[-1] if cuts else 0) + beyond
    logits, noise = make_case(rows, vocab, spread, masked, seed, device)
    logits = with_row_padding(logits.to(dtype), padding)
    temperature, seeds, steps = noise
    wanted = sample(logits, temperature, None, None, None, seeds, steps)
    assert torch.equal(draw(sample_shard, best_of_shards, logits, noise, cuts), wanted)


@given(
    rows=st.integers(0, 4),
    first=st.sampled_from([0, 128, 75904, 2**20]),
    vocab=st.sampled_from([1, 127, 128, 300]),
    spread=st.sampled_from([0.0, 1.0, 10.0]),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_matches_reference(device, rows, first, vocab, spread, masked, seed):
    logits, noise = make_case(rows, vocab, spread, masked, seed, device)
    out = poisoned(rows, 2, dtype=torch.float64, device=device)
    assert sample_shard(logits, *noise, first=first, out=out) is out
    expected = sample_shard_ref(logits, *noise, first=first)
    torch.testing.assert_close(out[:, 0], expected[:, 0], rtol=1e-5, atol=1e-5)
    same = out[:, 1] == expected[:, 1]  # but where two groups or tokens are as good as each other
    assert same.float().mean() >= 0.75 or rows == 0
    assert ((out[:, 1] >= first) & (out[:, 1] < first + vocab)).all()


def test_ties_and_rows_without_a_choice(device):
    """The lowest token among equals, whichever shard has it; token 0 where no shard has any."""
    drawn = torch.tensor(
        [
            [[2.0, 200.0], [-torch.inf, 128.0], [1.0, 130.0], [-1e308, 255.0]],
            [[2.0, 5.0], [-torch.inf, 0.0], [3.0, 7.0], [-torch.inf, 0.0]],
            [[1.0, 300.0], [-torch.inf, 256.0], [3.0, 256.0], [-torch.inf, 256.0]],
        ],
        dtype=torch.float64,
        device=device,
    )
    for fn in (best_of_shards, best_of_shards_ref):
        assert fn(drawn).tolist() == [5, 0, 7, 255]


def test_many_shards_and_no_rows(device):
    drawn = torch.zeros(70, 3, 2, dtype=torch.float64, device=device)
    drawn[..., 1] = torch.arange(70, device=device)[:, None] * 128.0
    drawn[65, 1, 0] = 1
    assert best_of_shards(drawn).tolist() == [0, 65 * 128, 0]
    assert best_of_shards(drawn[:, :0].contiguous()).tolist() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": 64}, "first must be a multiple of 128 and not negative, got 64"),
        ({"first": -128}, "first must be a multiple of 128"),
        ({"logits": torch.zeros(2, 0)}, "logits must have at least one column"),
        ({"temperature": torch.zeros(3)}, "temperature"),
        ({"seeds": torch.zeros(2, dtype=torch.int32)}, "seeds"),
        ({"out": torch.zeros(2, 2)}, "out"),
        ({"out": torch.zeros(2, 2, dtype=torch.float64).t()}, "out must be contiguous"),
    ],
)
def test_bad_arguments(device, change, message):
    given = {"logits": torch.zeros(2, 128), "temperature": torch.zeros(2), "first": 0}
    given |= dict.fromkeys(("seeds", "steps"), torch.zeros(2, dtype=torch.int64))
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in (given | change).items()}
    with pytest.raises(ValueError, match=message):
        sample_shard(**moved)


def test_bad_drawn(device):
    drawn = torch.zeros(2, 3, 2, dtype=torch.float64, device=device)
    for bad, message in ((drawn.float(), "drawn"), (drawn[:0], "at least one shard"), (drawn[0], "three dimensions")):
        with pytest.raises(ValueError, match=message):
            best_of_shards(bad)
    with pytest.raises(ValueError, match="out"):
        best_of_shards(drawn, out=torch.zeros(2, dtype=torch.int64, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("shards", [2, 3, 4, 8])
@pytest.mark.parametrize("vocab", [32000, 128256, 151936, 262144])
def test_real_sizes(device, vocab, shards):
    """Bit for bit: the groups' sums are those of the draw from all columns, also of shards with rows of their own."""
    each = -(-vocab // (SHARD_UNIT * shards)) * SHARD_UNIT
    logits, noise = make_case(256, vocab, 3.0, 0.0, vocab + shards, device)
    whole = scan(logits.unsqueeze(1), noise[0])
    parts = [scan(part.contiguous().unsqueeze(1), noise[0]) for part in logits.split(each, 1)]
    for found, wanted in zip(map(torch.cat, zip(*parts, strict=True), [1, 1]), whole, strict=True):
        assert torch.equal(found, wanted)
    temperature, seeds, steps = noise
    wanted = sample(logits, temperature, None, None, None, seeds, steps)
    assert torch.equal(draw(sample_shard, best_of_shards, logits, noise, range(each, vocab, each)), wanted)
