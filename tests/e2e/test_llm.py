"""Whole requests through the offline interface, on the CPU path."""

import dataclasses
import math
from array import array

import numpy as np
import pytest
import torch
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import random_tokens, reference_logits
from support.tiny_tokenizer import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from tritonllm import BeamSearchParams, RepetitionDetectionParams, SamplingParams
from tritonllm.engine.data.request import PACKED
from tritonllm.engine.text.input_processor import TokenizedPrompt
from tritonllm.events import StepPlanned

PROMPTS = [random_tokens(n, VOCAB_SIZE, seed=n) for n in (1, 3, 17, 40, 5, 64, 9, 30)]


@pytest.fixture(scope="module")
def llm():
    return tiny_llm()


@pytest.fixture(scope="module")
def reference():
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(), attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def reference_greedy(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def everything_is_free(llm):
    stats = llm.engine.stats
    return stats.num_free_blocks == stats.num_blocks and not llm.engine.has_unfinished_requests()


KINDS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, max_tokens=20, stop=["e", "a"]),
    SamplingParams(temperature=1.0, seed=3, max_tokens=20, stop_token_ids=list(range(0, VOCAB_SIZE, 8))),
    SamplingParams(temperature=1.0, seed=4, max_tokens=20, frequency_penalty=1.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=5, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=6, max_tokens=20, min_tokens=10, logit_bias={0: 5.0}),
    SamplingParams(temperature=1.0, seed=7, max_tokens=20, bad_words=["th", "e"], n=2),
]


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 8}, {"num_blocks": 30}])
def test_planning_ahead_changes_nothing(settings):
    """Of any kind of request: those that stop early, wait for the host to count tokens, or want log-probabilities."""
    results = []
    for ahead in (False, True):
        engine = tiny_llm(async_scheduling=ahead, max_model_len=100, **settings)
        results.append(engine.generate(PROMPTS, KINDS, use_tqdm=False))
        assert everything_is_free(engine)
    for plain, early in zip(*results, strict=True):
        assert [c.text for c in early.outputs] == [c.text for c in plain.outputs]
        assert [c.token_ids for c in early.outputs] == [c.token_ids for c in plain.outputs]
        assert [(c.finish_reason, c.stop_reason) for c in early.outputs] == [
            (c.finish_reason, c.stop_reason) for c in plain.outputs
        ]
        assert (early.outputs[0].logprobs is None) == (plain.outputs[0].logprobs is None)
        assert (early.prompt_logprobs is None) == (plain.prompt_logprobs is None)
    assert {c.finish_reason for output in results[0] for c in output.outputs} == {"length", "stop"}


def test_prompts_that_are_not_cut(llm):
    """The same tokens; and each prompt goes through the model in one step, what the cache has of it left out."""
    whole, planned = tiny_llm(enable_chunked_prefill=False, max_model_len=64, max_num_seqs=3), []
    whole.engine.subscribe(lambda event: planned.append(event) if isinstance(event, StepPlanned) else None)
    params = dataclasses.replace(KINDS[0], ignore_eos=True)
    prompts = [[*range(2, 40)], [*range(3, 50)], PROMPTS[1], [*range(2, 42)]]
    found = whole.generate(prompts, params, use_tqdm=False)
    assert token_ids(found) == token_ids(llm.generate(prompts, params, use_tqdm=False))
    counts = [part.num_tokens for step in planned for part in step.parts if part.num_tokens > 1]
    assert sorted(counts) == sorted(
        len(prompt) - output.num_cached_tokens for prompt, output in zip(prompts, found, strict=True)
    )
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=64 must hold .*_prefill=False, max_model_len=65"):
        tiny_llm(enable_chunked_prefill=False, max_model_len=65)


def test_a_step_is_launched_before_the_last_one_is_awaited():
    engine = tiny_llm(async_scheduling=True).engine
    engine.add_request("r", {"prompt_token_ids": PROMPTS[2]}, greedy(3))
    seen = [[len(output.outputs[0].token_ids) for output in engine.step()] for _ in range(4)]
    assert seen == [[], [1], [2], [3]]
    assert engine.stats.steps == 3  # the length was known: none was launched in vain
    assert not engine.has_unfinished_requests()


