"""Functions of the user's that change logits: of one request, and of whole steps."""

import pytest
import torch
from support.engines import greedy, tiny_llm, token_ids
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import LLM, EngineArgs, SamplingParams
from tritonllm.engine.step.processors import load_maker

PROMPTS = [random_tokens(n, VOCAB_SIZE, seed=n) for n in (1, 3, 17, 30)]
AHEAD = pytest.mark.parametrize("ahead", [False, True])


def never_twice(output, logits):
    """No token of the output again: it has to know all of them."""
    logits[output] = -torch.inf
    return logits


class NeverTwice:
    """The same on the device, for requests that ask."""

    def __init__(self, seats, vocab, device):
        self.seen = torch.zeros(seats, vocab, dtype=torch.bool, device=device)

    def admit(self, seat, params, prompt, output):
        self.seen[seat] = False
        self.seen[seat, output] = True
        return bool((params.extra_args or {}).get("never_twice"))

    def apply(self, logits, seats, steps):
        assert torch.equal(self.seen[seats].sum(1)[seats >= 0], steps[seats >= 0])
        logits.masked_fill_(self.seen[seats] & (seats >= 0)[:, None], -torch.inf)

    def count(self, seats, tokens):
        mine = seats >= 0
        self.seen[seats[mine], tokens[mine]] = True


class Fails:
    """In the call that a request names."""

    def __init__(self, seats, vocab, device):
        self.where = [""] * seats

    def admit(self, seat, params, prompt, output):
        self.where[seat] = (params.extra_args or {}).get("fails", "")
        self._maybe([seat], "admit")
        return bool(self.where[seat])

    def _maybe(self, seats, call):
        if any(self.where[seat] == call for seat in seats if seat >= 0):
            raise RuntimeError(f"in {call}")

    def apply(self, logits, seats, steps):
        self._maybe(seats.tolist(), "apply")

    def count(self, seats, tokens):
        self._maybe(seats.tolist(), "count")


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


@AHEAD
def test_a_function_sees_the_tokens_before(ahead):
    llm, seen = tiny_llm(async_scheduling=ahead), []

    def watch(prompt, output, logits):
        assert prompt == PROMPTS[1] and logits.shape == (VOCAB_SIZE,)
        seen.append(list(output))
        return logits + 0.0

    params = [greedy(), greedy(logits_processors=[watch]), greedy(logits_processors=[never_twice]), greedy()]
    plain, watched, fresh, last = token_ids(generate(llm, [PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[3]], params))
    assert seen == [watched[:n] for n in range(12)]
    assert len(set(fresh)) == 12
    alone = [token_ids(generate(llm, [prompt], greedy()))[0] for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3])]
    assert [plain, watched, last] == alone  # neighbours, and one that is only watched, are as without it


@AHEAD
def test_functions_come_one_after_the_other_and_before_penalties(ahead):
    llm = tiny_llm(async_scheduling=ahead)

    def only(low, high):
        def keep(output, logits):
            kept = torch.full_like(logits, -torch.inf)
            kept[low:high] = 1.0 + logits[low:high].clamp(-0.5, 0.5)
            return kept

        return keep

    both = greedy(10, logits_processors=[only(10, 30), only(20, 21)])
    assert token_ids(generate(llm, [PROMPTS[1]], both)) == [[20] * 10]
    penalized = greedy(10, logits_processors=[only(20, 22)], presence_penalty=2.0)
    assert set(token_ids(generate(llm, [PROMPTS[1]], penalized))[0][:2]) == {20, 21}


@AHEAD
@pytest.mark.parametrize("bad", ["raises", "returns nothing", "wrong shape"])
def test_a_function_that_fails_ends_its_own_request(ahead, bad):
    llm = tiny_llm(async_scheduling=ahead)

    def fail(output, logits):
        if len(output) < 3:
            return logits
        if bad == "raises":
            raise KeyError("no such token")
        return None if bad == "returns nothing" else logits[:5]

    params = [greedy(), greedy(logits_processors=[fail], logprobs=1), greedy()]
    outputs = generate(llm, PROMPTS[:3], params)
    (found,), (before,) = (o.outputs for o in (outputs[1], *generate(llm, [PROMPTS[1]], greedy(3, logprobs=1))))
    assert found.finish_reason == "error" and len(found.token_ids) == 3
    assert (found.token_ids, found.text) == (before.token_ids, before.text)
    assert [list(entries) for entries in found.logprobs] == [list(entries) for entries in before.logprobs]
    assert found.cumulative_logprob == pytest.approx(before.cumulative_logprob, abs=1e-4)
    assert "a logits processor failed: " in outputs[1].error
    for index in (0, 2):
        assert outputs[index].error is None
        assert token_ids([outputs[index]]) == token_ids(generate(llm, [PROMPTS[index]], greedy()))
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks


