"""Penalties, biases, bans and allowed tokens: the reference against a plain loop, the kernels against the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draws import assert_same_draws
from support.examples import examples

from tritonllm.kernels import sample, sample_ref
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.sampling.edits import (
    ALWAYS,
    Entry,
    LogitEdits,
    count_tokens,
    count_tokens_ref,
    edit_logits_ref,
    make_logit_edits,
    write_seat,
)


def random_seat(vocab, g):
    """Arguments of `write_seat`, most of them in use."""

    def tokens(most):
        return torch.randint(vocab, (int(torch.randint(most, (), generator=g)),), generator=g).tolist()

    def choose(*values):
        return values[int(torch.randint(len(values), (), generator=g))]

    output = tokens(12)
    entries = [Entry(t, choose(-math.inf, 2.5, -100.0), choose(ALWAYS, 3, 0)) for t in tokens(9)]
    entries += [Entry(t, -math.inf, after=choose(output[-2:], output[-1:], tokens(4))) for t in tokens(6)]
    penalties = {"repetition": choose(1.0, 1.3, 0.7), "frequency": choose(0.0, 0.5, -2.0), "presence": choose(0.0, 0.3)}
    return dict(
        prompt=tokens(20), output=output, entries=entries, allowed=choose(None, None, tokens(99) or None), **penalties
    )


def make_state(seats, vocab, g, device, **sizes):
    edits = make_logit_edits(seats, vocab, device=device, **sizes)
    written = [random_seat(vocab, g) for _ in range(seats)]
    for seat, arguments in enumerate(written):
        write_seat(edits, seat, **arguments)
    return edits, written


def edited_row(row, prompt, output, entries, allowed, repetition, frequency, presence):
    """What a seat means, token by token."""
    x = row.tolist()
    for t in {*prompt, *output}:
        x[t] = x[t] / repetition if x[t] > 0 else x[t] * repetition
    for t in set(output):
        x[t] -= frequency * output.count(t) + presence
    for entry in entries:
        after = list(entry.after)
        if len(output) < entry.until and (not after or output[-len(after) :] == after):
            x[entry.token] += entry.value
    return torch.tensor([v if allowed is None or t in allowed else -math.inf for t, v in enumerate(x)])


@given(vocab=st.sampled_from([1, 31, 33, 200, 300]), seed=st.integers(0, 2**20))
def test_reference(vocab, seed):
    g = torch.Generator().manual_seed(seed)
    edits, written = make_state(3, vocab, g, "cpu")
    logits = torch.randn(4, vocab, generator=g) * 3
    seats = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    steps = torch.tensor([len(written[seat]["output"]) if seat >= 0 else 5 for seat in seats.tolist()])
    got = edit_logits_ref(logits, edits, seats, steps)
    assert torch.equal(got[1], logits[1])
    for row in (0, 2, 3):
        torch.testing.assert_close(got[row], edited_row(logits[row], **written[seats[row]]), rtol=1e-5, atol=1e-5)


def parameters(rows, g, device, temperature=(0.0, 0.8, 1.0)):
    def choose(values, dtype):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=g)].to(device)

    limits = choose([0, 0, 5], torch.int32), choose([1.0, 0.9], torch.float32), choose([0.0, 0.1], torch.float32)
    return choose(temperature, torch.float32), *limits, torch.arange(rows, device=device)


@settings(max_examples=examples(80))  # 8 in `make test` do not see counts above 1 (tests/mutations.py)
@given(
    vocab=st.sampled_from([1, 33, 129, 300, 700]),
    rows=st.integers(0, 4),
    with_limits=st.booleans(),
    warps=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**20),
)
def test_sample_applies_them(device, vocab, rows, with_limits, warps, seed):
    g = torch.Generator().manual_seed(seed)
    edits, _ = make_state(5, vocab, g, device, entries=16, longest=4)
    logits = (torch.randn(rows, vocab, generator=g) * 3).to(device)
    logits[:, ::7] = torch.tensor([-math.inf, math.nan])[seed % 2]
    logits[:, 30:31] = math.inf
    seats = (torch.randperm(5, generator=g)[:rows] - 1).int().to(device)
    temperature, *limits, seeds = parameters(rows, g, device)
    limits = limits if with_limits else [None] * 3
    steps = torch.randint(8, (rows,), generator=g).to(device)
    edited = logits.clone()
    given = (temperature, *limits, seeds, steps)
    expected = sample_ref(edited, *given, edits=edits, seats=seats)
    untouched = seats < 0
    assert torch.equal(edited[untouched].nan_to_num(), logits[untouched].nan_to_num())
    with tuning.override("sample_draw", {"TILES": 1, "num_warps": warps}):
        out = sample(logits, *given, edits=edits, seats=seats)
    torch.testing.assert_close(logits, edited, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert_same_draws(out, expected, edited, *given)


def test_rows_without_a_seat_are_sampled_as_without_edits(device):
    g = torch.Generator().manual_seed(1)
    edits, _ = make_state(2, 300, g, device)
    logits = torch.randn(4, 300, generator=g).to(device)
    temperature, *limits, seeds = parameters(4, g, device)
    given = (logits, temperature, *limits, seeds, torch.full_like(seeds, 3))
    seats = torch.full((4,), -1, dtype=torch.int32, device=device)
    wanted, untouched = sample(*given), logits.clone()
    assert torch.equal(sample(*given, edits=edits, seats=seats), wanted)
    assert torch.equal(logits, untouched)


@given(rows=st.integers(0, 4), dtype=st.sampled_from([torch.int32, torch.int64]), seed=st.integers(0, 2**20))
def test_count_tokens(device, rows, dtype, seed):
    """Counting on the device step by step leaves what writing the whole output would."""
    g = torch.Generator().manual_seed(seed)
    vocab, outputs = 50, [[7], [], [], [1, 2, 3, 4, 5, 6], []]
    edits, other = (make_logit_edits(5, vocab, longest=4, device=device) for _ in range(2))
    for state in (edits, other):
        for seat, output in enumerate(outputs):
            write_seat(state, seat, output=output)
    for _ in range(6):
        seats = (torch.randperm(6, generator=g)[:rows] - 1).int().to(device)
        tokens = torch.randint(-1, vocab + 1, (rows,), generator=g).to(device, dtype)
        for seat, token in zip(seats.tolist(), tokens.tolist(), strict=True):
            if seat >= 0 and 0 <= token < vocab:
                outputs[seat].append(token)
        count_tokens(edits, seats, tokens)
        count_tokens_ref(other, seats, tokens)
    expected = make_logit_edits(5, vocab, longest=4, device=device)
    for seat, output in enumerate(outputs):
        write_seat(expected, seat, output=output)
    for name, got, same, wanted in zip(LogitEdits._fields, edits, other, expected, strict=True):
        assert torch.equal(got, wanted) and torch.equal(same, wanted), name


def test_counts_stay_at_the_largest(device):
    edits = make_logit_edits(1, 9, device=device)
    edits.output_counts[0, 4] = 32767
    seat, token = torch.zeros(1, dtype=torch.int32, device=device), torch.full((1,), 4, device=device)
    for fn in (count_tokens, count_tokens_ref):
        fn(edits, seat, token)
        assert edits.output_counts[0].tolist() == [0, 0, 0, 0, 32767, 0, 0, 0, 0]


def test_a_seat_forgets_the_request_before(device):
    g = torch.Generator().manual_seed(0)
    edits, _ = make_state(1, 100, g, device)
    write_seat(edits, 0)
    for got, wanted in zip(edits, make_logit_edits(1, 100, device=device), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"seat": 2}, "seat must be from 0 to 1, got 2"),
        ({"prompt": [1, 9]}, "prompt has token 9"),
        ({"output": [-1]}, "output has token -1"),
        ({"allowed": [10]}, "allowed has token 10"),
        ({"entries": [Entry(1, 1.0)] * 3}, "entries must be at most 2"),
        ({"entries": [Entry(1, 1.0, after=(1, 2, 3))]}, "entries may ask for at most 2 tokens"),
        ({"entries": [Entry(-1, 1.0)]}, "entries must be of tokens from 0"),
    ],
)
def test_bad_seats(change, names):
    edits = make_logit_edits(2, 9, entries=2, longest=2, device="cpu")
    with pytest.raises(ValueError, match=names):
        write_seat(edits, **{"seat": 0, **change})


@pytest.mark.parametrize(
    ("field", "change", "names"),
    [
        ("prompt_mask", lambda t: t[:, :0], r"edits.prompt_mask must have shape \[2, 1\]"),
        ("output_counts", lambda t: t.int(), "edits.output_counts must be torch.int16"),
        ("recent", lambda t: t.t().contiguous().t(), "edits.recent must be contiguous"),
        ("entry_value", lambda t: t[:1], r"edits.entry_value must have shape \[2, 4\]"),
    ],
)
def test_bad_state(field, change, names):
    edits = make_logit_edits(2, 9, entries=4, longest=2, device="cpu")
    edits = edits._replace(**{field: change(getattr(edits, field))})
    numbers = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=names):
        given = (torch.zeros(1, 9), torch.zeros(1), None, None, None, numbers, numbers)
        sample(*given, edits=edits, seats=torch.zeros(1, dtype=torch.int32))


def test_edits_need_float32():
    numbers, edits = torch.zeros(1, dtype=torch.int64), make_logit_edits(1, 9, device="cpu")
    with pytest.raises(ValueError, match=r"must be torch\.float32"):
        given = (torch.zeros(1, 9, dtype=torch.bfloat16), torch.zeros(1), None, None, None, numbers, numbers)
        sample(*given, edits=edits, seats=torch.zeros(1, dtype=torch.int32))


def test_operators(device):
    edits, _ = make_state(2, 9, torch.Generator().manual_seed(0), device, entries=16)
    seats, numbers = (
        torch.tensor([1, 0], dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    parameters = (torch.ones(2, device=device), None, None, None, numbers, numbers)
    arguments = (torch.randn(2, 9, device=device), None, numbers.clone(), seats, *parameters, *edits)
    masks = torch.tensor([-1, 0], dtype=torch.int32, device=device), numbers[:1, None].int()
    for more in ((None, None), masks):
        torch.library.opcheck(torch.ops.tritonllm.sample_edited.default, (*arguments, *more))
    counts = (numbers, seats, edits.output_counts, edits.recent)
    torch.library.opcheck(torch.ops.tritonllm.count_tokens.default, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
def test_real_vocabulary(device, rows):
    g = torch.Generator().manual_seed(rows)
    vocab = 151936
    edits, _ = make_state(rows, vocab, g, device)
    logits = (torch.randn(rows, vocab, generator=g) * 3).to(device)
    seats = (torch.randperm(rows, generator=g) - rows // 2).int().to(device)
    temperature, *limits, seeds = parameters(rows, g, device)
    steps = torch.randint(12, (rows,), generator=g).to(device)
    edited, given = logits.clone(), (temperature, *limits, seeds, steps)
    expected = sample_ref(edited, *given, edits=edits, seats=seats)
    out = sample(logits, *given, edits=edits, seats=seats)
    torch.testing.assert_close(logits, edited, rtol=1e-6, atol=1e-6)
    assert_same_draws(out, expected, edited, *given)
