"""Beam search finds what transformers finds, whatever runs beside it, and its sequences share their blocks."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

import pytest
import torch
from support.engines import greedy, shallow_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import random_tokens, tiny_config, write_checkpoint
from support.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from transformers import AutoModelForCausalLM

from tritonllm import LLM, BeamSearchParams, SamplingParams
from tritonllm.cli import main
from tritonllm.demo import model_path
from tritonllm.engine.cache import block_copies

PROMPTS = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (1, 4, 7, 22)]
ON_GPU = pytest.mark.also_gpu  # float32, where rounding lies far below the gap between two beams
ENDS = [0, *range(3, VOCAB_SIZE, 9)]  # tokens that end a sequence, so many that beams often do
SETTINGS = {"skip_tokenizer_init": True, "num_blocks": 256}


@cache
def often_ending(family="qwen3", ends=tuple(ENDS), layers=3):
    folder = Path(mkdtemp(prefix="often-ending-"))
    fields = {"bos_token_id": 0, "eos_token_id": list(ends), "num_hidden_layers": layers}
    write_checkpoint(folder, tiny_config(family, vocab_size=VOCAB_SIZE, **fields))
    save_tokenizer(folder)
    return folder


@cache
def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def expected(folder, prompt, params, ends):
    """Continuations and scores."""
    return found_by_transformers(folder, tuple(prompt), params, tuple(ends))


@cache
def found_by_transformers(folder, prompt, params, ends):
    wishes = {"length_penalty": params.length_penalty, "early_stopping": params.early_stopping}
    with torch.no_grad():
        found = theirs(folder).generate(
            torch.tensor([prompt]),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            do_sample=False,
            max_new_tokens=params.max_tokens,
            eos_token_id=None if params.ignore_eos else list(ends),
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **wishes,
        )
    continuations = [cut(ids[len(prompt) :], () if params.ignore_eos else ends) for ids in found.sequences.tolist()]
    return continuations, found.sequences_scores.tolist()


def cut(ids, ends):
    """Without the padding behind the end."""
    at = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: at + 1]


def check(llm, folder, prompts, params, ends):
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    for prompt, output in zip(prompts, outputs, strict=True):
        found = [sequence.tokens[len(prompt) :] for sequence in output.sequences]
        continuations, scores = expected(folder, prompt, params, ends)
        assert found == continuations
        for sequence, ids, score in zip(output.sequences, found, scores, strict=True):
            assert sequence.cum_logprob / len(ids) ** params.length_penalty == pytest.approx(score, rel=1e-5)
            assert sequence.finish_reason == ("stop" if not params.ignore_eos and ids[-1] in ends else "length")
            chosen = sum(scores[token].logprob for token, scores in zip(ids, sequence.logprobs, strict=True))
            assert chosen == pytest.approx(sequence.cum_logprob)
        positions = [id(scores) for sequence in output.sequences for scores in sequence.logprobs]
        assert len(set(positions)) == len(positions)  # whoever changes one changes no other


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize(
    ("beam_width", "ends"),
    [(2, (0, 5)), (3, tuple(ENDS)), (8, (0,)), pytest.param(5, tuple(ENDS[:4]), marks=ON_GPU)],
)
def test_equal_to_transformers(beam_width, ends, length_penalty, early_stopping):
    folder = often_ending(ends=ends, layers=1)
    wishes = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    params = BeamSearchParams(beam_width, 14, **wishes)
    check(LLM(str(folder), block_size=4, **SETTINGS), folder, PROMPTS, params, ends)


@ON_GPU
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral"])
def test_other_models(family):
    folder = often_ending(family)
    llm = LLM(str(folder), block_size=4, **SETTINGS)
    check(llm, folder, PROMPTS, BeamSearchParams(3, 12), ENDS)
    check(llm, folder, PROMPTS, BeamSearchParams(3, 12, ignore_eos=True), ENDS)


@ON_GPU
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 1},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 4, "max_num_batched_tokens": 5},
        {"num_blocks": 30, "max_model_len": 48, "max_num_seqs": 12},  # two searches at once have no room
        {"num_blocks": 30, "max_model_len": 48, "max_num_seqs": 12, "enable_prefix_caching": False},
        {"num_blocks": 30, "max_model_len": 48, "max_num_seqs": 9, "max_num_batched_tokens": 9},
    ],
    ids=str,
)
def test_any_schedule(settings, ahead):
    """Beside requests of other kinds, which get the tokens that they get alone."""
    folder, params = shallow_checkpoint(), BeamSearchParams(4, 16, ignore_eos=True)
    llm = tiny_llm(folder, **{"num_blocks": 256, "async_scheduling": ahead, "max_num_seqs": 6, **settings})
    alone = token_ids(llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy(20), use_tqdm=False))
    found = {}
    for number, prompt in enumerate(PROMPTS):
        llm.engine.add_request(f"beam {number}", {"prompt_token_ids": prompt}, params)
        llm.engine.add_request(f"alone {number}", {"prompt_token_ids": prompt}, greedy(20))
    for _ in range(3000):
        found |= {output.request_id: output for output in llm.engine.step() if output.finished}
        if not llm.engine.has_unfinished_requests():
            break
    for number, prompt in enumerate(PROMPTS):
        assert token_ids([found[f"alone {number}"]]) == [alone[number]]
        assert token_ids([found[f"beam {number}"]]) == expected(folder, prompt, params, [0])[0]
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks


@ON_GPU
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_search_goes_on(caching, ahead):
    """All of its sequences lose their blocks, some of them perhaps while the others wait for them."""
    folder, params = shallow_checkpoint(), BeamSearchParams(4, 16, ignore_eos=True)
    engine = tiny_llm(folder, enable_prefix_caching=caching, async_scheduling=ahead).engine
    pool = engine._scheduler.pool
    engine.add_request("a", {"prompt_token_ids": PROMPTS[0]}, greedy(50))
    engine.add_request("b", {"prompt_token_ids": PROMPTS[2]}, params)
    found = {}
    for step in range(200):
        hole = pool.allocate_many(pool.num_free) if step in (7, 13, 14) else []
        found |= {output.request_id: output for output in engine.step() if output.finished}
        pool.release(hole)
    assert token_ids([found["b"]]) == expected(folder, PROMPTS[2], params, [0])[0]
    assert engine.stats.preemptions >= 4 and pool.num_free == pool.num_blocks


@ON_GPU
def test_beams_share_blocks_and_copy_only_the_last():
    llm = tiny_llm(num_blocks=256, async_scheduling=False)
    with patch.object(block_copies, "copy_blocks", wraps=block_copies.copy_blocks) as copies:
        llm.engine.add_request("r", {"prompt_token_ids": PROMPTS[-1]}, BeamSearchParams(8, 12, ignore_eos=True))
        most = steps = 0
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            stats = llm.engine.stats
            most, steps = max(most, stats.num_blocks - stats.num_free_blocks), steps + 1
    assert steps == 12  # the prompt is computed once, and no token again
    assert 0 < copies.call_count < 12  # one launch a step at most
    assert most <= 5 + 8 * 4


def test_the_demo_model_answers_with_beams():
    """Text, and the same as transformers."""
    folder = model_path()
    llm = LLM(str(folder))
    prompts = ["Once upon a time, there was a", "The little dog"]
    ids = [llm.get_tokenizer().encode(prompt) for prompt in prompts]
    ends = sorted(llm.engine.inputs.eos_token_ids)
    check(llm, folder, ids, BeamSearchParams(4, 20), ends)
    for prompt, output in zip(prompts, llm.beam_search(prompts, BeamSearchParams(4, 20)), strict=True):
        for sequence in output.sequences:
            assert sequence.text.startswith(prompt) and len(sequence.text) > len(prompt) + 10


def test_the_end_of_sequence_in_the_text():
    folder = often_ending()
    llm = LLM(str(folder), block_size=4, num_blocks=256)
    texts = {}
    for kept in (False, True):
        params = BeamSearchParams(4, 14, include_stop_str_in_output=kept)
        (output,) = llm.beam_search([{"prompt_token_ids": PROMPTS[2]}], params)
        texts[kept] = output.sequences
    ended = [s.finish_reason == "stop" for s in texts[True]]
    assert any(ended)
    decode = llm.get_tokenizer().decode
    for short, long, stopped in zip(texts[False], texts[True], ended, strict=True):
        assert long.text == decode(long.tokens)
        assert short.text == decode(short.tokens[: len(short.tokens) - stopped])


@ON_GPU
def test_a_width_of_one_is_greedy():
    llm = tiny_llm()
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.beam_search(prompts, BeamSearchParams(1, 20), concurrency_limit=2)
    found = [output.sequences[0].tokens[len(p) :] for output, p in zip(outputs, PROMPTS, strict=True)]
    plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    assert found == token_ids(plain)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer from 1"),
        ({"beam_width": True}, "beam_width must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"temperature": 0.7}, "temperature must be 0 or 1"),
        ({"length_penalty": 33}, "length_penalty must be a number from -32 to 32"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number from -32 to 32"),
        ({"early_stopping": "soon"}, "early_stopping must be True, False or 'never'"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output must be True or False"),
    ],
)
def test_bad_values_name_the_parameter(wish, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wish})


def test_searches_that_do_not_fit_are_refused():
    llm = tiny_llm(num_blocks=30, max_model_len=100)
    prompt = {"prompt_token_ids": PROMPTS[-1]}
    for params, message in [
        (BeamSearchParams(9, 4), "beam_width=9 needs max_num_seqs of at least as many, not 8"),
        (BeamSearchParams(8, 40), "beam_width=8 and max_tokens=40 after a prompt of 22 tokens may need .* num_blocks"),
        (BeamSearchParams(250, 4), "beam_width=250 looks at the 500 most likely tokens, and at most"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.beam_search(prompt, params)
    with pytest.raises(ValueError, match="params must be BeamSearchParams"):
        llm.beam_search(prompt, SamplingParams())
    with pytest.raises(ValueError, match="concurrency_limit must be an integer"):
        llm.beam_search(prompt, BeamSearchParams(2, 4), concurrency_limit=0)
    assert len(llm.beam_search(prompt, BeamSearchParams(2, 4))[0].sequences) == 2


def test_an_aborted_search_frees_its_blocks():
    engine = tiny_llm().engine
    engine.add_request("r", {"prompt_token_ids": PROMPTS[-1]}, BeamSearchParams(4, 10))
    for _ in range(4):
        engine.step()
    (output,) = engine.abort_request("r")
    assert output.finished and engine.stats.num_free_blocks == engine.stats.num_blocks


def test_the_command_line(capsys):
    model = str(tiny_checkpoint())
    argv = ["generate", model, "--prompt", "the", "--beam-width", "3", "--max-tokens", "4", "--num-blocks", "64"]
    assert main([*argv, "--early-stopping", "never", "--length-penalty", "0.5"]) == 0
    assert capsys.readouterr().out.count("=== 1/1 (") == 3
    for more, message in [
        (["--top-k", "3"], "--top-k does not go with --beam-width"),
        (["--regex", "a"], "--regex does not go with --beam-width"),
        (["--temperature", "0.5"], "temperature must be 0 or 1"),
    ]:
        with pytest.raises(SystemExit):
            main([*argv, *more])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", model, "--prompt", "the", "--length-penalty", "2"])
    assert "--length-penalty needs --beam-width" in capsys.readouterr().err
