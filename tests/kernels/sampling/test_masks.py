"""Masks in `sample`: as if what is banned were -inf, to the last bit, in every kind of row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, poisoned, with_row_padding

from tritonllm.kernels import TokenMasks, make_logit_edits, sample, sample_ref, write_seat
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.sampling.masks import MaybeMasks, ban_ref

DENSITIES = [0.0, 0.003, 0.5, 1.0]  # of what a mask allows


def random_masks(batch, count, vocab, g, device, density=0.5):
    """``count`` masks, of rows that are drawn; the other rows have places at which there is none."""
    bits = torch.rand(count, -(-vocab // 32), 32, generator=g) < density
    words = (bits.long() << torch.arange(32)).sum(-1)
    bitmask = torch.where(words >= 2**31, words - 2**32, words).int()
    nobody = torch.tensor([-1, -7, count, count + 5])
    rows = nobody[torch.randint(4, (batch,), generator=g)]
    mine = torch.randperm(batch, generator=g)[: min(count, batch)]
    rows[mine] = torch.randperm(count, generator=g)[: len(mine)]
    return TokenMasks(rows.int().to(device), bitmask.to(device))


def parameters(rows, device, g):
    """Greedy rows, rows without limits, and rows with them."""

    def choose(values, dtype):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=g)].to(device)

    temperature = choose([0.0, 0.0, 0.7, 2.0], torch.float32)
    limits = choose([0, 0, 1, 3, 50], torch.int32), choose([1.0, 1.0, 0.8], torch.float32)
    seeds, steps = torch.randint(-(2**62), 2**62, (2, rows), generator=g).to(device)
    return temperature, *limits, choose([0.0, 0.0, 0.05], torch.float32), seeds, steps


def banned(logits, masks):
    logits = logits.clone()
    ban_ref(logits, MaybeMasks(*masks))
    return logits


@given(
    batch=st.integers(0, 6),
    count=st.integers(0, 5),
    vocab=st.sampled_from([1, 31, 32, 33, 129, 520, 2100]),
    dtype=st.sampled_from(FLOATS),
    density=st.sampled_from(DENSITIES),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_as_if_what_is_banned_were_not_there(device, batch, count, vocab, dtype, density, padding, seed):
    g = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(batch, vocab, generator=g)).to(device, dtype)
    masks, params = random_masks(batch, count, vocab, g, device, density), parameters(batch, device, g)
    expected = sample(banned(logits, masks), *params)
    given_logits = with_row_padding(logits, padding)
    out = poisoned(batch, dtype=torch.int64, device=device)
    assert torch.equal(sample(given_logits, *params, masks=masks, out=out), expected)
    kept = torch.where(torch.isneginf(given_logits), banned(logits, masks), given_logits)
    assert torch.equal(kept, given_logits)  # nothing is overwritten but what is banned
    no_limits = (params[0], None, None, None, *params[4:])
    wanted = sample(banned(logits, masks), *no_limits)
    assert torch.equal(sample(logits, *no_limits, masks=masks), wanted)


@given(st.integers(1, 5), st.sampled_from([40, 300, 520]), st.sampled_from(DENSITIES), st.integers(0, 2**20))
def test_reference_token_by_token(batch, vocab, density, seed):
    g = torch.Generator().manual_seed(seed)
    logits, masks = torch.randn(batch, vocab, generator=g), random_masks(batch, batch, vocab, g, "cpu", density)
    expected = logits.clone()
    for row, at in enumerate(masks.rows.tolist()):
        for token in range(vocab if 0 <= at < batch else 0):
            if not masks.bitmask[at, token // 32].item() >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    assert torch.equal(banned(logits, masks), expected)
    params = parameters(batch, "cpu", g)
    assert torch.equal(sample_ref(logits, *params, masks=masks), sample_ref(expected, *params))


@given(st.integers(1, 4), st.sampled_from([33, 300]), st.integers(0, 2**20))
def test_beside_edits(device, batch, vocab, seed):
    """A bias or a penalty brings nothing back that is banned."""
    g = torch.Generator().manual_seed(seed)
    edits = make_logit_edits(batch, vocab, device=device)
    for seat in range(batch):
        write_seat(edits, seat, prompt=[1], output=[2, 2], repetition=1.3, frequency=0.4)
    seats = torch.arange(batch, dtype=torch.int32, device=device)
    seats[0] = -1
    logits, masks = torch.randn(batch, vocab, generator=g).to(device), random_masks(batch, 3, vocab, g, device)
    params = parameters(batch, device, g)
    expected = sample(banned(logits, masks), *params, edits=edits, seats=seats)
    assert torch.equal(sample(logits.clone(), *params, edits=edits, seats=seats, masks=masks), expected)
    assert torch.equal(sample_ref(logits.clone(), *params, edits=edits, seats=seats, masks=masks), expected)


def test_one_token_left_or_none(device):
    """NaN is banned, too; a row with nothing left gives token 0."""
    logits = torch.full((3, 300), float("nan"), device=device)
    logits[:, 77], logits[1, 3] = -5.0, 9.0
    bitmask = torch.zeros(3, 10, dtype=torch.int32, device=device)
    bitmask[:2, 77 // 32] = 1 << (77 % 32)
    masks = TokenMasks(torch.arange(3, dtype=torch.int32, device=device), bitmask)
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 5)):
        number = torch.zeros(3, dtype=torch.int64, device=device)
        of_all = (torch.full((3,), top_k, dtype=torch.int32, device=device), None, None)
        drawn = sample(
            logits.clone(), torch.full((3,), temperature, device=device), *of_all, number, number, masks=masks
        )
        assert drawn.tolist() == [77, 77, 0]


def test_launches_do_not_matter(device):
    g = torch.Generator().manual_seed(1)
    logits, masks = torch.randn(5, 700, generator=g).to(device), random_masks(5, 4, 700, g, device)
    params = parameters(5, device, g)
    expected = sample(logits.clone(), *params, masks=masks)
    for config in ({"TILES": 1, "num_warps": 1}, {"TILES": 3, "num_warps": 2}, {"TILES": 8, "num_warps": 1}):
        with tuning.override("sample_draw", config):
            assert torch.equal(sample(logits.clone(), *params, masks=masks), expected)


@pytest.mark.parametrize(
    ("rows", "bitmask", "names"),
    [
        (torch.zeros(2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32), r"masks.rows must be torch\.int32"),
        (torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32), r"masks.rows must have shape \[2\]"),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), "masks.bitmask must have shape"),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2), r"masks.bitmask must be torch\.int32"),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)[:, ::2], "must be contiguous"),
    ],
)
def test_bad_arguments(rows, bitmask, names):
    g = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match=names):
        sample(torch.zeros(2, 40), *parameters(2, "cpu", g), masks=TokenMasks(rows, bitmask))


def test_operator(device):
    g = torch.Generator().manual_seed(0)
    masks, params = random_masks(3, 2, 70, g, device), parameters(3, device, g)
    out = torch.zeros(3, dtype=torch.int64, device=device)
    workspace = torch.zeros(3, dtype=torch.int32, device=device)
    given_all = (torch.randn(3, 70, device=device), workspace, out, *params, *masks)
    torch.library.opcheck(torch.ops.tritonllm.sample_masked.default, given_all)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 256])
@pytest.mark.parametrize("density", DENSITIES)
def test_real_shapes(device, rows, density):
    g = torch.Generator().manual_seed(0)
    logits, masks = (
        torch.randn(rows, 151936, generator=g).to(device),
        random_masks(rows, rows, 151936, g, device, density),
    )
    params = parameters(rows, device, g)
    assert torch.equal(sample(logits.clone(), *params, masks=masks), sample(banned(logits, masks), *params))
