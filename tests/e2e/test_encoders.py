"""Encoders through the offline interface: they embed, classify and compare, and do not generate."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from support.classifiers import hidden_of, logits_of, write_bare, write_model
from support.encoders import ENCODERS, encoder_config
from support.engines import tiny_llm
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F

from tritonllm import PoolingParams

PROMPTS = [random_tokens(n, VOCAB_SIZE, seed=n) for n in (1, 3, 17, 40, 5, 64, 9, 30)]
WAYS = {"LAST": lambda hidden: hidden[-1], "CLS": lambda hidden: hidden[0], "MEAN": lambda hidden: hidden.mean(0)}
LIMIT = 1e-5


def save_pair_tokenizer(folder: Path) -> None:
    """One that joins two texts as BERT's does, with kinds of tokens."""
    save_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin, end = ("<|endoftext|>", 0), ("<|im_end|>", 2)  # token 1 is padding for RoBERTa
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>",
        pair="<|endoftext|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[begin, end],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def encoder(family: str, labels: int = 0):
    """A tiny checkpoint with a tokenizer, and the model of transformers; with ``labels`` a classifier."""
    folder = Path(mkdtemp(prefix="tiny-encoder-"))
    config = encoder_config(family, vocab_size=VOCAB_SIZE)
    model = write_model(folder, config | {"num_labels": labels}) if labels else write_bare(folder, config)
    save_pair_tokenizer(folder)
    return folder, model


def encoder_llm(family: str, labels: int = 0, **settings):
    settings = {"max_model_len": 64, "num_blocks": None, **settings}
    return tiny_llm(encoder(family, labels)[0], **settings)


def check(found, expected) -> None:
    found = torch.as_tensor(found)
    assert found.shape == expected.shape and float((found - expected).norm() / expected.norm()) < LIMIT


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_are_those_of_transformers(family, way):
    llm, (_, model) = encoder_llm(family, pooler_config={"pooling_type": way}), encoder(family)
    outputs = llm.embed(PROMPTS, use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        check(output.outputs.embedding, F.normalize(WAYS[way](hidden_of(model, prompt)), dim=-1))
    assert llm.engine.stats.prefix_cache_query_tokens == 0
    assert llm.engine.stats.num_free_blocks == llm.engine.stats.num_blocks


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"num_blocks": 17, "async_scheduling": True}])
def test_prompts_come_whole(settings):
    """Each step holds whole prompts, in their order; the next prompt that does not fit waits."""
    llm, (_, model) = encoder_llm("modernbert", **settings), encoder("modernbert")
    steps, launch = [], llm.engine._runner.launch
    llm.engine._runner.launch = lambda plan: steps.append([item.num_tokens for item in plan.scheduled]) or launch(plan)
    outputs = llm.encode(PROMPTS * 2, pooling_task="token_embed", use_tqdm=False)
    for output, prompt in zip(outputs, PROMPTS * 2, strict=True):
        check(output.outputs.data, F.normalize(hidden_of(model, prompt), dim=-1))
    assert sorted(count for step in steps for count in step) == sorted(2 * [len(prompt) for prompt in PROMPTS])
    assert all(sum(step) <= 64 for step in steps) and max(map(len, steps)) > 1


def test_a_step_must_hold_the_longest_prompt():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=32 must hold the longest prompt .* max_model_len=64"):
        encoder_llm("bert", max_num_batched_tokens=32)


def test_the_default_is_the_first_token():
    (output,) = encoder_llm("bert").embed(PROMPTS[3], use_tqdm=False)
    check(output.outputs.embedding, F.normalize(hidden_of(encoder("bert")[1], PROMPTS[3])[0], dim=-1))


def test_sentence_transformers_files_decide(tmp_path):
    folder, model = encoder("bert")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    llm = tiny_llm(tmp_path)
    assert llm.engine.model_config.max_model_len == 48
    check(llm.embed(PROMPTS[3], use_tqdm=False)[0].outputs.embedding, hidden_of(model, PROMPTS[3]).mean(0))


def test_truncation_keeps_the_separator():
    (output,) = encoder_llm("bert").embed(
        PROMPTS[3], pooling_params=PoolingParams(truncate_prompt_tokens=10), use_tqdm=False
    )
    assert output.prompt_token_ids == [*PROMPTS[3][:9], PROMPTS[3][-1]]


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_classes(family):
    llm, (_, model) = encoder_llm(family, labels=3), encoder(family, labels=3)
    for output, prompt in zip(llm.classify(PROMPTS, use_tqdm=False), PROMPTS, strict=True):
        check(output.outputs.probs, logits_of(model, prompt).softmax(-1))


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_a_cross_encoder(family):
    """BERT is told which token is of which text."""
    llm, (_, model) = encoder_llm(family, labels=1), encoder(family, labels=1)
    texts = ["the quick brown fox", "jumps over the lazy dog", "0 1 2 3"]
    for output, text in zip(llm.score(texts[0], texts, use_tqdm=False), texts, strict=True):
        encoded = llm.get_tokenizer()(texts[0], text)
        kinds = torch.tensor([encoded["token_type_ids"]])
        assert kinds.max() == 1 and output.prompt_token_ids == encoded["input_ids"]
        logits = logits_of(model, encoded["input_ids"], **({"token_type_ids": kinds} if family == "bert" else {}))
        assert output.outputs.score == pytest.approx(float(logits.sigmoid()), abs=1e-6)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([0, 1], r"prompt\['token_type_ids'\] must have one entry for each of prompt\['prompt_token_ids'\]"),
        ([0, 1, 2], "token_type_ids must be integers below 2, the kinds that the model knows"),
    ],
)
def test_wrong_kinds_of_tokens(types, message):
    prompt = {"prompt_token_ids": [5, 6, 7], "token_type_ids": types}
    with pytest.raises(ValueError, match=message):
        encoder_llm("bert").embed(prompt)
    with pytest.raises(ValueError, match="token_type_ids"):
        tiny_llm().generate(prompt)


def test_no_kinds_of_tokens():
    prompt = {"prompt_token_ids": [5, 6, 7]}
    one, two = encoder_llm("bert").embed([prompt, {**prompt, "token_type_ids": None}])
    assert one.outputs.embedding == two.outputs.embedding


def test_generation_is_refused_by_name():
    llm = encoder_llm("bert")
    with pytest.raises(ValueError, match="BertModel is an encoder and does not generate: use "):
        llm.generate("the")
    with pytest.raises(ValueError, match="runner='generate': BertModel is an encoder"):
        encoder_llm("bert", runner="generate")
    with pytest.raises(ValueError, match="task='classify' is not one of BertModel: it has embed, token_embed"):
        llm.classify("the")
