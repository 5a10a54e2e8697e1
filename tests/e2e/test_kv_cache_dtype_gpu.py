"""A cache in float8 on a GPU: captured steps, whatever is done with the requests, and memory for twice the blocks."""

import json

import pytest
import torch
from support.engines import always_load, greedy, tiny_checkpoint, tiny_llm, token_ids
from support.real_configs import QWEN3_0_6B
from support.rounded_keys import SCALES, check_against, scaled_checkpoint
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import LLM, SamplingParams

WITHOUT = not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WITHOUT, reason="needs a GPU with float8")]

FP8, E5M2 = {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}
SHARED = random_tokens(260, 10000, seed=9)
PROMPTS = [random_tokens(n, 10000, seed=n) for n in (1, 700, 33, 128, 2, 511)]
PROMPTS += [SHARED + random_tokens(n, 10000, seed=n) for n in (5, 40)] + [random_tokens(7, 10000, seed=3) * 9]
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
KINDS = [
    greedy(40),
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=3, max_tokens=30, frequency_penalty=1.0, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=20, logprobs=2, prompt_logprobs=1),
]
# The difference of two log-probabilities that a few keys on the other side of a border can make up for: on an H200 up
# to 0.0126, for a prompt of one token; rounding as a whole makes up to 0.056.
TIE = 2e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(json.dumps({**QWEN3_0_6B, "num_hidden_layers": 6}))
    return str(folder)


def make(folder, **options):
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 2048}
    return LLM(folder, **{**settings, "num_blocks": 2048, "max_num_seqs": 16, **FP8, **options})


def told(llm, prompts=PROMPTS):
    """Greedy tokens, each with the log-probabilities of the two most likely ones."""
    outputs = llm.generate(prompts, greedy(40, logprobs=2), use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        [(token, {t: x.logprob for t, x in row.items()}) for token, row in zip(c.token_ids, c.logprobs, strict=True)]
        for c in completions
    ]


def check_equal(found, want):
    """In float32 sums in another order put one key in some ten thousand on the other side of a border between two
    float8: texts may part where two tokens are as likely, and before that log-probabilities are the same but for it."""
    parted = 0
    for text, expected in zip(found, want, strict=True):
        for (token, row), (other, other_row) in zip(text, expected, strict=True):
            if token != other:
                assert abs(row[token] - row.get(other, row[token] - 1)) < TIE, (row, other_row)
                parted += 1
                break
            assert abs(row[token] - other_row[token]) < TIE
    assert parted <= len(want) // 3


@pytest.fixture(scope="module")
def eager(folder):
    """One prompt at a time, with nothing captured and nothing cached."""
    return told(make(folder, enforce_eager=True, max_num_seqs=1, enable_prefix_caching=False))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 100},
        {"num_blocks": 130},
        {"block_size": 64, "num_blocks": 512},
        {"speculative_config": NGRAMS},
        {"compilation_config": {"mode": 3}},
        {"num_blocks": 130, "kv_offloading_size": 1.0},
    ],
    ids=str,
)
def test_captured_steps_give_what_eager_ones_give(folder, eager, options):
    llm = make(folder, **options)
    assert llm.engine._runner.num_graphs > 0
    if "kv_offloading_size" in options:
        always_load(llm)
    for _ in range(2):  # the second time from the prefix cache, or the host
        check_equal(told(llm), eager)
    stats = llm.engine.stats
    assert (stats.num_free_blocks, stats.compilations_after_ready) == (stats.num_blocks, 0)
    assert stats.preemptions or options.get("num_blocks") != 130
    assert stats.loaded_blocks or "kv_offloading_size" not in options


def test_rounding_changes_log_probabilities(folder, eager):
    """More than the other tests allow, or they would show nothing."""
    plain = told(make(folder, kv_cache_dtype="auto"))
    firsts = [(text[0][1], other[0][1]) for text, other in zip(plain, eager, strict=True)]
    assert max(abs(row[token] - other[token]) for row, other in firsts for token in row.keys() & other.keys()) > TIE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", [{}, E5M2, {"speculative_config": NGRAMS}, {"deterministic": True}], ids=str)
def test_nothing_compiles_after_ready(folder, dtype, options):
    """In 16 bits, which Hopper's own kernels take: every kind of request, twice."""
    llm = make(folder, dtype=dtype, max_num_batched_tokens=512, **options)
    params = [KINDS[i % len(KINDS)] for i in range(len(PROMPTS))]
    if "speculative_config" in options:
        params = [greedy(40)] * len(PROMPTS)
    for _ in range(2):
        llm.generate(PROMPTS, params, use_tqdm=False)
    assert llm.engine.stats.compilations_after_ready == 0
    assert llm.engine._runner.caches.dtype == (torch.float8_e5m2 if options is E5M2 else torch.float8_e4m3fn)


