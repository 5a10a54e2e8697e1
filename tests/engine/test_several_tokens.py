"""Steps that bring several tokens of a sequence at once: every output is the one that single tokens would give."""

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import tiny_checkpoint
from support.examples import examples
from support.scheduling import add, has_unfinished, make_scheduler
from support.tiny_tokenizer import VOCAB_SIZE
from transformers import AutoTokenizer

from tritonllm.config.engine import EngineConfig
from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams
from tritonllm.engine.data.results import StepResult, TokenLogprobs
from tritonllm.engine.loop.engine import LLMEngine
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.schedule.speculation import Drafting
from tritonllm.engine.text.input_processor import InputProcessor

EOS, MAX_MODEL_LEN, NUM_BLOCKS = 0, 60, 40
LETTERS = "abcde "


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_checkpoint())


class Runner:
    """In the place of a model runner: a request's tokens are a function of its name and their place; a step brings one
    and some more, as many as `accepts` says of so many drafts."""

    lockstep = None

    def __init__(self, vocabulary, accepts):
        self.vocabulary, self.accepts = vocabulary, accepts
        self.lengths = {}  # the device alone knows them

    def launch(self, plan):
        sampled, scores = [], TokenLogprobs([], [], [])
        for item in plan.scheduled:
            request, tokens = item.request, []
            if item.samples:
                length = self.lengths.get(request, 0)
                tokens = [self.token(request, length + i) for i in range(1 + self.accepts(item.drafts))]
                self.lengths[request] = length + len(tokens)
            sampled.append(tokens)
            for token in tokens:
                scores.token_ids.append([token, (token + 1) % VOCAB_SIZE])
                scores.logprobs.append([-token / 7, -9.0])
                scores.ranks.append(token % 5 + 1)
        wanted = any(item.request.params.logprobs is not None for item in plan.scheduled)
        return Step(StepResult(sampled, scores if wanted else None, {}))

    def token(self, request, index):
        return self.vocabulary[zlib.crc32(f"{request.request_id} {index}".encode()) % len(self.vocabulary)]


class Step:
    def __init__(self, result):
        self.wait = lambda timeout, what: result


