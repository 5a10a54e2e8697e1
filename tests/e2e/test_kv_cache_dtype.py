"""A cache in float8: what is computed is what transformers computes with rounded keys and values, whatever the engine
does with the requests; and a block has a quarter of float32's bytes, wherever it goes."""

import math
import warnings
from shutil import copytree
from unittest.mock import patch

import pytest
import torch
from models.causal_types import VOCABULARY, build, tiny
from safetensors.torch import load_file, save_file
from support.eagle_heads import random_eagle_head, with_head
from support.engines import NGRAMS, always_load, greedy, similar_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.kv_sharing import FULL, connected_llm, decode, peer_engines, prefill, run_prompts
from support.rounded_keys import SCALES, check_against, log_probabilities, scaled_checkpoint
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE
from support.waiting import PATIENCE

from tritonllm.engine.step import shared_prefix
from tritonllm.layers import attention

FP8, E5M2 = {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}
SHARED = random_tokens(13, VOCAB_SIZE, seed=1)
PROMPTS = [SHARED + random_tokens(n, VOCAB_SIZE, seed=n) for n in (10, 17)]
PROMPTS += [random_tokens(n, VOCAB_SIZE, seed=n) * 3 for n in (3, 5)]  # what n-grams find again
TIGHT = {"num_blocks": 22, "max_model_len": 64, "max_num_seqs": 4}


def run(llm):
    return token_ids(llm.generate(PROMPTS, greedy(12), use_tqdm=False))


def alone_of(family):
    """One prompt at a time, in a cache with room for all, with nothing cached."""
    return run(tiny_llm(tiny_checkpoint(family), max_num_seqs=1, enable_prefix_caching=False, **FP8))


@pytest.fixture(scope="module")
def alone():
    return alone_of("qwen3")


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", pytest.param("gemma2", marks=pytest.mark.long)])
def test_results_are_those_of_rounded_keys_and_values(family):
    """By itself; as a prompt in chunks; and decoded token by token, as the tokens behind a prompt."""
    folder = tiny_checkpoint(family)
    llm = tiny_llm(folder, max_num_batched_tokens=9, **FP8)
    tokens = random_tokens(25, VOCAB_SIZE, seed=3)
    check_against(folder, llm, tokens, {})
    decoded = tokens + token_ids(llm.generate([tokens], greedy(8), use_tqdm=False))[0]
    likeliest = log_probabilities(folder, decoded, {}).argmax(-1)[len(tokens) - 1 : -1].tolist()
    assert likeliest == decoded[len(tokens) :]


def test_e5m2_is_rounded_without_scales():
    """Whatever the checkpoint has; and in a batch, preempted, drafted and found again as alone."""
    llm = tiny_llm(scaled_checkpoint(), max_num_batched_tokens=9, **E5M2)
    check_against(tiny_checkpoint(), llm, random_tokens(25, VOCAB_SIZE, seed=3), {}, dtype=torch.float8_e5m2)
    assert {copies.pool.dtype for copies in llm.engine._runner.caches.copies} == {torch.float8_e5m2}
    alone = run(tiny_llm(max_num_seqs=1, enable_prefix_caching=False, **E5M2))
    llm = tiny_llm(**TIGHT, **E5M2, speculative_config=NGRAMS)
    assert run(llm) == run(llm) == alone and llm.engine.stats.preemptions


@pytest.fixture(scope="module")
def scaled_alone():
    """One prompt at a time, by a model whose checkpoint has scales."""
    return run(tiny_llm(scaled_checkpoint(), max_num_seqs=1, enable_prefix_caching=False, **FP8))


def test_scales_of_the_checkpoint(scaled_alone):
    """A cache of 32 bits makes no use of them."""
    llm = tiny_llm(scaled_checkpoint(), max_num_batched_tokens=9, **FP8)
    check_against(tiny_checkpoint(), llm, random_tokens(25, VOCAB_SIZE, seed=3), SCALES)
    assert run(tiny_llm(scaled_checkpoint())) == run(tiny_llm()) != scaled_alone


MEASURED = {**FP8, "calculate_kv_scales": True}


@pytest.fixture(scope="module")
def loud(tmp_path_factory):
    """A checkpoint whose second layer has values thirty times as large as the others."""
    folder = tmp_path_factory.mktemp("loud")
    copytree(tiny_checkpoint(), folder, dirs_exist_ok=True)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 30
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def scales_of(llm):
    return [view.divided_by for view in llm.engine._runner.caches.views]


