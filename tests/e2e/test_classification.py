"""Classifiers, cross-encoders and reward models through the offline interface."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.classifiers import hidden_of, logits_of, write_bare, write_model
from support.engines import tiny_llm
from support.tiny_models import random_tokens, tiny_config
from support.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from torch.nn import functional as F
from transformers import PreTrainedModel

from tritonllm import PoolingParams

PROMPTS = [random_tokens(n, VOCAB_SIZE - 1, seed=n) for n in (1, 3, 17, 40, 5, 64, 9, 30)]
LIMIT = 1e-5


@cache
def classifier(labels: int = 3, **fields) -> tuple[Path, PreTrainedModel]:
    """A tiny Qwen3ForSequenceClassification, and the same of transformers."""
    folder = Path(mkdtemp(prefix="tiny-classifier-"))
    config = tiny_config("qwen3", vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0)
    model = write_model(folder, config | {"num_labels": labels, "pad_token_id": VOCAB_SIZE - 1, **fields})
    save_tokenizer(folder)
    return folder, model


def close(found, expected) -> bool:
    found = torch.as_tensor(found)
    return found.shape == expected.shape and float((found - expected).norm() / expected.norm()) < LIMIT


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 8, "async_scheduling": True}])
def test_probabilities_are_those_of_transformers(settings):
    folder, model = classifier()
    llm = tiny_llm(folder, **settings)
    logits = [logits_of(model, prompt) for prompt in PROMPTS]
    for output, expected in zip(llm.classify(PROMPTS, use_tqdm=False), logits, strict=True):
        assert close(output.outputs.probs, expected.softmax(-1)) and output.outputs.num_classes == 3
    plain = llm.classify(PROMPTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert all(close(output.outputs.probs, expected) for output, expected in zip(plain, logits, strict=True))


def test_several_labels_may_hold():
    folder, model = classifier(problem_type="multi_label_classification")
    (output,) = tiny_llm(folder).classify(PROMPTS[3], use_tqdm=False)
    assert close(output.outputs.probs, logits_of(model, PROMPTS[3]).sigmoid())


def test_what_a_classifier_does_not_do():
    folder, _ = classifier()
    llm = tiny_llm(folder)
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification is without an output projection"):
        llm.generate("the")
    with pytest.raises(ValueError, match=r"it has classify, token_classify \(convert='embed' leaves the head away\)"):
        llm.embed("the")
    with pytest.raises(ValueError, match="score needs a classifier with one label, this one has 3: use classify"):
        llm.score("the", "fox")
    with pytest.raises(ValueError, match="runner='generate': Qwen3ForSequenceClassification is without"):
        tiny_llm(folder, runner="generate")


def test_a_classifier_without_its_head_embeds():
    folder, model = classifier()
    llm = tiny_llm(folder, convert="embed")
    for output, prompt in zip(llm.embed(PROMPTS, use_tqdm=False), PROMPTS, strict=True):
        assert close(output.outputs.embedding, F.normalize(hidden_of(model.model, prompt)[-1], dim=-1))


def test_a_causal_architecture_with_the_files_of_a_classifier():
    folder, model = classifier(labels=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ValueError, match=r"score\.weight has no place"):
        tiny_llm(folder)
    (output,) = tiny_llm(folder, convert="classify").classify(PROMPTS[2], use_tqdm=False)
    assert close(output.outputs.probs, logits_of(model, PROMPTS[2]).softmax(-1))


def test_a_cross_encoder_reads_both_texts():
    folder, model = classifier(labels=1)
    llm = tiny_llm(folder)
    texts = ["the quick brown fox", "jumps over the lazy dog", "0 1 2 3"]
    for output, text in zip(llm.score(texts[0], texts, use_tqdm=False), texts, strict=True):
        ids = llm.get_tokenizer()(texts[0], text)["input_ids"]
        assert output.prompt_token_ids == ids
        assert output.outputs.score == pytest.approx(float(logits_of(model, ids).sigmoid()), abs=1e-6)
    with pytest.raises(ValueError, match="a cross-encoder reads two texts, got list and str"):
        llm.score([[1, 2]], "the")
    with pytest.raises(ValueError, match="but the engine has no tokenizer: leave out skip_tokenizer_init"):
        tiny_llm(folder, skip_tokenizer_init=True).score("the", "fox")


def reward_model(folder: Path, name: str, labels: int) -> tuple[PreTrainedModel, torch.nn.Module]:
    """A bare Qwen2 with two more layers, as Qwen2.5-Math's reward models are; and those layers."""
    model = write_bare(folder, tiny_config("qwen2", vocab_size=VOCAB_SIZE, eos_token_id=0))
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, labels))
    tensors = {f"model.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    tensors |= {f"score.{key}": value for key, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    return model, head


@torch.inference_mode()
def test_rewards_of_each_token(tmp_path):
    model, head = reward_model(tmp_path, "Qwen2ForRewardModel", 1)
    llm = tiny_llm(tmp_path, max_num_batched_tokens=16)
    expected = [head(hidden_of(model, prompt)) for prompt in PROMPTS]
    found = [torch.as_tensor(output.outputs.data) for output in llm.reward(PROMPTS, use_tqdm=False)]
    assert [scores.shape for scores in found] == [scores.shape for scores in expected]
    # All as one vector: a single score may be next to nothing, what remains of much larger terms.
    assert close(torch.cat(found), torch.cat(expected))
    (last,) = llm.classify(PROMPTS[3], use_tqdm=False)
    assert close(last.outputs.probs, head(hidden_of(model, PROMPTS[3]))[-1])


@torch.inference_mode()
def test_rewards_of_steps(tmp_path):
    model, head = reward_model(tmp_path, "Qwen2ForProcessRewardModel", 2)
    prompt = [5, 6, 7, 9, 5, 4, 9]
    expected = head(hidden_of(model, prompt)).softmax(-1)
    llm = tiny_llm(tmp_path, pooler_config={"pooling_type": "STEP", "step_tag_id": 9})
    assert close(llm.reward(prompt, use_tqdm=False)[0].outputs.data, expected[[3, 6]])
    params = PoolingParams(step_tag_id=5, use_activation=False, returned_token_ids=[1])
    expected = head(hidden_of(model, prompt))[[0, 4], 1:]
    assert close(llm.reward(prompt, pooling_params=params, use_tqdm=False)[0].outputs.data, expected)
    with pytest.raises(ValueError, match="tok_pooling_type='STEP' needs a step_tag_id"):
        tiny_llm(tmp_path, pooler_config={"pooling_type": "STEP"})
    with pytest.raises(ValueError, match="returned_token_ids has column 2, but there are 2"):
        llm.reward(prompt, pooling_params=PoolingParams(returned_token_ids=[2]))
