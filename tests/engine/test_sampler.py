import itertools

import pytest
import torch

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.edits import MAX_ENTRIES, check_edits
from tritonllm.engine.data.inputs import upload, upload_step
from tritonllm.engine.data.plan import ScheduledRequest, StepPlan
from tritonllm.engine.data.request import Request
from tritonllm.engine.step.builder import StepBuilder
from tritonllm.engine.step.device_seats import DeviceSeats
from tritonllm.engine.step.sampler import Sampler
from tritonllm.kernels.sampling.edits import edit_logits_ref
from tritonllm.layers.segments import Segments, decodes

VOCAB = 12
CPU = torch.device("cpu")
ADMISSIONS = itertools.count()


def request(prompt=(1, 2), output=(), bad_words=(), seed=0, **params):
    made = Request(
        request_id="r",
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),
        max_total_tokens=100,
        eos_token_ids=frozenset([0]),
        seed=seed,
        bad_words=bad_words,
        admission=next(ADMISSIONS),
    )
    made.output_token_ids.extend(output)
    return made


def step_of(requests, builder=None):
    """A step in which each of them decodes."""
    for seat, r in enumerate(requests):
        r.seat, r.block_ids = seat, [0] * r.num_tokens
    items = tuple(ScheduledRequest(r, r.num_tokens - 1, 1, samples=True) for r in requests)
    builder = builder or StepBuilder(len(requests), 100, 1)
    return builder.build(StepPlan(items, (), Segments(decodes(len(items)))))


class Engine:
    """A sampler, and what builds the steps for it."""

    def __init__(self, seats):
        self.builder, self.seats = StepBuilder(seats, 100, 1), DeviceSeats(seats, 1, CPU)
        self.sampler = Sampler(self.seats.drawn, VOCAB)


def sample_from(logits, requests, engine=None):
    """(tokens, log-probabilities) of one step, as lists."""
    engine = engine or Engine(len(requests))
    step = step_of(requests, engine.builder)
    batch = upload_step(step, len(requests), 1, CPU)
    if step.parameters is not None:
        engine.seats.tell(step.parameters)
    engine.seats.advance(batch)
    tokens, scores, *_ = engine.sampler.sample(logits.clone(), batch.sampling(len(requests)), step)  # which edits them
    return tokens.tolist(), None if scores is None else [t.tolist() for t in scores]


def edited(made):
    """The request's row after the edits, beside an untouched neighbour that must stay as it was."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    step = step_of([made, request()])
    if step.edited is None:
        return logits[0], logits[0]
    state = Sampler(torch.zeros(2, dtype=torch.int64), VOCAB)._told(step.new_edits)
    seats, steps = upload([step.edited, step.inputs.starts.astype("int64") + 1 + step.parameters.steps], CPU)
    after = edit_logits_ref(logits, state, seats, steps)
    assert torch.equal(after[1], logits[1])
    return after[0], logits[0]


def test_plain_requests_are_untouched():
    after, before = edited(request(output=[3, 3]))
    assert torch.equal(after, before)


def test_logit_bias():
    after, before = edited(request(logit_bias={4: 2.5, 7: -100.0}))
    expected = before.clone()
    expected[4] += 2.5
    expected[7] -= 100.0
    assert torch.equal(after, expected)


def test_allowed_token_ids():
    after, before = edited(request(allowed_token_ids=[3, 5]))
    assert torch.equal(after[[3, 5]], before[[3, 5]])
    assert torch.isinf(after).sum() == VOCAB - 2


@pytest.mark.parametrize(("length", "banned"), [(0, True), (1, True), (2, False)])
def test_min_tokens_bans_what_would_end_the_output(length, banned):
    after, before = edited(request(output=[5] * length, min_tokens=2, stop_token_ids=[6]))
    assert torch.isinf(after[[0, 6]]).all() == banned
    others = [i for i in range(VOCAB) if i not in (0, 6)]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize(("output", "banned"), [([], [9]), ([3], [9]), ([3, 4], [9, 5]), ([4, 4], [9])])
def test_bad_words_ban_the_token_that_would_complete_them(output, banned):
    after, _ = edited(request(output=output, bad_words=((3, 4, 5), (9,))))
    assert torch.isinf(after).nonzero().flatten().tolist() == sorted(banned)


def test_frequency_and_presence_penalties_count_the_output_only():
    after, before = edited(request(prompt=[1, 8], output=[4, 4, 6], frequency_penalty=0.5, presence_penalty=0.25))
    expected = before.clone()
    expected[4] -= 2 * 0.5 + 0.25
    expected[6] -= 0.5 + 0.25
    assert torch.allclose(after, expected, atol=1e-6)


def test_repetition_penalty_counts_prompt_and_output():
    after, before = edited(request(prompt=[1, 2], output=[4], repetition_penalty=2.0))
    expected = before.clone()
    for token in (1, 2, 4):
        expected[token] = before[token] / 2 if before[token] > 0 else before[token] * 2
    assert torch.equal(after, expected)


def test_logprobs_are_of_the_distribution_before_edits():
    logits = torch.randn(3, VOCAB)
    requests = [request(temperature=0, logprobs=2, logit_bias={5: 100.0}), request(temperature=0), request(logprobs=0)]
    expected = torch.log_softmax(logits.clone(), -1)
    tokens, (ids, logprobs, _) = sample_from(logits, requests)
    assert tokens[0] == 5
    assert ids[0][0] == 5
    assert logprobs[0][0] == pytest.approx(float(expected[0, 5]), abs=1e-5)
    assert ids[0][1:] == expected[0].topk(2).indices.tolist()


def test_nobody_asks_for_logprobs():
    assert sample_from(torch.randn(1, VOCAB), [request()])[1] is None


@pytest.mark.parametrize(
    ("made", "plain"),
    [
        (request(temperature=0.3, top_k=5, top_p=0.9, min_p=0.1, seed=3), True),
        (request(output=[5, 5], min_tokens=2), True),
        (request(output=[5], min_tokens=2), False),
        (request(logprobs=0), False),
        (request(logit_bias={1: 1.0}), False),
        (request(allowed_token_ids=[1]), False),
        (request(bad_words=((3,),)), False),
        (request(repetition_penalty=1.5), False),
        (request(presence_penalty=1.5), False),
        (request(frequency_penalty=1.5), False),
    ],
)
def test_what_the_captured_sampler_can_serve(made, plain):
    """Nothing that edits the logits or reports them; one such request is enough."""
    assert step_of([made]).plain == plain
    assert step_of([request(), made, request()]).plain == plain


def test_what_the_device_counts_is_what_the_request_has():
    """Greedy with penalties, step by step in one seat, against a seat that is written anew before every step."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    params = {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.1, "repetition_penalty": 1.1}
    words = ((3, 4), (5, 5, 5), (2,))
    ahead, anew = (request(bad_words=words, **params) for _ in range(2))
    engine = Engine(1)
    for _ in range(30):
        (token,), _ = sample_from(logits, [ahead], engine)
        (expected,), _ = sample_from(logits, [anew])
        assert token == expected
        ahead.output_token_ids.append(token)
        anew.output_token_ids.append(token)
    assert len(set(ahead.output_token_ids)) > VOCAB // 2


