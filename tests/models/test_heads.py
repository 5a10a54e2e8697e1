"""Classifiers and bare models of every family against transformers."""

import pytest
import torch
from support.classifiers import hidden_of, logits_of, write_bare, write_model
from support.compare import relative_error
from support.tiny_models import (
    ALL_FAMILIES,
    NOT_IN_TRANSFORMERS,
    PagedRunner,
    PagedSequence,
    load_decoder,
    random_tokens,
    tiny_config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN

from tritonllm.layers.head import DenseSpec, HeadSpec
from tritonllm.layers.norm import NormSpec
from tritonllm.models.families import as_classifier, spec_from_config

LIMIT = 1e-5
PROMPT = random_tokens(21, 101, seed=3)
CLASSIFIERS = sorted(family for family in ALL_FAMILIES if family in KNOWN and family not in NOT_IN_TRANSFORMERS)


@torch.inference_mode()
def hidden_states(model, prompt):
    """``[tokens, hidden]``, in two chunks."""
    kept = []
    model.compute_logits = lambda hidden: kept.append(hidden) or hidden
    PagedRunner(model).prefill(PagedSequence(), prompt, [13, len(prompt) - 13])
    return torch.cat(kept)


def test_classifiers_were_found():
    assert {"llama", "mistral", "qwen2", "qwen3", "gpt2", "phi3", "gemma2"} <= set(CLASSIFIERS)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classifiers(family, tmp_path):
    config = tiny_config(family) | {"num_labels": 3, "pad_token_id": 100}
    theirs = write_model(tmp_path, config)
    ours = load_decoder(tmp_path)
    assert ours.spec.head == HeadSpec(
        dense=(DenseSpec(in_features=64, out_features=3),), pooling="LAST", activation="softmax"
    )
    logits = ours.classifier(hidden_states(ours, PROMPT)[-1:])[0]
    assert relative_error(logits, logits_of(theirs, PROMPT)) < LIMIT


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma2", "cohere_compass_text"])
def test_bare_models(family, tmp_path):
    """Their tensors lack the base model's name."""
    theirs = write_bare(tmp_path, tiny_config(family))
    ours = load_decoder(tmp_path)
    assert (ours.spec.logits, ours.spec.head) == (False, None)
    assert relative_error(hidden_states(ours, PROMPT), hidden_of(theirs, PROMPT)) < LIMIT


@pytest.mark.parametrize(
    ("fields", "labels", "activation"),
    [
        ({}, 2, "softmax"),
        ({"num_labels": 1}, 1, "sigmoid"),
        ({"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, 3, "softmax"),
        ({"problem_type": "regression", "num_labels": 1}, 1, "none"),
        ({"problem_type": "multi_label_classification", "num_labels": 4}, 4, "sigmoid"),
        ({"problem_type": "single_label_classification", "num_labels": 1}, 1, "softmax"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, "none"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, 1, "sigmoid"),
    ],
)
def test_labels_and_their_activation(fields, labels, activation):
    spec = spec_from_config({**tiny_config("qwen3"), "architectures": ["Qwen3ForSequenceClassification"], **fields})
    assert (spec.head.labels, spec.head.activation, spec.logits) == (labels, activation, False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"problem_type": "ranking"}, "problem_type must be one of regression"),
        ({"num_labels": 0}, "num_labels must be an integer of at least 1"),
        ({"sbert_ce_default_activation_function": "torch.nn.Tanh"}, "activation_fn 'torch.nn.Tanh' is not one of"),
    ],
)
def test_heads_that_are_not_known(fields, message):
    config = {**tiny_config("qwen3"), "architectures": ["Qwen3ForSequenceClassification"], **fields}
    with pytest.raises(ValueError, match=message):
        spec_from_config(config)


def test_a_causal_model_as_a_classifier():
    config = as_classifier(tiny_config("qwen3"))
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert as_classifier(config) == config


@pytest.mark.parametrize(
    ("name", "vocab", "labels", "activation", "tag"),
    [
        ("Qwen2ForRewardModel", 101, 1, "none", None),
        ("Qwen2ForProcessRewardModel", 101, 2, "softmax", None),
        ("Qwen2ForProcessRewardModel", 151_936, 2, "softmax", 151_651),
    ],
)
def test_reward_models(name, vocab, labels, activation, tag):
    spec = spec_from_config({**tiny_config("qwen2"), "architectures": [name], "vocab_size": vocab})
    head = spec.head
    assert (head.labels, head.activation, head.step_tag_id) == (labels, activation, tag)
    assert [(dense.activation, dense.bias) for dense in head.dense] == [("relu", True), (None, True)]


def test_a_value_head():
    spec = spec_from_config({**tiny_config("internlm2"), "architectures": ["InternLM2ForRewardModel"]})
    assert spec.head.dense == (DenseSpec(in_features=64, out_features=1),)


def test_specs_of_heads_are_checked():
    with pytest.raises(ValueError, match="activation must be None or one of tanh"):
        DenseSpec(in_features=1, out_features=1, activation="swish")
    with pytest.raises(ValueError, match=r"layer norms only, got norm\.kind='rms'"):
        DenseSpec(in_features=1, out_features=1, norm=NormSpec(kind="rms", eps=1e-5))