def test_measured_scales(loud):
    """Powers of two that leave room for as much again, whatever the requests."""
    llm = tiny_llm(loud, **MEASURED)
    scales = scales_of(llm)
    others = scales[1].k_scale, *scales[0], *scales[2]
    assert scales[1].v_scale >= 8 * max(others) and max(others) <= 2 * min(others)
    check_against(loud, llm, random_tokens(25, VOCAB_SIZE, seed=3), dict(enumerate(scales)))
    for view in llm.engine._runner.caches.views:
        for cache, scale in zip((view.k, view.v), view.divided_by, strict=True):
            assert math.frexp(scale)[0] == 0.5 and 56 < cache.float().abs().max() < 448
    tokens = run(llm)
    again = tiny_llm(loud, max_num_seqs=1, enable_prefix_caching=False, **MEASURED)
    assert scales_of(again) == scales and run(again) == tokens


def test_scales_of_the_checkpoint_are_not_measured():
    assert scales_of(tiny_llm(scaled_checkpoint(), **MEASURED)) == scales_of(tiny_llm(scaled_checkpoint(), **FP8))


@pytest.mark.usefixtures("imported_ranks")
def test_ranks_measure_the_same_scales():
    assert run(tiny_llm(tensor_parallel_size=2, **MEASURED)) == run(tiny_llm(**MEASURED))


@pytest.mark.parametrize(
    "options",
    [
        {**TIGHT, "speculative_config": NGRAMS},
        {"deterministic": True},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=["verified drafts", "batch invariant", "two stages", "split keys"],
)
@pytest.mark.usefixtures("imported_ranks")
def test_every_kind_of_attention_takes_the_scales(scaled_alone, options):
    assert run(tiny_llm(scaled_checkpoint(), **FP8, **options)) == scaled_alone


def test_keys_that_are_read_once_for_several_sequences(scaled_alone, monkeypatch):
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 1)
    with patch.object(attention, "cascade_decode_attention", wraps=attention.cascade_decode_attention) as cascade:
        assert run(tiny_llm(scaled_checkpoint(), **FP8)) == scaled_alone
    assert cascade.call_count


def test_scales_stay():
    """Captured steps hold them as numbers."""
    llm = tiny_llm(scaled_checkpoint(), **FP8)
    tokens = run(llm)
    with pytest.raises(ValueError, match=r"reload_weights: .* its k_scale or v_scale differs; start an engine for it"):
        llm.engine.reload_weights(str(similar_checkpoint()))
    name = "model.layers.1.self_attn.v_scale"
    llm.engine.load_weights([(name, torch.tensor(SCALES[1][1]))])
    with pytest.raises(ValueError, match=f"tensor {name}: scales of the cache stay as the engine was started with"):
        llm.engine.load_weights([(name, torch.tensor(0.5))])
    llm.reset_prefix_cache()
    assert run(llm) == tokens


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_model_can_run_through_transformers(tmp_path, deterministic):
    build(tiny("beam"), "beam").save_pretrained(tmp_path)
    settings = {"skip_tokenizer_init": True, "max_model_len": 64, "dtype": "float32", "deterministic": deterministic}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        llm = tiny_llm(tmp_path, **settings, **FP8)
    check_against(tmp_path, llm, random_tokens(25, VOCABULARY, seed=3), {})


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"speculative_config": NGRAMS},
        {"speculative_config": {**NGRAMS, "method": "draft_model", "model": str(similar_checkpoint())}},
        {"deterministic": True},
        pytest.param({"compilation_config": {"mode": 3, "backend": "eager"}}, marks=pytest.mark.long),
    ],
    ids=["planned ahead", "n-grams", "a draft model", "batch invariant", "compiled"],
)
def test_tokens_are_those_of_one_alone(alone, options):
    """In a batch, in chunks, preempted; then once more, with what the prefix cache has."""
    llm = tiny_llm(**TIGHT, **FP8, **options)
    assert run(llm) == run(llm) == alone and llm.engine.stats.preemptions


@pytest.mark.parametrize("family", ["gemma4_text", pytest.param("llama4_text", marks=pytest.mark.long)])
def test_layers_of_other_kinds(family):
    """Layers that differ, and of which one reads the keys of another; chunks of attention."""
    assert run(tiny_llm(tiny_checkpoint(family), **TIGHT, **FP8, speculative_config=NGRAMS)) == alone_of(family)


def test_the_head_of_a_drafter_has_such_a_cache_too(alone):
    llm = with_head(tiny_checkpoint(), random_eagle_head("qwen3"), **FP8)
    assert run(llm) == alone
    assert {copies.pool.dtype for copies in llm.engine._runner.caches.copies} == {torch.float8_e4m3fn}


