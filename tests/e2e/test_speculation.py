"""Speculation changes how many steps it takes, and nothing else: whole requests, with drafts and without."""

import dataclasses
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import greedy, similar_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.examples import examples
from support.tiny_configs import ALL_FAMILIES, WINDOWED_WITHOUT_FAMILY
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM

from bench.known_texts import drafter_of
from tritonllm import LLM, SamplingParams
from tritonllm.config.engine import SpeculativeConfig
from tritonllm.demo import model_path
from tritonllm.engine.drafts.drafters import NgramDrafter

TREES = [  # wide, deep, and both
    [(0,), (1,), (2,)],
    [(0,), (1,), (0, 0), (0, 0, 0)],
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 0, 0)],
]
FAMILIES = ["llama", "gemma2", "gpt2", "qwen3_moe", "mpt", "gpt_oss"]
REPEATED = [3, 4, 5, 6, 7, 8] * 3  # which an n-gram drafter goes on with
PROMPTS = [REPEATED, [9], list(range(3, 40)), [5, 5, 5, 5], random_tokens(30, VOCAB_SIZE, seed=1), [7, 8, 9] * 7]


def drafting_llm(checkpoint=None, *, speculative_config, **kwargs):
    """An engine that verifies drafts also where it does not pay: a tiny model's text is not one that repeats itself.
    Its steps are not captured, for a captured step keeps the drafter that it was captured with."""
    config = dataclasses.replace(SpeculativeConfig.of(speculative_config), adaptive=False)
    return tiny_llm(checkpoint, speculative_config=config, enforce_eager=True, **kwargs)


class Knowing:
    """In the place of a drafter: knows the texts that come, by their first tokens, and errs now and then."""

    def __init__(self, texts, errs):
        self.texts, self.errs, self.luck = texts, errs, random.Random(1)

    def propose(self, step):
        history, seats, ends, counts, ids, drafts = step[:6]
        drafts.fill_(-1)
        for row, (seat, end, count) in enumerate(zip(seats.tolist(), ends.tolist(), counts.tolist(), strict=True)):
            known = tuple(history[seat, : end + 1].tolist()) if seat >= 0 else ()
            text = next((text for text in self.texts if known and text[: end + 1] == known), None)
            for place in range(count if text is not None else 0):
                if end + 1 + place < len(text):
                    right = self.luck.random() >= self.errs
                    drafts[row, place] = text[end + 1 + place] if right else self.luck.randrange(VOCAB_SIZE)
        ids[:, 1:] = drafts.clamp_min(0)


def know(llm, prompts, outputs, errs=0.3):
    """Let the engine's drafts be what it once generated, with errors."""
    texts = [(*prompt, *ids) for prompt, ids in zip(prompts, token_ids(outputs), strict=True)]
    llm.engine._runner.drafts.drafter = Knowing(texts, errs)


