"""Prompts that are pooled instead of continued, through the offline interface on the CPU path."""

import json
from functools import cache
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import save_file
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_configs import WITHOUT_FAMILY
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from tritonllm import LLM, PoolingParams

PROMPTS = [random_tokens(n, VOCAB_SIZE, seed=n) for n in (1, 3, 17, 40, 5, 64, 9, 30)]
WAYS = {"LAST": lambda hidden: hidden[-1], "CLS": lambda hidden: hidden[0], "MEAN": lambda hidden: hidden.mean(0)}
LIMIT = 1e-5  # as in tests/models/test_parity.py


@cache
def reference(checkpoint: Path | None = None):
    folder = checkpoint or tiny_checkpoint()
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


@torch.inference_mode()
def hidden_states(prompt, checkpoint: Path | None = None):
    return reference(checkpoint).base_model(torch.tensor([prompt])).last_hidden_state[0]


def everything_is_free(llm: LLM) -> bool:
    stats = llm.engine.stats
    return stats.num_free_blocks == stats.num_blocks and not llm.engine.has_unfinished_requests()


def check(outputs, expected) -> None:
    for output, vector in zip(outputs, expected, strict=True):
        found = torch.tensor(output.outputs.embedding)
        assert float((found - vector).norm() / vector.norm()) < LIMIT


def variant(tmp_path: Path, **fields) -> Path:
    """The tiny checkpoint with other fields in config.json."""
    folder = copytree(tiny_checkpoint(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"max_num_seqs": 2, "async_scheduling": True},
        {"num_blocks": 26, "max_num_batched_tokens": 16, "async_scheduling": True},
    ],
    ids=["plain", "chunks", "ahead", "few-blocks"],
)
def test_embeddings_are_those_of_transformers(way, settings):
    """However a prompt is cut into steps, and whatever blocks are cached."""
    llm = tiny_llm(max_model_len=100, pooler_config={"pooling_type": way}, **settings)
    expected = [F.normalize(WAYS[way](hidden_states(prompt)), dim=-1) for prompt in PROMPTS]
    for _ in range(2):
        check(llm.embed(PROMPTS, use_tqdm=False), expected)
    assert everything_is_free(llm)
    assert llm.engine.stats.generated_tokens == 0


def test_a_vector_for_each_token():
    llm = tiny_llm(max_num_batched_tokens=8)
    for _ in range(2):
        outputs = llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            vectors = F.normalize(hidden_states(prompt), dim=-1)
            assert output.outputs.data.shape == vectors.shape and output.prompt_token_ids == prompt
            assert float((output.outputs.data - vectors).norm() / vectors.norm()) < LIMIT


def test_without_normalization():
    outputs = tiny_llm().embed(PROMPTS, pooling_params=PoolingParams(normalize=False), use_tqdm=False)
    check(outputs, [hidden_states(prompt)[-1] for prompt in PROMPTS])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "async_scheduling": True}],
    ids=["plain", "drafts"],
)
def test_the_engine_generates_beside(way, settings):
    """In the same steps; neither kind of request changes what the other one gets."""
    llm = tiny_llm(max_num_batched_tokens=32, pooler_config={"pooling_type": way}, **settings)
    alone = token_ids(llm.generate(PROMPTS, greedy(n=2), use_tqdm=False))
    llm.reset_prefix_cache()
    engine = llm.engine
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"g{index}", {"prompt_token_ids": prompt}, greedy(n=2))
        engine.add_request(f"p{index}", {"prompt_token_ids": prompt}, PoolingParams(task="embed"))
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert token_ids([ended[f"g{index}"] for index in range(len(PROMPTS))]) == alone
    for index, prompt in enumerate(PROMPTS):
        vector = F.normalize(WAYS[way](hidden_states(prompt)), dim=-1)
        assert float((ended[f"p{index}"].outputs.data - vector).norm()) < LIMIT
    assert everything_is_free(llm)


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_prompts_of_one_token_beside_drafts(task):
    """They look like decodes, but no step verifies drafts beside them."""
    llm = tiny_llm(speculative_config="ngram:3", pooler_config={"pooling_type": "MEAN"})
    prompt = [5, 6, 7, 8] * 4
    alone = token_ids(llm.generate(prompt, greedy(30), use_tqdm=False))
    engine, ended = llm.engine, {}
    engine.add_request("g", {"prompt_token_ids": prompt}, greedy(30))
    for token in range(10):
        engine.add_request(f"p{token}", [token], PoolingParams(task=task))
        ended |= {output.request_id: output for output in (*engine.step(), *engine.step()) if output.finished}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert token_ids([ended["g"]]) == alone
    for token in range(10):
        vector = F.normalize(hidden_states([token])[0], dim=-1)
        assert float((ended[f"p{token}"].outputs.data.flatten() - vector).norm()) < LIMIT


