"""What people do with a chat model, on one that people have: tokens, text and numbers are those of transformers."""

import pytest
import torch
from support.engines import always_load

from bench import smollm2
from tritonllm import LLM, SamplingParams
from tritonllm.config.sampling_params import RequestOutputKind

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Liste de courses : crème brûlée, pâté,",
    "Water boils at",
    "In 1969, humans first",
]
TOKENS = 16
CHAT = [{"role": "user", "content": "What is the capital of Italy? Answer with one word."}]


def greedy(count: int = TOKENS, **more) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, **more)


def generate(llm: LLM, prompts, params):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


@torch.inference_mode()
def expected(reference, ids: list[int], count: int = TOKENS) -> list[int]:
    inputs = torch.tensor([ids], device=reference.device)
    mask = torch.ones_like(inputs)
    out = reference.generate(inputs, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=2)
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def wanted(reference, tokenizer):
    return [expected(reference, tokenizer(text).input_ids) for text in PROMPTS]


def test_greedy_tokens_alone_and_together(llm, wanted):
    assert [list(o.token_ids) for o in generate(llm, PROMPTS, greedy())] == wanted
    assert list(generate(llm, PROMPTS[:1], greedy())[0].token_ids) == wanted[0]


def test_the_gguf_file_itself(settings, wanted, tokenizer):
    """From which transformers read the folder: the same tokens of a text, and of an answer."""
    file = LLM(**{**settings, "model": str(smollm2.package() / smollm2.FILE), "max_model_len": 64}, num_blocks=64)
    outputs = file.generate(PROMPTS, greedy(), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == tokenizer(PROMPTS).input_ids
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
    assert [output.outputs[0].text for output in outputs] == tokenizer.batch_decode(wanted)


def test_log_probabilities(llm, reference, tokenizer):
    """Of a prompt's tokens, and so the perplexity, and of generated ones."""
    (output,) = llm.generate(PROMPTS[2], greedy(4, logprobs=3, prompt_logprobs=0), use_tqdm=False)
    ids = tokenizer(PROMPTS[2]).input_ids
    assert output.prompt_token_ids == ids
    new = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + new], device=reference.device)).logits[0].float().cpu()
    exact = logits.log_softmax(-1)
    for at, token in enumerate(ids[1:]):
        assert output.prompt_logprobs[at + 1][token].logprob == pytest.approx(float(exact[at, token]), abs=1e-3)
    for step, token in enumerate(new):
        row = exact[len(ids) - 1 + step]
        found = output.outputs[0].logprobs[step]
        assert next(iter(found)) == token
        for candidate in row.topk(3).indices.tolist():
            assert found[candidate].logprob == pytest.approx(float(row[candidate]), abs=1e-3)


def test_chat_template(llm, reference, tokenizer):
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    (output,) = llm.chat(CHAT, greedy(), use_tqdm=False)
    assert output.prompt_token_ids == ids
    want = expected(reference, ids)
    assert list(output.outputs[0].token_ids) == want
    assert output.outputs[0].text == tokenizer.decode(want, skip_special_tokens=True)
    assert "Rome" in output.outputs[0].text


def test_streamed_text_is_the_whole_text(llm, tokenizer):
    """In pieces that hold whole characters, though a character may be several tokens."""
    text = "naïve café 東京 🙂👩‍🚀 Ωμέγα"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert any("�" in tokenizer.decode([token]) for token in ids)  # some tokens are parts of characters
    prompt = f"Repeat: {text}\n{text}\nRepeat: {text}\n"  # which the model goes on with
    pieces, whole = [], []
    for kind, parts in ((RequestOutputKind.DELTA, pieces), (RequestOutputKind.FINAL_ONLY, whole)):
        llm.engine.add_request("stream", prompt, greedy(len(ids) + 4, output_kind=kind, ignore_eos=True))
        while llm.engine.has_unfinished_requests():
            parts.extend(output.outputs[0].text for output in llm.engine.step())
    assert len(pieces) > 3 and "".join(pieces) == "".join(whole)
    assert all("�" not in piece for piece in pieces)
    assert "東京" in "".join(pieces)


def test_stop_strings(llm, wanted, tokenizer):
    text = tokenizer.decode(wanted[0])
    stop = text[len(text) // 2 : len(text) // 2 + 4]  # within tokens, and over their edges
    (output,) = generate(llm, PROMPTS[0], greedy(stop=[stop]))
    assert output.finish_reason == "stop" and output.stop_reason == stop
    assert output.text == text[: text.index(stop)]


def test_a_seed_gives_the_same_tokens_whoever_else_is_there(llm):
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=TOKENS) for seed in range(5)]
    together = [o.token_ids for o in generate(llm, PROMPTS, params)]
    assert [o.token_ids for o in generate(llm, PROMPTS, params)] == together
    assert generate(llm, PROMPTS[1:2], params[1])[0].token_ids == together[1]
    other = [SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=TOKENS) for seed in range(5, 10)]
    assert [o.token_ids for o in generate(llm, PROMPTS, other)] != together


def test_a_cached_prefix_changes_nothing(llm, reference, tokenizer):
    shared = "You are a careful assistant. " * 12
    prompts = [f"{shared}Name {what}:" for what in ("a fruit", "a river", "a planet")]
    hits = llm.engine.stats.prefix_cache_hit_tokens
    got = [list(generate(llm, [prompt], greedy(6))[0].token_ids) for prompt in prompts]  # one finds the one before
    assert llm.engine.stats.prefix_cache_hit_tokens > hits
    assert got == [expected(reference, tokenizer(prompt).input_ids, 6) for prompt in prompts]


def test_preemption_changes_nothing(settings, wanted):
    few = LLM(**{**settings, "max_model_len": 48}, max_num_seqs=5, num_blocks=16, block_size=4)
    assert [list(o.token_ids) for o in generate(few, PROMPTS, greedy())] == wanted
    assert few.engine.stats.preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_requests_come_back_from_the_host(settings, wanted, caching):
    few = {"max_num_seqs": 5, "num_blocks": 16, "block_size": 4, "enable_prefix_caching": caching}
    swaps = always_load(LLM(**{**settings, "max_model_len": 48}, **few, kv_offloading_size=0.05))
    assert [list(o.token_ids) for o in generate(swaps, PROMPTS, greedy())] == wanted
    stats = swaps.engine.stats
    assert stats.preemptions and stats.stored_blocks
    assert stats.loaded_blocks


def test_an_evicted_prefix_comes_back_from_the_host(settings, reference, tokenizer):
    few = {"max_num_seqs": 1, "num_blocks": 20, "block_size": 8}
    small = always_load(LLM(**{**settings, "max_model_len": 128}, **few, kv_offloading_size=0.1))
    prompts = [f"{'You are a careful assistant. ' * 12}Name a {what}:" for what in ("fruit", "river")]
    other = "In the beginning there was nothing but the sea and the sky above it. " * 7
    for prompt in (prompts[0], other, prompts[1]):
        (output,) = small.generate([prompt], greedy(6), use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected(reference, tokenizer(prompt).input_ids, 6)
    assert output.num_cached_tokens >= 64
    assert small.engine.stats.loaded_blocks