def run(tokenizer, params, *, drafts, ahead, seed):
    """The last outputs of a request for each of the parameters, and how many steps it took."""
    letters = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(c)[0]) for c in LETTERS]
    config = EngineConfig.from_kwargs(
        model="none", max_num_seqs=4, max_num_batched_tokens=16, block_size=4, async_scheduling=ahead
    )
    scheduler = Scheduler(config.scheduler, config.block_tokens, NUM_BLOCKS, MAX_MODEL_LEN, Drafting(drafts))
    luck = random.Random(seed)
    runner = Runner([*letters, *letters, *letters, EOS], lambda count: luck.randint(0, count))
    inputs = InputProcessor(tokenizer, VOCAB_SIZE, MAX_MODEL_LEN, frozenset({EOS}), 0)
    engine = LLMEngine(config, runner, scheduler, inputs)
    for number, p in enumerate(params):
        engine.add_request(str(number), list(range(3, 10 + number)), p)
    last, seen = {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            (completion,) = output.outputs
            last[output.request_id] = completion
            text, ids = seen.get(output.request_id, ("", []))
            seen[output.request_id] = text + completion.text, [*ids, *completion.token_ids]
    assert scheduler.pool.num_free == NUM_BLOCKS
    outputs = []
    for name, p in enumerate(params):
        completion = last[str(name)]
        delta = p.output_kind is RequestOutputKind.DELTA
        text, ids = seen[str(name)] if delta else (completion.text, list(completion.token_ids))
        scores = None if delta or completion.logprobs is None else [dict(entries) for entries in completion.logprobs]
        outputs.append((text, ids, completion.finish_reason, completion.stop_reason, scores))
        assert completion.logprobs is None or delta or len(completion.logprobs) == len(ids)
    return outputs, engine.stats


INSIDE = {"begin": "<t>", "end": "c", "inside": True}
WISHES = st.fixed_dictionaries(
    {
        "stop": st.sampled_from([None, ["ab"], ["e"], ["a b", "dd"]]),
        "stop_after_thought": st.sampled_from([None, {"begin": "c", "end": "d"}, {"kind": "channels"}, INSIDE]),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.integers(0, 6),
        "max_tokens": st.integers(6, 40),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([None, [EOS], [EOS, 68]]),
        "logprobs": st.sampled_from([None, 0, 1]),
        "output_kind": st.sampled_from(list(RequestOutputKind)),
    }
)


@settings(max_examples=examples(60))
@given(
    wishes=st.lists(WISHES, min_size=1, max_size=6),
    drafts=st.integers(1, 5),
    ahead=st.booleans(),
    seed=st.integers(0, 99),
)
def test_outputs_are_those_of_single_tokens(tokenizer, wishes, drafts, ahead, seed):
    params = [SamplingParams(**wish) for wish in wishes]
    expected, plain = run(tokenizer, params, drafts=0, ahead=False, seed=0)
    found, stats = run(tokenizer, params, drafts=drafts, ahead=ahead, seed=seed)
    assert found == expected
    assert stats.generated_tokens == plain.generated_tokens == sum(len(ids) for _, ids, *_ in expected)


def test_accepted_drafts_save_steps(tokenizer):
    params = [SamplingParams(max_tokens=40, ignore_eos=True)] * 3
    (_, plain), (_, quick) = (run(tokenizer, params, drafts=n, ahead=True, seed=1) for n in (0, 3))
    assert quick.steps < 0.6 * plain.steps


@pytest.mark.parametrize(
    ("tokens", "params", "output", "reason", "stop_reason"),
    [
        ([5, 2, 5], {}, [5, 2], "stop", None),
        ([5, 2, 3], {"stop_token_ids": [3], "ignore_eos": True}, [5, 2, 3], "stop", 3),
        ([3, 2, 5], {"stop_token_ids": [3]}, [3], "stop", 3),
        ([2, 2, 2], {"min_tokens": 3}, [2, 2], "stop", None),
        ([5, 5, 2], {"max_tokens": 3}, [5, 5], "length", None),
        ([5, 2, 5], {"max_tokens": 3}, [5, 2], "stop", None),
    ],
)
def test_the_first_ending_counts(tokens, params, output, reason, stop_reason):
    """Of the tokens that come behind a first one, 7."""
    scheduler = make_scheduler(drafts=2)
    most = params.pop("max_tokens", 9)
    request = add(scheduler, "r", 4, 4 + most, eos=[2], max_tokens=most, **params)
    scheduler.update(scheduler.schedule(), [[7]])
    plan = scheduler.schedule()
    if most == 3:
        tokens = tokens[: 1 + plan.scheduled[0].drafts]
    assert scheduler.update(plan, [tokens]) == [(request, output)]
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == ([7, *output], reason, stop_reason)
    assert (has_unfinished(scheduler), scheduler.pool.num_free) == (False, 100)


def test_blocks_are_there_for_all_drafts_of_two_steps():
    scheduler = make_scheduler(drafts=3)
    request = add(scheduler, "r", 3, 100)
    scheduler.update(scheduler.schedule(), [[7]])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [(i.start, i.num_tokens, i.drafts, i.pending) for i in (*first.scheduled, *second.scheduled)] == [
        (3, 4, 3, False),
        (4, 4, 3, True),
    ]
    assert first.segments.verify.tokens == 4 and first.segments.decode.tokens == 0
    assert len(request.block_ids) == 3  # up to position 3 + 4 + 3
    scheduler.update(first, [[7] * 4])
    third = scheduler.schedule().scheduled[0]
    assert (third.start, request.num_computed_tokens, request.num_possible_tokens) == (8, 9, 6)
    scheduler.update(second, [[7]])
    assert (request.num_tokens, request.num_computed_tokens, request.num_possible_tokens) == (9, 9, 3)


def test_drafts_leave_a_token_for_everyone_and_end_with_the_length():
    scheduler = make_scheduler(drafts=5, tokens=8, seats=3)
    for name, most in (("a", 100), ("b", 100), ("c", 6)):
        add(scheduler, name, 2, most)
    plan = scheduler.schedule()
    scheduler.update(plan, [[7]] * 3)
    assert [(i.num_tokens, i.drafts) for i in scheduler.schedule().scheduled] == [(1, 0), (1, 0), (6, 5)]
    scheduler = make_scheduler(drafts=5)
    request = add(scheduler, "c", 2, 6)
    scheduler.update(scheduler.schedule(), [[7]])
    plan = scheduler.schedule()
    assert plan.scheduled[0].drafts == 2  # tokens 4 and 5; the sixth is never computed
    scheduler.update(plan, [[7, 7, 7]])
    assert (request.finish_reason, request.num_tokens) == ("length", 6)


@pytest.mark.parametrize("sampled", [[[]], [[1] * 4], [[1], [1]]])
def test_update_refuses_more_tokens_than_drafts_and_one(sampled):
    scheduler = make_scheduler(drafts=2)
    request = add(scheduler, "a", 3)
    scheduler.update(scheduler.schedule(), [[7]])
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="sampled must have tokens"):
        scheduler.update(plan, sampled)
    assert (request.num_pending_tokens, request.output_token_ids) == (1, [7])