def test_the_prefix_cache_serves_last_tokens_only():
    prompt = PROMPTS[5]
    llm = tiny_llm()
    assert [llm.embed(prompt, use_tqdm=False)[0].num_cached_tokens for _ in range(2)] == [0, 60]
    skip = PoolingParams(skip_reading_prefix_cache=True)
    assert llm.embed(prompt, pooling_params=skip, use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.encode(prompt, pooling_task="token_embed", use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.generate(prompt, greedy(1), use_tqdm=False)[0].num_cached_tokens == 60  # what was embedded is known


def test_a_prompt_may_fill_the_model():
    llm = tiny_llm(max_model_len=40, num_blocks=10)
    check(llm.embed([PROMPTS[3]], use_tqdm=False), [F.normalize(hidden_states(PROMPTS[3])[-1], dim=-1)])
    with pytest.raises(ValueError, match="prompt has 64 tokens, but it must fit max_model_len=40"):
        llm.embed(PROMPTS[5])
    for count, kept in ((5, 5), (-1, 40)):
        params = PoolingParams(truncate_prompt_tokens=count)
        (output,) = llm.embed(PROMPTS[5], pooling_params=params, use_tqdm=False)
        assert output.prompt_token_ids == PROMPTS[5][-kept:]
        check([output], [F.normalize(hidden_states(PROMPTS[5][-kept:])[-1], dim=-1)])


def test_scores_are_cosines():
    llm = tiny_llm()
    texts = ["the quick brown fox", "jumps over the lazy dog", "0 1 2 3"]
    vectors = [torch.tensor(output.outputs.embedding) for output in llm.embed(texts, use_tqdm=False)]
    scores = [output.outputs.score for output in llm.score(texts[0], texts, use_tqdm=False)]
    assert scores == pytest.approx([float(vectors[0] @ vector) for vector in vectors], abs=1e-6)
    assert scores[0] == pytest.approx(1.0, abs=1e-6)
    pairs = [output.outputs.score for output in llm.score(texts, texts[::-1], use_tqdm=False)]
    assert pairs == pytest.approx([scores[2], float(vectors[1] @ vectors[1]), scores[2]], abs=1e-6)
    with pytest.raises(ValueError, match="data_1 has 2 entries and data_2 has 3"):
        llm.score(texts[:2], texts)


@pytest.mark.parametrize(
    ("params", "task", "message"),
    [
        (PoolingParams(), None, "pooling needs a task"),
        (PoolingParams(), "classify", "task='classify' is not one of Qwen3ForCausalLM: it has embed, token_embed"),
        (PoolingParams(task="embed"), "token_embed", "pooling_params has task='embed', but 'token_embed' is asked"),
        (PoolingParams(dimensions=8), "embed", "dimensions=8: .* set is_matryoshka to true"),
        (PoolingParams(step_tag_id=3), "embed", "step_tag_id is for token_classify and token_embed"),
        (greedy(), "embed", "pooling_params must be PoolingParams, got SamplingParams"),
        ([PoolingParams()], "embed", "pooling_params has 1 entries for 2 prompts"),
    ],
)
def test_bad_requests_are_refused_by_name(params, task, message):
    llm = tiny_llm()
    with pytest.raises(ValueError, match=message):
        llm.encode(PROMPTS[:2], params, pooling_task=task)
    assert everything_is_free(llm)


def test_what_an_engine_was_made_for():
    with pytest.raises(ValueError, match="made with runner='pooling' and does not generate: leave runner out"):
        tiny_llm(runner="pooling").generate("the")
    with pytest.raises(ValueError, match=r"task='embed' is not one of .*: this engine pools nothing"):
        tiny_llm(runner="generate").embed("the")
    with pytest.raises(ValueError, match=r"convert='classify': .*lm_head\.weight has no place"):
        tiny_llm(convert="classify")


@pytest.mark.parametrize(
    ("fields", "good", "bad", "message"),
    [
        ({"is_matryoshka": True}, 24, 65, "dimensions must be at most 64"),
        ({"matryoshka_dimensions": [16, 32]}, 32, 24, "dimensions must be one of 16, 32, got 24"),
    ],
)
def test_embeddings_that_can_be_cut(tmp_path, fields, good, bad, message):
    """They are normalized after the cut."""
    llm = tiny_llm(variant(tmp_path, **fields))
    expected = [F.normalize(hidden_states(prompt)[-1][:good], dim=-1) for prompt in PROMPTS]
    check(llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=good), use_tqdm=False), expected)
    with pytest.raises(ValueError, match=message):
        llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=bad))


def test_an_aborted_request():
    engine = tiny_llm().engine
    engine.add_request("a", "the", PoolingParams(task="embed"))
    (output,) = engine.abort_request("a")
    assert (output.finished, output.error, output.outputs.data.numel()) == (True, "the request was aborted", 0)
    assert not engine.has_unfinished_requests()


def test_sentence_transformers_files_decide(tmp_path):
    """The mean of the tokens through a dense layer, not normalized."""
    folder = variant(tmp_path)
    weight, bias = torch.randn(24, 64), torch.randn(24)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path, config in (
        (
            "1_Pooling",
            {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
        ),
        ("2_Dense", {"in_features": 64, "out_features": 24, "activation_function": "torch.nn.modules.activation.Tanh"}),
    ):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    llm = tiny_llm(folder)
    vectors = [torch.tanh(F.linear(hidden_states(prompt).mean(0), weight, bias)) for prompt in PROMPTS]
    check(llm.embed(PROMPTS, use_tqdm=False), vectors)
    normalized = llm.embed(PROMPTS, pooling_params=PoolingParams(normalize=True), use_tqdm=False)
    check(normalized, [F.normalize(vector, dim=-1) for vector in vectors])


def test_models_that_run_through_transformers(tmp_path):
    """The fallback decoder pools, too."""

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 101, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None}
    config = AutoConfig.for_model(WITHOUT_FAMILY, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    prompts = [[token % 101 for token in prompt] for prompt in PROMPTS]
    llm = tiny_llm(tmp_path, skip_tokenizer_init=True, pooler_config={"pooling_type": "MEAN"})
    expected = [F.normalize(hidden_states(prompt, tmp_path).mean(0), dim=-1) for prompt in prompts]
    check(llm.embed(prompts, use_tqdm=False), expected)