@AHEAD
def test_logprobs_are_of_the_model(ahead):
    """Before any processor, as before any edit."""
    llm = tiny_llm(async_scheduling=ahead, logits_processors=[NeverTwice])
    outputs = generate(
        llm,
        [PROMPTS[2]] * 3,
        [
            greedy(1, logprobs=3),
            greedy(1, logprobs=3, logits_processors=[lambda output, logits: -logits]),
            greedy(1, logprobs=3, extra_args={"never_twice": True}),
        ],
    )
    tops = [
        sorted((e.rank, round(e.logprob, 4)) for e in o.outputs[0].logprobs[0].values() if e.rank <= 3) for o in outputs
    ]
    assert tops[0] == tops[1] == tops[2]


@AHEAD
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 8}, {"num_blocks": 16}, {"max_num_seqs": 2}])
def test_a_batch_processor_does_what_functions_do(ahead, settings):
    """Also when requests are preempted, come in chunks, or take another's seat."""
    llm = tiny_llm(async_scheduling=ahead, logits_processors=[NeverTwice], **settings)
    wish = {"extra_args": {"never_twice": True}}
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=14, ignore_eos=True, n=2, **wish)
    liked = {"logit_bias": {9: 100.0}}
    params = [greedy(20, **wish, **liked), greedy(20, **liked), sampled, greedy(20, **wish, repetition_penalty=1.5)]
    outputs = token_ids(generate(llm, PROMPTS, params))
    assert [len(set(tokens)) == len(tokens) for tokens in outputs] == [True, False, True, True, True]
    plain = tiny_llm(async_scheduling=ahead, **settings)
    for p in params:
        if p.extra_args:
            p.extra_args, p.logits_processors = None, [never_twice]
    assert token_ids(generate(plain, PROMPTS, params)) == outputs


@AHEAD
@pytest.mark.parametrize("call", ["admit", "apply", "count"])
def test_a_batch_processor_that_fails_ends_those_that_asked(ahead, call):
    llm = tiny_llm(async_scheduling=ahead, logits_processors=[Fails])
    outputs = generate(llm, PROMPTS[:3], [greedy(), greedy(extra_args={"fails": call}), greedy()])
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].error == f"a logits processor failed: RuntimeError: in {call}"
    for index in (0, 2):
        assert token_ids([outputs[index]]) == token_ids(generate(llm, [PROMPTS[index]], greedy()))
    again = generate(llm, PROMPTS[:3], greedy())
    assert [o.error for o in again] == [None] * 3


def test_what_is_refused():
    with pytest.raises(ValueError, match="extra_args are for logits processors"):
        generate(tiny_llm(), PROMPTS[:1], greedy(extra_args={"a": 1}))
    for bad in ("a:b", [3], ["nowhere"]):
        with pytest.raises(ValueError, match="logits_processors must be a list"):
            tiny_llm(logits_processors=bad)
    for bad in ("no_such_module:Class", "math:NoSuch"):
        with pytest.raises(ValueError, match=f"logits_processors: '{bad}' cannot be imported"):
            tiny_llm(logits_processors=[bad])
    assert load_maker("tritonllm.offline.llm:LLM") is LLM
    config = EngineArgs(model="m", logits_processors=[NeverTwice]).create_engine_config()
    assert list(config.logits_processors) == [NeverTwice]


def test_clones_share_functions():
    params = SamplingParams(logits_processors=[never_twice], extra_args={"a": [1]})
    copy = params.clone()
    assert copy.logits_processors == [never_twice] and copy.logits_processors is not params.logits_processors
    assert copy.extra_args == params.extra_args and copy.extra_args["a"] is not params.extra_args["a"]