def test_a_seat_is_written_anew_after_a_preemption():
    engine, made = Engine(1), request(frequency_penalty=2.0, temperature=0)
    logits = torch.zeros(1, VOCAB)
    sample_from(logits, [made], engine)  # token 0, which the host never hears of
    made.admission = next(ADMISSIONS)
    made.output_token_ids += [1, 2]
    assert sample_from(logits, [made], engine)[0] == [0]
    made.output_token_ids += [0]
    assert sample_from(logits, [made], engine)[0] == [3]


def test_edits_that_do_not_fit_are_refused():
    check_edits(request(logit_bias=dict.fromkeys(range(MAX_ENTRIES - 1), 1.0), min_tokens=2))
    with pytest.raises(ValueError, match=f"name {MAX_ENTRIES + 1} tokens, more than {MAX_ENTRIES}"):
        check_edits(request(logit_bias=dict.fromkeys(range(MAX_ENTRIES), 1.0), min_tokens=2))
    check_edits(request(bad_words=(tuple(range(17)),)))
    with pytest.raises(ValueError, match="bad_words has one of 18 tokens"):
        check_edits(request(bad_words=(tuple(range(18)),)))


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"allowed_token_ids": [0], "min_tokens": 1}, "min_tokens=1"),
        ({"allowed_token_ids": [0, 6], "min_tokens": 2, "stop_token_ids": [6]}, "min_tokens=2"),
        ({"allowed_token_ids": [3, 5], "bad_words": ((3,), (5,))}, "bad_words: allow"),
        ({"allowed_token_ids": [0, 5], "min_tokens": 1, "bad_words": ((5,),)}, "min_tokens=1 .* and bad_words"),
    ],
)
def test_something_must_be_allowed(params, names):
    with pytest.raises(ValueError, match=f"allowed_token_ids are all banned by {names}"):
        check_edits(request(**params))


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [0, 5], "min_tokens": 1},
        {"allowed_token_ids": [0]},
        {"allowed_token_ids": [3], "bad_words": ((5, 3), (4,))},  # banned after 5 only, which cannot come
        {"allowed_token_ids": [3], "logit_bias": {3: -100.0}},  # a bias is no ban
    ],
)
def test_enough_is_allowed(params):
    check_edits(request(**params))


def test_a_seed_gives_the_same_token_in_any_batch():
    logits = torch.randn(1, VOCAB)
    (alone,), _ = sample_from(logits.clone(), [request(seed=7)])
    crowd = [request(seed=s) for s in (1, 2, 7, 4)]
    assert sample_from(logits.repeat(4, 1), crowd)[0][2] == alone


def test_seeds_and_steps_differ():
    logits = torch.zeros(64, VOCAB)
    by_seed, _ = sample_from(logits.clone(), [request(seed=s) for s in range(64)])
    by_step, _ = sample_from(logits, [request(output=[1] * s) for s in range(64)])
    assert len(set(by_seed)) > VOCAB // 2
    assert len(set(by_step)) > VOCAB // 2