@pytest.mark.usefixtures("imported_ranks")
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "async_scheduling": True},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
    ],
    ids=["two ranks", "two stages", "split keys"],
)
@pytest.mark.long
def test_ranks_give_the_tokens_of_one(alone, options):
    assert run(tiny_llm(**TIGHT, **FP8, **options)) == alone


def test_blocks_come_back_from_the_host(alone):
    settings = {"num_blocks": 18, "max_model_len": 64, "max_num_seqs": 1, "kv_offloading_size": 0.01}
    llm = always_load(tiny_llm(**settings, **FP8))
    assert run(llm) == run(llm) == alone
    assert llm.engine.stats.loaded_blocks
    assert llm.engine._runner.host_slots == int(0.01 * (1 << 30)) // llm.engine._runner.block_bytes


def test_a_cache_that_slept_is_whole(alone):
    llm = tiny_llm(enable_sleep_mode=True, **FP8)
    assert run(llm) == alone
    llm.sleep()
    llm.wake_up()
    assert run(llm) == alone


def test_blocks_go_to_engines_with_such_a_cache_alone(tmp_path):
    """By a folder, of which engines with another cache read nothing."""
    folder = {"path": str(tmp_path)}
    first = connected_llm("FileStore", "kv_producer", folder, scaled_checkpoint(), **FP8)
    tokens, _ = run_prompts(first)
    first.engine._transfer.connector.close()
    consumers = [
        connected_llm("FileStore", "kv_consumer", folder, scaled_checkpoint(times), kv_cache_dtype=name)
        for times, name in ((1.0, "fp8_e4m3"), (3.0, "fp8"), (1.0, "fp8_e5m2"), (1.0, "auto"))
    ]
    same, other_scales, e5m2, wide = (run_prompts(llm) for llm in consumers)
    assert same == (tokens, FULL)
    assert other_scales[1] == e5m2[1] == wide[1] == [0] * len(FULL)
    assert wide[0] == run_prompts(tiny_llm())[0] != tokens != other_scales[0]


def test_an_engine_with_another_cache_says_so(caplog):
    """Engines that compute prompts and those that go on with them must have the same cache."""
    with peer_engines() as engines:
        producer, consumer, other = (
            engines(role, engine=options, wait=wait)
            for role, options, wait in (
                ("kv_producer", FP8, 1.0),
                ("kv_consumer", FP8, PATIENCE),
                ("kv_consumer", {}, 0),
            )
        )
        offers = prefill(producer)
        assert decode(consumer, offers) == (run_prompts(tiny_llm(**FP8))[0], FULL)
        assert decode(other, offers) == (run_prompts(tiny_llm())[0], [0] * len(FULL))
    assert "has none of the prompt's blocks: is it of other weights, dtype or block_size?" in caplog.text


def test_the_same_memory_holds_more_blocks():
    def blocks(**options):
        llm = tiny_llm(num_blocks=None, cpu_cache_bytes=1 << 20, **options)
        assert llm.engine.stats.num_blocks == (1 << 20) // llm.engine._runner.block_bytes
        return llm.engine._runner.block_bytes

    narrow = blocks(**FP8)
    assert narrow == 2 * 3 * 4 * 2 * 16  # keys and values, layers, tokens, heads, elements
    assert blocks(dtype="bfloat16", **FP8) == narrow
    assert blocks(dtype="bfloat16") == 2 * narrow and blocks() == 4 * narrow


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype='bfloat16': this model runs in float32.*add dtype='bfloat16'"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of .*fp8_e5m2, got 'int8'"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales: a cache of kv_cache_dtype='auto' has no scales"),
        ({"calculate_kv_scales": True, **E5M2}, "calculate_kv_scales: a cache of kv_cache_dtype='fp8_e5m2' has no"),
        ({"calculate_kv_scales": 1, **FP8}, "calculate_kv_scales must be of type bool"),
        (
            {"calculate_kv_scales": True, **FP8, "pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            "calculate_kv_scales: measured by one stage",
        ),
    ],
)
def test_a_cache_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(**options)


def test_the_models_dtype_by_name_is_as_auto():
    assert tiny_llm(kv_cache_dtype="float32").engine._runner.caches.dtype == torch.float32
    llm = tiny_llm(kv_cache_dtype="bfloat16", dtype="bfloat16")
    assert llm.engine._runner.caches.dtype == torch.bfloat16