def test_a_step_that_fails_leaves_nothing_behind(llm, monkeypatch):
    """Its requests end, and no prompt is found in the cache that was never computed."""
    engine = tiny_llm(async_scheduling=True)
    expected = token_ids(llm.generate(PROMPTS, greedy(), use_tqdm=False))
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine._runner, "_forward", lambda *args: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            engine.generate(PROMPTS, greedy(), use_tqdm=False)
    assert everything_is_free(engine)
    assert token_ids(engine.generate(PROMPTS, greedy(), use_tqdm=False)) == expected


def test_greedy_equals_transformers(llm, reference):
    expected = [reference_greedy(reference, prompt, 12) for prompt in PROMPTS]
    assert token_ids(llm.generate(PROMPTS, greedy(), use_tqdm=False)) == expected
    assert everything_is_free(llm)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 8},  # prompts in chunks
        {"num_blocks": 20, "max_model_len": 80},  # memory for one long request: the others are preempted
        {"enable_prefix_caching": False},
        {"block_size": 1, "num_blocks": 256},
        {"block_size": 7, "num_blocks": 40},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
def test_output_does_not_depend_on_the_schedule(llm, settings):
    expected = token_ids(llm.generate(PROMPTS, greedy(), use_tqdm=False))
    other = tiny_llm(**settings)
    for _ in range(2):  # the second time from the prefix cache
        assert token_ids(other.generate(PROMPTS, greedy(), use_tqdm=False)) == expected
    assert everything_is_free(other)
    if "num_blocks" in settings and settings["num_blocks"] == 20:
        assert other.engine.stats.preemptions > 0


