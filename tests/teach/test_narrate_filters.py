"""The narration's account of a draw is what the sampler does."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.edits import MAX_BAD_WORD, MAX_ENTRIES
from tritonllm.kernels import TokenMasks, sample
from tritonllm.kernels.sampling.edits import ALWAYS, Entry, edit_logits_ref, make_logit_edits, write_seat
from tritonllm.kernels.sampling.sample import log_weights_ref
from tritonllm.teach.narrate.filters import follow

VOCAB = 150  # more than a group of the draw
SHARES = st.sampled_from([0.05, 0.3, 0.9])
PARAMS = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40, VOCAB]),
    top_p=st.one_of(st.just(1.0), SHARES),
    min_p=st.one_of(st.just(0.0), SHARES),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    min_tokens=st.sampled_from([0, 3]),
    logit_bias=st.sampled_from([None, {7: 3.0, 8: -100.0}]),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def logits_of(seed, ties):
    logits = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    return logits.round() if ties else logits


def mask_of(allowed):
    bits = np.zeros(32 * -(-VOCAB // 32), dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def edits_of(params, prompt, output, eos):
    state = make_logit_edits(1, VOCAB, entries=MAX_ENTRIES, longest=MAX_BAD_WORD - 1, device="cpu")
    entries = [Entry(token, bias) for token, bias in (params.logit_bias or {}).items()]
    entries += [Entry(eos, -math.inf, params.min_tokens or ALWAYS)] if params.min_tokens else []
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    named = dict(zip(("repetition", "frequency", "presence"), penalties, strict=True))
    write_seat(state, 0, prompt=prompt, output=output, entries=entries, **named)
    return state


@given(
    wishes=PARAMS,
    prompt=TOKENS,
    output=TOKENS,
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    allowed=st.one_of(st.none(), st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=20)),
)
def test_what_is_drawn_could_be_drawn(wishes, prompt, output, seed, ties, allowed):
    """The sampler's token always has a probability, the argmax is the greedy one, and the distribution is the one that
    the sampler's reference draws from."""
    params, logits, eos = SamplingParams(seed=1, **wishes), logits_of(seed, ties), 5
    mask = None if allowed is None else mask_of(allowed)
    row = follow(logits, params, prompt, output, mask=mask, eos_token_ids=frozenset({eos}))
    given_ = (
        torch.tensor([params.temperature]),
        torch.tensor([params.top_k], dtype=torch.int32),
        torch.tensor([params.top_p]),
        torch.tensor([params.min_p]),
    )
    state, steps = edits_of(params, prompt, output, eos), torch.tensor([len(output)])
    seat = torch.zeros(1, dtype=torch.int32)
    masks = {} if mask is None else {"masks": TokenMasks(seat, torch.from_numpy(mask)[None])}
    for noise in range(5):
        changed = logits[None].clone()
        drawn = sample(changed, *given_, torch.tensor([noise]), steps, edits=state, seats=seat, **masks)
        if allowed is None or not {5, 8}.issuperset(allowed):  # else nothing may be left
            assert row.final[drawn] > 0
            assert row.dropped_by(int(drawn)) is None
    edited = edit_logits_ref(logits[None], state, seat, steps)
    if allowed is not None:
        banned = torch.ones(VOCAB, dtype=torch.bool)
        banned[list(allowed)] = False
        edited = edited.masked_fill(banned, -math.inf)
    if params.greedy:
        assert row.final.nonzero().tolist() == [[int(edited.argmax())]]
    elif bool((edited > -math.inf).any()):
        expected = torch.softmax(log_weights_ref(edited, *given_).double() * math.log(2), -1)[0]
        torch.testing.assert_close(row.final, expected, rtol=1e-5, atol=1e-12)
        assert ((row.final > 0) == (expected > 0)).all()


def test_each_stage_says_what_it_did():
    logits = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]))
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.8, min_p=0.1)
    row = follow(logits, params, [0], [])
    assert [(s.name, s.value, s.before, s.left) for s in row.stages] == [
        ("temperature", 0.5, 5, 5),
        ("min_p", 0.1, 5, 3),  # 0.1 and 0.05, squared, are less than 0.4 squared times 0.1
        ("top_k", 3.0, 3, 3),
        ("top_p", 0.8, 3, 2),
    ]
    assert [row.dropped_by(token) for token in range(5)] == [None, None, "top_p", "min_p", "min_p"]
    torch.testing.assert_close(row.model, torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(row.final[:2], torch.tensor([16 / 25, 9 / 25]).double(), rtol=1e-5, atol=0)


def test_penalties_bans_and_masks_are_told_apart():
    logits = torch.zeros(40)
    params = SamplingParams(temperature=1, repetition_penalty=2.0, presence_penalty=1.0, allowed_token_ids=[1, 2, 3])
    row = follow(logits, params, [1], [2], mask=mask_of({2, 3})[:2])
    assert [(s.name, s.before, s.left, s.changed) for s in row.stages] == [
        ("penalties", 40, 40, 1),  # of logit 0, a repetition leaves 0
        ("bans", 40, 3, 0),
        ("grammar", 3, 2, 0),
    ]
    assert row.dropped_by(1) == "grammar" and row.dropped_by(0) == "bans"
    assert float(row.final[3] / row.final[2]) - math.e < 1e-6


def test_nothing_asked_and_nothing_left():
    row = follow(torch.zeros(8), SamplingParams(temperature=1), [1], [])
    assert row.stages == () and row.final is row.model
    row = follow(torch.zeros(8), SamplingParams(temperature=1), [1], [], mask=np.zeros(1, dtype=np.int32))
    assert row.stages[-1].left == 0 and not row.final.any()