def prompts_of(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def assert_same(found, expected):
    """Tokens, texts and ends are equal, and scores as equal as rounding lets them be."""
    for mine, other in zip(found, expected, strict=True):
        (a,), (b,) = mine.outputs, other.outputs
        assert list(a.token_ids) == list(b.token_ids)
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
        assert (a.logprobs is None) == (b.logprobs is None)
        for entries, others in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert {token: e.logprob for token, e in entries.items()} == pytest.approx(
                {token: e.logprob for token, e in others.items()}, abs=1e-3
            )


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(family, ahead):
    assert family in ALL_FAMILIES
    folder = tiny_checkpoint(family)
    expected = tiny_llm(folder).generate(prompts_of(PROMPTS), greedy(24))
    llm = drafting_llm(folder, speculative_config="ngram:3", async_scheduling=ahead)
    assert_same(llm.generate(prompts_of(PROMPTS), greedy(24)), expected)
    know(llm, PROMPTS, expected)
    steps = llm.engine.stats.steps
    assert_same(llm.generate(prompts_of(PROMPTS), greedy(24)), expected)
    stats = llm.engine.stats
    assert stats.steps - steps < 20  # 24 and a step of prompts without
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 20
    assert (stats.num_free_blocks, stats.compilations_after_ready) == (stats.num_blocks, 0)


@pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning")
def test_a_model_of_transformers(tmp_path):
    """Whose attention reads a window, and which knows of no drafts."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "local_attention": 18, "max_position_embeddings": 256, "pad_token_id": 0}
    config = AutoConfig.for_model(WINDOWED_WITHOUT_FAMILY, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    prompts = [[*range(3, 21)], [9], [5, 6] * 4]
    options = {"max_model_len": 128, "skip_tokenizer_init": True}
    expected = tiny_llm(tmp_path, **options).generate(prompts_of(prompts), greedy(20))
    llm = drafting_llm(tmp_path, **options, speculative_config="ngram:3")
    know(llm, prompts, expected, errs=0.0)  # what it errs with are tokens of a larger vocabulary
    assert_same(llm.generate(prompts_of(prompts), greedy(20)), expected)
    assert llm.engine.stats.num_accepted_tokens > 15


KINDS = st.sampled_from(
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 6, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.7, "seed": 7, "min_p": 0.1},
    ]
)
WISHES = st.fixed_dictionaries(
    {},
    optional={
        "frequency_penalty": st.just(0.8),
        "repetition_penalty": st.just(1.3),
        "logprobs": st.sampled_from([0, 2, -1]),
        "prompt_logprobs": st.just(1),
        "min_tokens": st.sampled_from([3, 9]),
        "stop": st.sampled_from(["e", "the", [" a", "o"]]),
        "stop_token_ids": st.just(list(range(0, VOCAB_SIZE, 9))),
        "logit_bias": st.just({7: 2.0, 8: 3.0}),
        "bad_words": st.just(["e", "on"]),
        "allowed_token_ids": st.just(list(range(3, 60))),
        "ignore_eos": st.booleans(),
        "n": st.just(1),
    },
)


@settings(max_examples=examples(25))
@given(
    method=st.sampled_from(["ngram", "suffix", "draft_model", "tree"]),
    kinds=st.lists(st.tuples(KINDS, WISHES, st.integers(9, 30)), min_size=1, max_size=6),
    drafts=st.integers(1, 5),
    tree=st.sampled_from(TREES),
    ahead=st.booleans(),
    errs=st.sampled_from([0.0, 0.2, 0.6]),
    engine=st.sampled_from(
        [{}, {"num_blocks": 22}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": False, "max_num_seqs": 3}]
    ),
)
def test_options_together(plain_llm, method, kinds, drafts, tree, ahead, errs, engine):
    """Every request gets the tokens, text, scores and end of plain decoding, whatever it and its neighbours want."""
    params = [SamplingParams(**kind, **wish, max_tokens=most) for kind, wish, most in kinds]
    prompts = PROMPTS[: len(params)]
    expected = plain_llm.generate(prompts_of(prompts), params, use_tqdm=False)
    config = {"method": method, "num_speculative_tokens": drafts}
    if method == "tree":
        config = {"method": "draft_model", "num_speculative_tokens": len(tree), "speculative_token_tree": tree}
    if method in ("draft_model", "tree"):
        config["model"] = str(similar_checkpoint(noise=0.01 if errs == 0.0 else errs / 8))
    llm = drafting_llm(speculative_config=config, async_scheduling=ahead, **engine)
    if method == "ngram":
        know(llm, prompts, expected, errs)
    elif method == "suffix":
        llm.generate(prompts_of(prompts), params, use_tqdm=False)  # what it then remembers
    found = llm.generate(prompts_of(prompts), params, use_tqdm=False)
    assert_same(found, expected)
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.generated_tokens == sum(map(len, token_ids(expected))) * (2 if method == "suffix" else 1)


@pytest.fixture(scope="module")
def plain_llm():
    return tiny_llm()


def test_grammars_functions_and_thoughts_go_a_token_at_a_time(plain_llm):
    """Beside requests with drafts, in the same steps."""
    half = lambda output, logits: logits * (0.5 if len(output) % 2 else 2.0)  # noqa: E731
    params = [greedy(20), greedy(20, logits_processors=[half]), greedy(20, logprobs=-1)]
    prompts = PROMPTS[:3]
    expected = plain_llm.generate(prompts_of(prompts), params)
    llm = drafting_llm(speculative_config="ngram:3")
    know(llm, prompts, expected, errs=0.0)
    found = llm.generate(prompts_of(prompts), params)
    assert_same(found, expected)
    drafted = [output.metrics.num_draft_tokens for output in found]
    assert drafted[0] > 0 and drafted[1:] == [0, 0]
    assert found[0].metrics.num_accepted_tokens == drafted[0] == llm.engine.stats.num_accepted_tokens


class Counting:
    """Bans every token that its request has got: each of them counts, those of drafts included, and no other."""

    def __init__(self, seats, vocab, device):
        self.seen = torch.zeros(seats, vocab, dtype=torch.bool, device=device)

    def admit(self, seat, params, prompt, output):
        self.seen[seat] = False
        self.seen[seat, output] = True
        return bool(params.extra_args)

    def apply(self, logits, seats, steps):
        rows = (seats >= 0).nonzero()[:, 0]
        assert torch.equal(self.seen[seats[rows]].sum(1), steps[rows])
        logits[rows] = logits[rows].masked_fill(self.seen[seats[rows]], -math.inf)

    def count(self, seats, tokens):
        rows = (seats >= 0).nonzero()[:, 0]
        self.seen[seats[rows], tokens[rows]] = True


@pytest.mark.parametrize("ahead", [False, True])
def test_processors_of_whole_steps_see_accepted_drafts(ahead):
    params = [greedy(30, extra_args={"once": True}), greedy(30), greedy(30, extra_args={"once": True})]
    expected = tiny_llm(logits_processors=[Counting]).generate(prompts_of(PROMPTS[:3]), params)
    llm = drafting_llm(logits_processors=[Counting], speculative_config="ngram:4", async_scheduling=ahead)
    know(llm, PROMPTS[:3], expected, errs=0.2)
    assert_same(llm.generate(prompts_of(PROMPTS[:3]), params), expected)
    assert llm.engine.stats.num_accepted_tokens > 30


def test_stops_inside_an_accepted_draft_end_where_they_should(plain_llm):
    long = plain_llm.generate(prompts_of([REPEATED]), greedy(24))
    ids = token_ids(long)[0]
    stop = max(ids, key=ids.index)  # the one that comes first so late
    first = ids.index(stop)
    assert first > 8
    wishes = [
        {"stop_token_ids": [stop]},
        {"stop_token_ids": [stop], "min_tokens": first + 2},
        {"max_tokens": first + 2},
    ]
    for wish in wishes:
        params = greedy(**{"max_tokens": 24, **wish})
        llm = drafting_llm(speculative_config="ngram:5")
        know(llm, [REPEATED], long, errs=0.0)
        expected = plain_llm.generate(prompts_of([REPEATED]), params)
        assert_same(llm.generate(prompts_of([REPEATED]), params), expected)
        assert llm.engine.stats.num_accepted_tokens >= 4
        assert llm.engine.stats.num_free_blocks == llm.engine.stats.num_blocks


def test_a_request_up_to_the_models_length(plain_llm):
    """Where the last drafts have no place any more."""
    for length in (40, 41, 43):
        expected = tiny_llm(max_model_len=length).generate(prompts_of(PROMPTS), greedy(None))
        llm = drafting_llm(max_model_len=length, speculative_config="ngram:5", async_scheduling=True)
        know(llm, PROMPTS, expected, errs=0.1)
        assert_same(llm.generate(prompts_of(PROMPTS), greedy(None)), expected)


def test_sampled_tokens_have_the_models_distribution():
    """Chi-square of the first two tokens of requests without a seed, whose drafts are right by luck."""
    vocab, count = 8, 2000
    allowed = list(range(3, 3 + vocab))
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, allowed_token_ids=allowed)
    llm = drafting_llm(speculative_config="ngram:3", max_num_seqs=64, max_num_batched_tokens=512, num_blocks=512)

    class Guessing:
        def propose(self, step):
            guesses = torch.randint(3, 3 + vocab, step.drafts.shape, dtype=torch.int32)
            step.drafts.copy_(guesses)
            step.drafts[torch.arange(guesses.shape[1]) >= step.counts.cpu()[:, None]] = -1
            step.ids[:, 1:] = step.drafts.clamp_min(0)

    llm.engine._runner.drafts.drafter = Guessing()
    outputs = llm.generate(prompts_of([[5, 6, 7]] * count), params, use_tqdm=False)
    assert llm.engine.stats.num_accepted_tokens > 100
    probabilities = _distribution(llm, [5, 6, 7], allowed)
    found = Counter(tuple(ids[:2]) for ids in token_ids(outputs))
    pairs = {}
    for first in allowed:
        following = _distribution(llm, [5, 6, 7, first], allowed)
        pairs |= {(first, second): probabilities[first] * following[second] for second in allowed}
    statistic = sum((found[pair] - count * p) ** 2 / (count * p) for pair, p in pairs.items())
    assert statistic < 103  # 63 degrees of freedom: once in a thousand


def _distribution(llm, prompt, allowed):
    (output,) = llm.generate(prompts_of([prompt]), SamplingParams(max_tokens=1, logprobs=-1), use_tqdm=False)
    (entries,) = output.outputs[0].logprobs
    weights = {token: math.exp(entries[token].logprob) for token in allowed}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_a_drafter_of_known_acceptance(plain_llm, acceptance):
    expected = plain_llm.generate(prompts_of(PROMPTS), greedy(40))
    llm = drafting_llm(speculative_config={"method": "bench.known_texts:make", "num_speculative_tokens": 4})
    texts = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, token_ids(expected), strict=True)]
    drafter_of(llm).know(texts, acceptance)
    assert_same(llm.generate(prompts_of(PROMPTS), greedy(40)), expected)
    stats = llm.engine.stats
    # each sequence of a step brings its first drafts up to one that errs, and those to the end of its text
    each = stats.num_accepted_tokens / stats.num_drafts
    assert each == pytest.approx({0.0: 0, 0.5: 0.94, 1.0: 3.9}[acceptance], abs=0.2)


def test_past_outputs_are_found_again(plain_llm):
    """The same prompt again: another request's output is what follows. Also behind a preemption, and in few blocks."""
    expected = plain_llm.generate(prompts_of(PROMPTS), greedy(40))
    config = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_spec_factor": 2.0}
    for engine in ({"max_num_seqs": 1}, {"max_num_seqs": 8, "num_blocks": 40}):
        llm = drafting_llm(speculative_config=config, **engine)
        accepted = []
        for _ in range(3):
            assert_same(llm.generate(prompts_of(PROMPTS), greedy(40)), expected)
            accepted.append(llm.engine.stats.num_accepted_tokens)
        assert accepted[2] - accepted[1] > 6 * 40 / 2 > accepted[0]


def test_the_demo_model_copies():
    """The real drafter, on a text that says its beginning again."""
    story = "There was a fox named Ben. Ben the fox had a red hat. There was a fox named Ben. Ben the fox had"
    model = str(model_path())
    config = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    plain, llm = LLM(model, dtype="float32"), LLM(model, dtype="float32", speculative_config=config)
    expected = plain.generate([story], greedy(60))
    assert isinstance(llm.engine._runner.drafts.drafter, NgramDrafter)
    found = llm.generate([story], greedy(60))
    assert_same(found, expected)
    assert llm.engine.stats.num_accepted_tokens > 0 and llm.engine.stats.steps < plain.engine.stats.steps