def test_few_keys_have_their_own_captured_steps(folder):
    """As many as of a 16-bit cache. Of two sequences the decodes up to 1,792 keys are short."""
    prompts = [random_tokens(1770, 10000, seed=seed) for seed in (5, 6)]
    graphs = []
    for name in ("fp8", "auto"):
        llm = make(folder, dtype="bfloat16", kv_cache_dtype=name, enable_prefix_caching=False)
        want = token_ids(llm.generate(prompts, greedy(60), use_tqdm=False))
        assert token_ids(llm.generate(prompts, greedy(60), use_tqdm=False)) == want
        assert llm.engine.stats.compilations_after_ready == 0
        graphs.append(llm.engine._runner.num_graphs)
    assert graphs[0] == graphs[1] > 0


def test_a_request_has_the_same_bits_alone_and_in_a_batch(folder):
    alone = make(folder, dtype="bfloat16", deterministic=True, enable_prefix_caching=False)
    want = [told(alone, [prompt])[0] for prompt in PROMPTS]
    for options in ({}, {"max_num_batched_tokens": 100}, {"num_blocks": 130}, {"enforce_eager": True}):
        llm = make(folder, dtype="bfloat16", deterministic=True, **options)
        for _ in range(2):
            assert told(llm) == want


@pytest.mark.parametrize("head_size", [16, 64, 128])
def test_results_are_those_of_rounded_keys_and_values(head_size):
    """With the scales of a checkpoint, and without; float32, beside transformers on the CPU."""
    tokens = random_tokens(60, VOCAB_SIZE, seed=3)
    plain = tiny_checkpoint(head_dim=head_size)
    for folder, scales in ((plain, {}), (scaled_checkpoint(head_dim=head_size), SCALES)):
        llm = tiny_llm(folder, dtype="float32", max_num_batched_tokens=32, **FP8)
        check_against(plain, llm, tokens, scales)
        assert llm.engine.stats.compilations_after_ready == 0
    check_against(plain, tiny_llm(plain, dtype="float32", **E5M2), tokens, {}, dtype=torch.float8_e5m2)


def test_scales_that_are_measured_at_the_start(folder):
    """Steps are captured with the same ones that an engine without captured steps measures."""
    plain = make(folder, calculate_kv_scales=True, enforce_eager=True, max_num_seqs=1, enable_prefix_caching=False)
    llm = make(folder, calculate_kv_scales=True)
    scales, others = ([view.divided_by for view in one.engine._runner.caches.views] for one in (llm, plain))
    assert scales == others and any(scale != 1.0 for pair in scales for scale in pair)
    check_equal(told(llm), told(plain))
    assert llm.engine.stats.compilations_after_ready == 0


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "llama4_text", "gemma4_text", "mpt"])
def test_layers_of_every_kind(family):
    """Sinks, windows, soft caps, chunks, layers that read the keys of others, ALiBi."""
    prompts = [random_tokens(n, VOCAB_SIZE, seed=n) for n in (5, 23, 40, 17)]
    alone = tiny_llm(tiny_checkpoint(family), dtype="float32", max_num_seqs=1, enable_prefix_caching=False, **FP8)
    llm = tiny_llm(tiny_checkpoint(family), dtype="float32", num_blocks=22, max_model_len=64, max_num_seqs=4, **FP8)
    want = token_ids(alone.generate(prompts, greedy(20), use_tqdm=False))
    found = [token_ids(llm.generate(prompts, greedy(20), use_tqdm=False)) for _ in range(2)]
    for texts in found:  # one of four may part at a tie
        assert sum(text == expected for text, expected in zip(texts, want, strict=True)) >= 3
    assert llm.engine.stats.compilations_after_ready == 0


def test_a_cache_that_slept_goes_on(folder):
    llm = make(folder, dtype="bfloat16", deterministic=True, enable_sleep_mode=True)
    want = told(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.reload_weights()
        assert told(llm) == want


def test_the_same_memory_holds_twice_the_blocks(folder):
    def blocks(name):
        llm = make(folder, dtype="bfloat16", num_blocks=None, gpu_memory_utilization=0.3, kv_cache_dtype=name)
        return llm.engine.stats.num_blocks, llm.engine._runner.block_bytes

    (wide, wide_bytes), (narrow, narrow_bytes) = blocks("auto"), blocks("fp8")
    assert narrow_bytes * 2 == wide_bytes and 1.9 * wide < narrow < 2.1 * wide


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_two_gpus_give_what_one_gives(folder, eager, ranks):
    llm = make(folder, **ranks)
    check_equal(told(llm), eager)
    assert llm.engine.stats.compilations_after_ready == 0