def test_sampling_is_reproducible_in_any_batch(llm):
    params = [SamplingParams(temperature=1.0, top_p=0.95, seed=i, max_tokens=10, ignore_eos=True) for i in range(8)]
    together = token_ids(llm.generate(PROMPTS, params, use_tqdm=False))
    alone = [token_ids(llm.generate([p], s, use_tqdm=False))[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert together == alone
    again = token_ids(llm.generate([PROMPTS[2]] * 8, params, use_tqdm=False))
    assert len({tuple(ids) for ids in again}) == 8  # seeds differ, so do outputs


def test_requests_without_a_seed_differ_and_engines_agree():
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    first, second = (token_ids(tiny_llm().generate([PROMPTS[2]] * 3, params, use_tqdm=False)) for _ in "ab")
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3


def test_forms_of_a_prompt(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("the cat")
    forms = ["the cat", ids, {"prompt": "the cat"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, greedy(), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == ["the cat", None, "the cat", None]
    assert all(list(output.prompt_token_ids) == ids for output in outputs)
    assert token_ids(llm.generate(ids, greedy(), use_tqdm=False)) == token_ids(outputs[:1])
    assert token_ids(llm.generate("the cat", greedy(), use_tqdm=False)) == token_ids(outputs[:1])
    assert llm.generate([], greedy(), use_tqdm=False) == []


@pytest.mark.parametrize("form", [torch.tensor, np.array], ids=["tensor", "numpy"])
def test_arrays_as_prompts(llm, form):
    """One or several, in every place where a list may stand; and where none may, an error in words."""
    ids = PROMPTS[2]
    expected = token_ids(llm.generate([ids], greedy(), use_tqdm=False))
    one, dictionary = form(ids), {"prompt_token_ids": form(ids), "multi_modal_data": form([])}
    for prompts in (one, dictionary, [one], [dictionary], [one, dictionary], form([ids, ids]), [*form(ids)]):
        outputs = token_ids(llm.generate(prompts, greedy(), use_tqdm=False))
        assert outputs and all(output == expected[0] for output in outputs)
    embeds = form([[0.5, 0.25], [0.0, 1.0]])
    search = BeamSearchParams(2, 2)
    for prompts in ({"prompt_embeds": embeds}, [{"prompt": "a", "prompt_embeds": embeds}], embeds, [embeds]):
        for method, params in ((llm.generate, greedy()), (llm.beam_search, search)):
            with pytest.raises(ValueError, match=r"prompt must be .* got a dict with|prompt_token_ids must"):
                method(prompts, params)
    for messages in ([embeds], [[embeds]], [{"role": "user", "content": embeds}]):
        with pytest.raises(ValueError, match="messages"):
            llm.chat(messages, greedy())
    with pytest.raises(ValueError, match="mm_processor_kwargs"):
        llm.chat([{"role": "user", "content": "a"}], greedy(), mm_processor_kwargs={"pixels": embeds})
    assert everything_is_free(llm)


@pytest.mark.parametrize(
    "params",
    [
        greedy(8, n=2, prompt_logprobs=2),
        greedy(8, repetition_penalty=2.0, presence_penalty=0.5, bad_words=["a"]),
        BeamSearchParams(3, 8),
    ],
    ids=["reported", "penalties", "beams"],
)
def test_a_checked_prompt_is_taken_as_it_is(llm, params):
    """As processes that tokenize for the engine send it: packed."""
    ids = random_tokens(30, VOCAB_SIZE, seed=5)

    def outputs(name, prompt):
        llm.engine.add_request(name, prompt, params)
        while llm.engine.has_unfinished_requests():
            found = llm.engine.step()
        return [(c.token_ids, c.text, c.logprobs) for c in found[0].outputs], found[0].prompt_logprobs

    packed = array(PACKED, ids)
    checked = TokenizedPrompt(None, packed, None, packed)
    assert outputs("checked", checked) == outputs("list", {"prompt_token_ids": ids})


def test_text_is_that_of_the_tokens(llm):
    (output,) = llm.generate("the cat", greedy(), use_tqdm=False)
    completion = output.outputs[0]
    full = llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
    assert full.rstrip("�").startswith(completion.text) or completion.text.startswith(full.rstrip("�"))
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert output.finished and output.metrics.finished_time >= output.metrics.first_token_time


def test_prefix_cache_hits_are_reported():
    llm = tiny_llm()
    prompt = random_tokens(30, VOCAB_SIZE, seed=1)
    first, second = (llm.generate([prompt], greedy(), use_tqdm=False)[0].num_cached_tokens for _ in "ab")
    assert (first, second) == (0, 28)
    salted = llm.generate([{"prompt_token_ids": prompt, "cache_salt": "mine"}], greedy(), use_tqdm=False)
    assert salted[0].num_cached_tokens == 0


def test_n_continuations(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[3]], params, use_tqdm=False)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    (again,) = llm.generate([PROMPTS[3]], params, use_tqdm=False)
    assert token_ids([again]) == token_ids([output])
    assert everything_is_free(llm)


def test_end_of_sequence_and_stop_tokens(llm):
    (free,) = token_ids(llm.generate([PROMPTS[2]], greedy(), use_tqdm=False))
    third = free[2]
    cut = free[: free.index(third) + 1]
    (output,) = llm.generate([PROMPTS[2]], greedy(stop_token_ids=[third]), use_tqdm=False)
    completion = output.outputs[0]
    assert list(completion.token_ids) == cut
    assert (completion.finish_reason, completion.stop_reason) == ("stop", third)
    # what the token would have added to the text is left out
    shorter = llm.generate([PROMPTS[2]], greedy(max_tokens=len(cut)), use_tqdm=False)[0].outputs[0].text
    assert shorter.startswith(completion.text)


def force(tokens, n):
    """Parameters under which the output is `tokens[0]` n times."""
    return {"allowed_token_ids": tokens, "temperature": 0, "max_tokens": n}


def test_eos_ends_unless_ignored_or_too_early(llm):
    outputs = [
        llm.generate([PROMPTS[1]], SamplingParams(**force([0], 5), **more), use_tqdm=False)[0].outputs[0]
        for more in ({}, {"ignore_eos": True})
    ]
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [("stop", 1), ("length", 5)]
    params = SamplingParams(temperature=0, logit_bias={0: 100.0}, min_tokens=3, max_tokens=9)
    completion = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0]
    assert (completion.finish_reason, len(completion.token_ids)) == ("stop", 4)
    assert completion.token_ids[-1] == 0 and 0 not in completion.token_ids[:-1]


def single_byte_tokens(llm, text):
    ids = [llm.get_tokenizer().convert_tokens_to_ids(c) for c in text]
    assert all(i is not None for i in ids)
    return ids


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(llm, include):
    (x,) = single_byte_tokens(llm, "x")
    stop = "xxx"  # no token holds all of it
    params = SamplingParams(**force([x], 9), stop=["zz", stop], include_stop_str_in_output=include)
    completion = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0]
    assert completion.text == (stop if include else "")
    assert len(completion.token_ids) == 3
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_the_text_keeps_a_token_that_ends_it_if_asked(llm):
    (x,) = single_byte_tokens(llm, "x")
    end = llm.get_tokenizer().decode([0])

    def text(token, **more):
        params = SamplingParams(**force([token], 9), **more)
        completion = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0]
        assert (completion.finish_reason, list(completion.token_ids)) == ("stop", [token])
        return completion.text, completion.stop_reason

    kept = {"include_stop_str_in_output": True}
    assert text(x, stop_token_ids=[x]) == ("", x)
    assert text(x, stop_token_ids=[x], **kept) == ("x", x)
    assert text(x, stop_token_ids=[x], stop="x", **kept) == ("x", "x")
    assert text(0, skip_special_tokens=False) == ("", None)
    assert text(0, skip_special_tokens=False, **kept) == (end, None) and end
    assert text(0, **kept) == ("", None)


def test_streamed_text_never_takes_back_a_character(llm):
    (x,) = single_byte_tokens(llm, "x")
    llm.engine.add_request("s", PROMPTS[1], SamplingParams(**force([x], 6), stop="xxxxx"))
    seen = []
    while llm.engine.has_unfinished_requests():
        seen += [output.outputs[0].text for output in llm.engine.step()]
    assert seen == ["", "", "", "", ""]  # each x could have begun the stop string, and one did


def test_stop_string_wins_over_the_length_limit(llm):
    (x,) = single_byte_tokens(llm, "x")
    params = SamplingParams(**force([x], 3), stop="xxx")
    assert llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0].finish_reason == "stop"


