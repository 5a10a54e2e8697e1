"""Llama 4 behind its first chunk of attention: transformers' tokens, whatever the engine does with the requests."""

from functools import cache

import pytest
from support.engines import NGRAMS, greedy, similar_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import random_tokens, reference_logits
from support.tiny_tokenizer import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from tritonllm.engine.step import shared_prefix

ON_GPU = pytest.mark.also_gpu  # float32, where rounding lies far below the gap between two tokens
CHUNK, BLOCK, NEW = 8, 4, 20
SHARED = random_tokens(13, VOCAB_SIZE, seed=1)  # ends inside of a block, and of the second chunk
PROMPTS = [SHARED + random_tokens(n, VOCAB_SIZE, seed=n) for n in (2, 19, 3, 9)]
PROMPTS += [random_tokens(n, VOCAB_SIZE, seed=n) * 3 for n in (1, 5)]  # what n-grams find again
TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]"
# so that some are preempted, and prompts come in chunks
SIZES = {"block_size": BLOCK, "num_blocks": 30, "max_num_seqs": 4, "max_num_batched_tokens": 24}


def folder(chunk=CHUNK):
    return tiny_checkpoint("llama4_text", attention_chunk_size=chunk)


@cache
def expected(chunk=CHUNK):
    """Greedy tokens of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder(chunk), attn_implementation="eager").eval()
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + NEW:
            tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def test_chunks_count():
    """Tokens of a model whose layers all see the whole sequence are others, and not all are one token."""
    whole = token_ids(tiny_llm(folder(256)).generate(PROMPTS, greedy(NEW), use_tqdm=False))
    assert all(one != other for one, other in zip(whole, expected(), strict=True))
    assert len({token for tokens in expected() for token in tokens}) > 20


def drafts(number, **fields):
    return {"speculative_config": {**NGRAMS, "num_speculative_tokens": number, **fields}}


def of_a_model(model, tree=None):
    fields = {"method": "draft_model", "model": str(model), "speculative_token_tree": tree}
    return drafts(3 if tree is None else tree.count("("), **fields)


ENGINES = {
    "prompts in chunks, preemption, shared blocks": {},
    "planned ahead": {"async_scheduling": True},
    "blocks as long as chunks": {"block_size": 8, "num_blocks": 15},
    "blocks of one token": {"block_size": 1, "num_blocks": 120},
    "n-grams": drafts(3),
    "more drafts than a chunk has tokens": drafts(11, prompt_lookup_min=1),
    "batch invariant": {"deterministic": True},
    "batch invariant with drafts": {"deterministic": True, **drafts(3)},
}


@ON_GPU
@pytest.mark.parametrize("name", ENGINES)
def test_tokens_are_those_of_transformers(name):
    check(**ENGINES[name])


@pytest.mark.long
def test_a_compiled_model(caplog):
    """Attention's metadata are no part of its graphs, and queries grow within them."""
    check(**drafts(3), compilation_config={"mode": 3, "backend": "eager"})
    assert "fits no graph" not in caplog.text


def check(**options):
    llm = tiny_llm(folder(), **{**SIZES, **options})
    for _ in range(2):  # then from the prefix cache
        assert token_ids(llm.generate(PROMPTS, greedy(NEW), use_tqdm=False)) == expected()
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.compilations_after_ready == 0
    if "speculative_config" in options:
        assert stats.num_accepted_tokens > 10
    return stats


@pytest.mark.long
def test_bits_do_not_depend_on_the_batch():
    def told(llm, prompts):
        outputs = llm.generate(prompts, greedy(NEW, logprobs=0, prompt_logprobs=0), use_tqdm=False)
        rows = [[*output.prompt_logprobs[1:], *output.outputs[0].logprobs] for output in outputs]
        return [[logprob.logprob for row in each for logprob in row.values()] for each in rows]

    alone = tiny_llm(folder(), deterministic=True, block_size=BLOCK, enable_prefix_caching=False)
    expected = [told(alone, [prompt])[0] for prompt in PROMPTS]
    assert told(tiny_llm(folder(), deterministic=True, **SIZES), PROMPTS) == expected
    assert told(tiny_llm(folder(), deterministic=True, **{**SIZES, **drafts(5)}), PROMPTS) == expected


@ON_GPU
@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_model(ahead):
    """Its drafts are right, across the ends of chunks, too."""
    stats = check(**of_a_model(folder()), async_scheduling=ahead)
    assert stats.num_accepted_tokens == stats.num_draft_tokens


@ON_GPU
@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_tree_of_drafts_ends_with_the_chunk(ahead):
    """The deepest path is right, but nodes behind the end of a chunk are no drafts."""
    stats = check(**of_a_model(folder(), TREE), async_scheduling=ahead, num_blocks=60)
    per_pos = stats.num_accepted_tokens_per_pos
    assert per_pos[0] > per_pos[4] > 0
    check(**of_a_model(similar_checkpoint("llama4_text"), TREE), async_scheduling=ahead, num_blocks=60)


@ON_GPU
def test_shared_keys_are_read_once_by_the_layers_that_see_all(monkeypatch):
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 1)
    check(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64)


@pytest.mark.usefixtures("imported_ranks")
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "async_scheduling": True},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, **drafts(3)},
        {"tensor_parallel_size": 2, **of_a_model("self", TREE)},
    ],
    ids=str,
)
@pytest.mark.long
def test_ranks(options):
    if "speculative_config" in options and options["speculative_config"].get("model") == "self":
        options = {**options, **of_a_model(folder(), TREE)}
    check(**options)


def test_a_block_must_divide_a_chunk():
    message = r"block_size=3 must divide the model's attention_chunk_size=8, .* or a max_model_len up to 8"
    with pytest.raises(ValueError, match=message):
        tiny_llm(folder(), block_size=3)
    llm = tiny_llm(folder(), block_size=3, max_model_len=8)
    prompt = PROMPTS[0][:5]
    assert token_ids(llm.generate([prompt], greedy(3))) == token_ids(tiny_llm(folder()).generate([prompt], greedy(3)))
    with pytest.raises(ValueError, match="block_size=3 must divide the model's attention_chunk_size=8"):
        tiny_llm(block_size=3, **of_a_model(folder()))
