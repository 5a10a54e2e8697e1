"""Our decoder against transformers: same checkpoint, same tokens, same logits, however the tokens are fed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.tiny_models import (
    PagedRunner,
    PagedSequence,
    load_decoder,
    random_tokens,
    reference_logits,
    tiny_config,
    write_checkpoint,
)

LIMIT = 1e-5  # of the logits of a whole model; sums in another order are some 1e-6 off

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"type": "linear", "factor": 3.0}
DYNAMIC = {"type": "dynamic", "factor": 2.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-mqa": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-mha-head-32": ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
    "llama-biases-gelu": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-llama3-rope": ("llama", {"rope_scaling": LLAMA3}),
    "llama-linear-rope": ("llama", {"rope_scaling": LINEAR}),
    "llama-dynamic-rope": ("llama", {"rope_scaling": DYNAMIC}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 5, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-head-32": ("qwen3", {"tie_word_embeddings": True, "head_dim": 32, "rope_theta": 1000000.0}),
    "qwen3-bias-gelu-tanh": ("qwen3", {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
PROMPT = 45


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert relative_error(ours, theirs) < LIMIT


@pytest.fixture(scope="module", params=sorted(CASES))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """``(theirs, ours)`` of one case."""
    family, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_checkpoint(folder, tiny_config(family, **changes))
    return theirs, load_decoder(folder)


def test_full_prefill(models):
    theirs, ours = models
    tokens = random_tokens(PROMPT, 101, seed=1)
    assert_same_logits(PagedRunner(ours).prefill(PagedSequence(), tokens), reference_logits(theirs, tokens))


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_chunked_prefill(models, block_size):
    theirs, ours = models
    tokens = random_tokens(PROMPT, 101, seed=2)
    cuts = sorted({0, PROMPT, *random_tokens(5, PROMPT, seed=block_size)})
    chunks = [b - a for a, b in pairwise(cuts)]
    logits = PagedRunner(ours, block_size=block_size).prefill(PagedSequence(), tokens, chunks)
    assert_same_logits(logits, reference_logits(theirs, tokens))


@pytest.mark.parametrize("decode", [True, False], ids=["decodes", "chunks-of-one"])
def test_mixed_batches(models, decode):
    """Prefill chunks and single tokens of several sequences in the same steps, one of them on shared blocks."""
    theirs, ours = models
    runner = PagedRunner(ours)
    prompts = [random_tokens(length, 101, seed=length) for length in (30, 17, 9)]
    prompts.append(prompts[0][:12] + random_tokens(10, 101, seed=5))
    first = PagedSequence()
    got: list[list[torch.Tensor]] = [runner.step([(first, prompts[0][:13])]), [], [], []]
    # three whole blocks of the first sequence serve the last, which has none of its own logits for them
    sequences = [first, PagedSequence(), PagedSequence(), runner.share(first, 12)]
    for sizes in ((1, 5, 9, 4), (7, 1, 0, 1), (1, 10, 0, 1), (8, 1, 0, 4)):
        items = [i for i, size in enumerate(sizes) if size]
        work = [(sequences[i], prompts[i][sequences[i].length :][: sizes[i]]) for i in items]
        for i, logits in zip(items, runner.step(work, decode=decode), strict=True):
            got[i].append(logits)
    for i, prompt in enumerate(prompts):
        assert sequences[i].length == len(prompt)
        start = 12 if i == 3 else 0
        assert_same_logits(torch.cat(got[i]), reference_logits(theirs, prompt)[start:])


def test_decode(models):
    """32 decode steps, two sequences a step."""
    theirs, ours = models
    runner = PagedRunner(ours)
    prompts = [random_tokens(length, 101, seed=length) for length in (3, 20)]
    sequences = [PagedSequence(), PagedSequence()]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        runner.prefill(sequence, prompt)
    more = [random_tokens(32, 101, seed=7 + i) for i in range(2)]
    steps = [runner.step([(sequences[i], [more[i][t]]) for i in range(2)]) for t in range(32)]
    for i in range(2):
        want = reference_logits(theirs, prompts[i] + more[i])[len(prompts[i]) :]
        assert_same_logits(torch.cat([step[i] for step in steps]), want)


def test_greedy(models):
    """32 tokens from each of four prompts."""
    theirs, ours = models
    runner = PagedRunner(ours)
    seen = set()
    for seed in range(4):
        tokens = random_tokens(11, 101, seed=seed)
        got = runner.greedy(tokens, 32)
        assert got == reference_logits(theirs, tokens + got).argmax(-1).tolist()[len(tokens) - 1 : -1]
        seen.update(got)
    assert len(seen) > 4  # agreeing on one repeated token would prove little


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_config_of_transformers_5_in_shards(tmp_path: Path, family, scaling):
    config = tiny_config(family, rope_scaling=scaling, rope_theta=5000.0)
    theirs = write_checkpoint(tmp_path, config, max_shard_size="40KB", config_style=5)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    tokens = random_tokens(PROMPT, 101, seed=4)
    logits = PagedRunner(load_decoder(tmp_path)).prefill(PagedSequence(), tokens)
    assert_same_logits(logits, reference_logits(theirs, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(models, dtype, tmp_path):
    """The error of half precision stays near that of transformers in the same precision."""
    theirs, _ = models
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, dtype=dtype)
    tokens = random_tokens(PROMPT, 101, seed=6)
    exact = reference_logits(theirs, tokens)
    rounded = type(theirs).from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager").eval()
    error = relative_error(PagedRunner(ours).prefill(PagedSequence(), tokens), exact)
    assert error <= 1.2 * relative_error(reference_logits(rounded, tokens), exact)


@given(data=st.data())
def test_any_shape(tmp_path_factory: pytest.TempPathFactory, data):
    """Heads, sizes, ties, biases and rotations in any combination."""
    family = data.draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    kv_heads = data.draw(st.integers(1, 3), label="kv heads")
    heads = kv_heads * data.draw(st.integers(1, 4), label="group")
    head = data.draw(st.sampled_from([16, 24, 40]), label="head size")
    config = tiny_config(
        family,
        hidden_size=heads * head if family == "qwen2" else heads * data.draw(st.sampled_from([8, 24]), label="hidden"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        num_hidden_layers=data.draw(st.integers(1, 2), label="layers"),
        intermediate_size=data.draw(st.integers(1, 70), label="intermediate"),
        vocab_size=data.draw(st.integers(10, 200), label="vocab"),
        tie_word_embeddings=data.draw(st.booleans(), label="tied"),
        rope_scaling=data.draw(st.sampled_from([None, LLAMA3, YARN, LINEAR, DYNAMIC]), label="scaling"),
        attention_bias=data.draw(st.booleans(), label="bias"),
    )
    folder = tmp_path_factory.mktemp("any")
    theirs = write_checkpoint(folder, config)
    ours = load_decoder(folder)
    tokens = random_tokens(data.draw(st.integers(1, 40), label="tokens"), config["vocab_size"], seed=0)
    cut = data.draw(st.integers(0, len(tokens) - 1), label="cut")
    chunks = [cut, len(tokens) - cut] if cut else None
    runner = PagedRunner(ours, block_size=data.draw(st.integers(1, 9), label="block size"))
    assert_same_logits(runner.prefill(PagedSequence(), tokens, chunks), reference_logits(theirs, tokens))