def test_logprobs(llm, reference):
    (output,) = llm.generate([PROMPTS[4]], greedy(6, logprobs=3), use_tqdm=False)
    completion = output.outputs[0]
    tokens = [*PROMPTS[4], *completion.token_ids]
    expected = torch.log_softmax(reference_logits(reference, tokens), -1)[len(PROMPTS[4]) - 1 :]
    total = 0.0
    for at, (token, entries) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        assert list(entries) == expected[at].topk(3).indices.tolist()  # greedy: the chosen one is the first
        assert [entry.rank for entry in entries.values()] == [1, 2, 3]
        for i, entry in entries.items():
            assert entry.logprob == pytest.approx(float(expected[at, i]), abs=1e-4)
        total += entries[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize("budget", [64, 8])
def test_prompt_logprobs(reference, budget):
    llm = tiny_llm(max_num_batched_tokens=budget)
    prompt = PROMPTS[3]
    expected = torch.log_softmax(reference_logits(reference, prompt), -1)
    for _ in range(2):  # a cached prefix must not shorten the second answer
        (output,) = llm.generate([prompt], greedy(2, prompt_logprobs=2), use_tqdm=False)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for at in range(1, len(prompt)):
            entries = output.prompt_logprobs[at]
            assert next(iter(entries)) == prompt[at]
            assert set(expected[at - 1].topk(2).indices.tolist()) <= set(entries)
            assert entries[prompt[at]].logprob == pytest.approx(float(expected[at - 1, prompt[at]]), abs=1e-4)
            rank = int((expected[at - 1] > expected[at - 1, prompt[at]]).sum()) + 1
            assert entries[prompt[at]].rank == rank


def processed(logits, params, prompt, output):
    """What a token is drawn from, by the definitions: penalties, bans, temperature, min-p, top-k, top-p."""
    x, counts = logits.clone(), torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB_SIZE)
    seen = (counts > 0).index_fill(0, torch.tensor(prompt), True)
    x = torch.where(seen, torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty), x)
    x -= params.frequency_penalty * counts
    for token in set(range(VOCAB_SIZE)) - set(params.allowed_token_ids or range(VOCAB_SIZE)):
        x[token] = -torch.inf
    x /= params.temperature or 1.0
    if params.temperature:
        x[x.softmax(-1) < params.min_p * x.softmax(-1).max()] = -torch.inf
        order = x.argsort(descending=True)
        if params.top_k > 0:
            x[order[params.top_k :]] = -torch.inf
        before = x.softmax(-1)[order].cumsum(-1) - x.softmax(-1)[order]
        x[order[before >= params.top_p]] = -torch.inf
    return x.log_softmax(-1)


PROCESSED = [
    SamplingParams(temperature=0, top_k=2, top_p=0.1, max_tokens=3, logprobs=-1),
    SamplingParams(temperature=0.6, seed=1, max_tokens=4, logprobs=-1),
    SamplingParams(temperature=1.7, seed=2, max_tokens=4, logprobs=-1, top_k=5),
    SamplingParams(temperature=0.8, seed=3, max_tokens=4, logprobs=-1, top_p=0.5, min_p=0.01),
    SamplingParams(temperature=1.0, seed=4, max_tokens=6, logprobs=-1, repetition_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(temperature=2.0, seed=5, max_tokens=4, logprobs=-1, allowed_token_ids=[5, 6, 7, 8], ignore_eos=True),
    SamplingParams(temperature=0.5, seed=6, max_tokens=4, logprobs=3, prompt_logprobs=1),
]


@pytest.mark.parametrize("chosen", [range(7), [1, 6]])
def test_logprobs_of_what_is_drawn_from(llm, reference, chosen):
    """Of kinds of requests side by side, and of those that have a temperature alone; the tokens do not change."""
    params = [PROCESSED[i] for i in chosen]
    prompts = [random_tokens(4 + i, VOCAB_SIZE, seed=i) for i in chosen]
    reporting = tiny_llm(logprobs_mode="processed_logprobs")
    outputs = reporting.generate(prompts, params, use_tqdm=False)
    plain = llm.generate(prompts, params, use_tqdm=False)
    assert token_ids(outputs) == token_ids(plain)
    assert outputs[-1].prompt_logprobs == plain[-1].prompt_logprobs  # the model's own
    for prompt, wish, output in zip(prompts, params, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        logits = reference_logits(reference, [*prompt, *tokens])
        for at, entries in enumerate(output.outputs[0].logprobs):
            expected = processed(logits[len(prompt) + at - 1], wish, prompt, tokens[:at])
            found = torch.tensor([entry.logprob for entry in entries.values()])
            assert torch.allclose(found, expected[list(entries)], atol=1e-3), (wish, at)
            assert next(iter(entries)) == tokens[at] and entries[tokens[at]].logprob > -math.inf
            assert len(entries) == VOCAB_SIZE or wish.logprobs == 3


def test_drafts_have_no_logprobs_of_what_is_drawn_from():
    with pytest.raises(ValueError, match="logprobs_mode='processed_logprobs' does not know drafts yet"):
        tiny_llm(logprobs_mode="processed_logprobs", speculative_config="ngram:3")


def test_logprobs_of_the_whole_vocabulary(llm, reference):
    """Beside a request that wants a few, one that wants none, and edits, which do not change what is reported."""
    prompt = PROMPTS[3]
    params = [greedy(4, logprobs=-1, prompt_logprobs=-1, logit_bias={7: 100.0}), greedy(4, logprobs=2), greedy(4)]
    whole, few, none = llm.generate([prompt] * 3, params, use_tqdm=False)
    tokens = [*prompt, *whole.outputs[0].token_ids]
    expected = torch.log_softmax(reference_logits(reference, tokens), -1)
    reported = [*whole.prompt_logprobs[1:], *whole.outputs[0].logprobs]
    assert whole.prompt_logprobs[0] is None and len(reported) == len(tokens) - 1
    for at, entries in enumerate(reported):
        assert sorted(entries) == list(range(VOCAB_SIZE))
        found = torch.tensor([entries[i].logprob for i in range(VOCAB_SIZE)])
        assert torch.allclose(found, expected[at], atol=1e-4)
        assert sorted(entry.rank for entry in entries.values()) == list(range(1, VOCAB_SIZE + 1))
        assert next(iter(entries)) == tokens[at + 1]
    assert [len(entries) for entries in few.outputs[0].logprobs] == [2] * 4
    assert none.outputs[0].logprobs is None and none.outputs[0].token_ids == few.outputs[0].token_ids


@pytest.mark.parametrize(("keep", "kept"), [(5, 5), (1, 1), (40, 40), (63, 63), (-1, 63)])
def test_truncated_prompts_keep_their_end(keep, kept):
    llm = tiny_llm(max_model_len=64)
    cut, plain = llm.generate(
        [PROMPTS[5], PROMPTS[5][-kept:]], [greedy(1, truncate_prompt_tokens=keep), greedy(1)], use_tqdm=False
    )
    assert cut.prompt_token_ids == PROMPTS[5][-kept:]
    assert cut.outputs[0].token_ids == plain.outputs[0].token_ids
    text = llm.generate(["the cat sat"], greedy(1, truncate_prompt_tokens=2), use_tqdm=False)[0]
    assert text.prompt_token_ids == llm.get_tokenizer().encode("the cat sat")[-2:]
    with pytest.raises(ValueError, match=r"truncate_prompt_tokens=64.*at most 63"):
        llm.generate([PROMPTS[0]], greedy(1, truncate_prompt_tokens=64), use_tqdm=False)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_repetition_ends_the_output(ahead):
    llm = tiny_llm(async_scheduling=ahead)
    repeats = RepetitionDetectionParams(max_pattern_size=3, min_count=4)
    params = [greedy(20, logit_bias={9: 100.0}, **more) for more in ({}, {"repetition_detection": repeats})]
    params.append(greedy(20, logit_bias={9: 100.0}, repetition_detection=repeats, min_tokens=10))
    free, ended, later = (o.outputs[0] for o in llm.generate([PROMPTS[1]] * 3, params, use_tqdm=False))
    assert (free.finish_reason, len(free.token_ids)) == ("length", 20)
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == ("repetition", "repetition_detected", [9] * 4)
    assert (later.finish_reason, len(later.token_ids)) == ("repetition", 10)
    assert everything_is_free(llm)


def test_bad_words(llm):
    (free,) = llm.generate(["the cat"], greedy(), use_tqdm=False)
    word = next(t for t in map(llm.get_tokenizer().decode, free.outputs[0].token_ids) if t.strip().isascii())
    (kept,) = llm.generate(["the cat"], greedy(bad_words=[word]), use_tqdm=False)
    assert word in free.outputs[0].text
    assert word not in kept.outputs[0].text


def test_chat(llm):
    messages = [{"role": "user", "content": "the cat"}]
    text = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.chat(messages, greedy(), use_tqdm=False)
    assert output.prompt == text
    assert list(output.prompt_token_ids) == llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert len(llm.chat([messages, messages], greedy(), use_tqdm=False)) == 2


def test_priority_runs_first():
    llm = tiny_llm(policy="priority", max_num_seqs=1)
    done = []
    for name, priority in (("late", 5), ("early", -1), ("middle", 0)):
        llm.engine.add_request(name, PROMPTS[1], greedy(3), priority=priority)
    while llm.engine.has_unfinished_requests():
        done += [output.request_id for output in llm.engine.step() if output.finished]
    assert done == ["early", "middle", "late"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_seqs": 2}, id="seats"),
        pytest.param({"num_blocks": 20, "max_model_len": 80}, id="blocks"),
        pytest.param(
            {"num_blocks": 20, "max_model_len": 80, "kv_offloading_size": 0.001, "enable_prefix_caching": False},
            id="host",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {
                "max_num_seqs": 2,
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
            },
            id="speculation",
            marks=pytest.mark.long,
        ),
    ],
)
def test_giving_way_changes_no_output(llm, settings):
    """Requests come one after the other, each of a higher priority than those before, and find all seats or blocks
    taken by steps that are in flight."""
    requests = [*zip(PROMPTS, KINDS, strict=True), (PROMPTS[2], BeamSearchParams(2, 9))]
    expected, outputs = {}, {}
    for name, (prompt, params) in enumerate(requests):
        llm.engine.add_request(str(name), prompt, params)
        while llm.engine.has_unfinished_requests():
            expected |= {output.request_id: output for output in llm.engine.step()}
    other = tiny_llm(policy="priority", async_scheduling=True, **settings).engine
    for name, (prompt, params) in enumerate(requests):
        other.add_request(str(name), prompt, params, priority=-name)
        for _ in range(3):
            outputs |= {output.request_id: output for output in other.step()}
    while other.has_unfinished_requests():
        for output in other.step():
            outputs[output.request_id] = output
    assert other.stats.preemptions > 3
    for name, output in expected.items():
        found = [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in outputs[name].outputs]
        assert found == [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


def test_token_id_mode(llm):
    bare = tiny_llm(skip_tokenizer_init=True)
    (output,) = bare.generate([{"prompt_token_ids": PROMPTS[2]}], greedy(), use_tqdm=False)
    assert output.outputs[0].text == ""
    assert token_ids([output]) == token_ids(llm.generate([PROMPTS[2]], greedy(), use_tqdm=False))
    for params, word in ((None, "no tokenizer"), (SamplingParams(stop="a"), "stop")):
        with pytest.raises(ValueError, match=word):
            bare.generate("text" if params is None else [PROMPTS[2]], params, use_tqdm=False)


def test_dummy_weights_need_only_a_config(tmp_path):
    (tmp_path / "config.json").write_text((tiny_checkpoint() / "config.json").read_text())
    from tritonllm import LLM

    kwargs = {"skip_tokenizer_init": True, "load_format": "dummy", "num_blocks": 32}
    runs = [
        token_ids(LLM(str(tmp_path), seed=seed, **kwargs).generate([PROMPTS[2]], greedy(), use_tqdm=False))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_abort_frees_everything_at_once(llm):
    engine = llm.engine
    for name in "abc":
        engine.add_request(name, PROMPTS[5], greedy(50))
    for _ in range(3):
        engine.step()
    outputs = engine.abort_request(["a", "c", "unknown"])
    assert [(o.request_id, o.outputs[0].finish_reason) for o in outputs] == [("a", "abort"), ("c", "abort")]
    engine.abort_request("b")
    assert everything_is_free(llm)


def test_delta_outputs_add_up(llm):
    from tritonllm.config.sampling_params import RequestOutputKind

    (whole,) = llm.generate(["the cat"], greedy(20), use_tqdm=False)
    llm.engine.add_request("d", "the cat", greedy(20, output_kind=RequestOutputKind.DELTA))
    text, ids = "", []
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            text += output.outputs[0].text
            ids += output.outputs[0].token_ids
    assert (text, ids) == (whole.outputs[0].text, list(whole.outputs[0].token_ids))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ("", {}, "prompt is empty"),
        ([1] * 256, {}, "max_model_len=256"),
        ([1, VOCAB_SIZE], {}, "prompt_token_ids must be integers from 0"),
        ([1, -1], {}, "prompt_token_ids must be integers from 0"),
        ([1, "a"], {}, "prompt_token_ids must be integers from 0"),
        ({"text": "a"}, {}, "a dict with"),
        (5, {}, "prompt must be"),
        ({"prompt": 5}, {}, "must be a string"),
        ({"prompt": None}, {}, "a dict with"),
        ({"prompt": "a", "more": 1}, {}, "a dict with"),
        ({"prompt_token_ids": 5}, {}, "must be a list"),
        ([1], {"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids has token"),
        ([1], {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids has token"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias has token"),
        ("half a \ud800 pair", {}, "prompt is not valid Unicode text"),
        ({"prompt_token_ids": [1], "cache_salt": "\udfff"}, {}, "cache_salt is not valid Unicode text"),
        ([1], {"stop": "\ud800"}, "stop is not valid Unicode text"),
        ([1], {"bad_words": ["\ud800"]}, "bad_words is not valid Unicode text"),
        ([1], {"top_k": 2**31}, "top_k must be an integer from -1 to 2147483647"),
        ([1], {"min_tokens": 2**70, "max_tokens": None}, "min_tokens must be an integer from 0 to 2147483647"),
        ([1], {"n": 10**9}, "n must be an integer from 1 to 16384"),
    ],
)
def test_bad_request_harms_nobody(llm, prompt, params, message):
    good = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.engine.add_request("good", PROMPTS[2], good)
    llm.engine.step()
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request("bad", prompt, SamplingParams(**params))
    with pytest.raises(ValueError, match="in use"):
        llm.engine.add_request("good", PROMPTS[2], good)
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 4
    assert everything_is_free(llm)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"request_id": 5}, "request_id must be a string"),
        ({"priority": "high"}, "priority must be an integer"),
        ({"priority": True}, "priority must be an integer"),
    ],
)
def test_bad_arguments_of_a_request(llm, arguments, message):
    with pytest.raises(ValueError, match=message):
        llm.engine.add_request(**{"request_id": "bad", "prompt": PROMPTS[1], **arguments})
    assert everything_is_free(llm)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 2**31 - 1},
        {"min_tokens": 2**31 - 1, "max_tokens": None},
        {"max_tokens": 2**70},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"temperature": 1e6, "min_p": 1.0},
        {"temperature": 1e-5, "top_p": 5e-324},
    ],
    ids=str,
)
def test_the_largest_values_run(llm, params):
    """What is accepted at the door is never an error in a step."""
    alone, neighbour = SamplingParams(**{"max_tokens": 3, "seed": 1, **params}), greedy(3)
    outputs = llm.generate([PROMPTS[1], PROMPTS[2]], [alone, neighbour], use_tqdm=False)
    assert all(output.finished for output in outputs)
    assert token_ids(outputs[1:]) == token_ids(llm.generate([PROMPTS[2]], neighbour, use_tqdm=False))
    assert everything_is_free(llm)


def test_a_bad_prompt_in_a_list_is_named_and_leaves_nothing_behind(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt is empty"):
        llm.generate([PROMPTS[0], [], PROMPTS[1]], greedy(), use_tqdm=False)
    assert everything_is_free(llm)
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(PROMPTS[:2], [greedy()], use_tqdm=False)
    with pytest.raises(ValueError, match="policy='priority'"):
        llm.generate(PROMPTS[:2], greedy(), priority=[1, 2], use_tqdm=False)


def test_prompt_that_fills_the_model_gets_one_token(llm):
    (output,) = llm.generate([[1] * 255], SamplingParams(max_tokens=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_blocks": 8, "max_model_len": 100}, "max_model_len=100 needs 25 cache blocks"),
        ({"max_model_len": 5000}, "max_position_embeddings"),
        ({"block_sizes": 3}, "unknown argument 'block_sizes'"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"tensor_parallel_size": 64}, "tensor_parallel_size=64 must divide"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization"),
        ({"num_gpu_blocks_override": 3}, "the same"),
    ],
)
def test_bad_engine_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(**kwargs)


def test_a_small_pool_lowers_the_length_it_was_not_asked_for():
    assert tiny_llm(num_blocks=10).engine.config.model.max_model_len == 40
    with pytest.raises(ValueError, match="num_blocks=1 holds 1 token"):
        tiny_llm(num_blocks=1, block_size=1)
