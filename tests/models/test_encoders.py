"""Encoders against transformers: every token sees all others, or those within a window to both sides."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.classifiers import hidden_of, logits_of, write_bare, write_model
from support.compare import relative_error
from support.encoders import CLASSIFIERS, ENCODERS, encoder_config
from support.tiny_models import PagedRunner, PagedSequence, load_decoder, random_tokens
from transformers import AutoModelForMaskedLM

from tritonllm.models.families import spec_from_config

LIMIT = 1e-5
LENGTHS = (1, 7, 40, 100)
VARIANTS = {
    **{family: (family, {}) for family in ENCODERS},
    "bert-relu": ("bert", {"hidden_act": "relu", "layer_norm_eps": 1e-5, "type_vocab_size": 3}),
    "modernbert-biases": ("modernbert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    "modernbert-layer-types": (
        "modernbert",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "local_attention": 3},
    ),
}


@torch.inference_mode()
def hidden_states(model, prompts):
    """``[tokens, hidden]`` of each prompt, all in one step."""
    model.compute_logits = lambda hidden: hidden
    return PagedRunner(model).step([(PagedSequence(), prompt) for prompt in prompts])


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_hidden_states(variant, tmp_path):
    family, fields = VARIANTS[variant]
    theirs = write_bare(tmp_path, encoder_config(family, **fields))
    ours = load_decoder(tmp_path)
    assert (ours.spec.causal, ours.spec.logits, ours.spec.head) == (False, False, None)
    prompts = [random_tokens(n, 320, seed=n) for n in LENGTHS]
    for prompt, hidden in zip(prompts, hidden_states(ours, prompts), strict=True):
        assert relative_error(hidden, hidden_of(theirs, prompt)) < LIMIT


@pytest.mark.parametrize("kinds", [2, 3])
def test_kinds_of_tokens(kinds, tmp_path):
    theirs = write_bare(tmp_path, encoder_config("bert", type_vocab_size=kinds))
    prompt = random_tokens(30, 320, seed=0)
    types = [i * kinds // 30 for i in range(30)]
    expected = hidden_of(theirs, prompt, token_type_ids=torch.tensor([types]))
    shifted = [token + 320 * kind for token, kind in zip(prompt, types, strict=True)]
    (hidden,) = hidden_states(load_decoder(tmp_path), [shifted])
    assert relative_error(hidden, expected) < LIMIT


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("fields", [{}, {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}])
def test_classifiers(family, fields, tmp_path):
    theirs = write_model(tmp_path, encoder_config(family, num_labels=3, **(fields if family == "modernbert" else {})))
    ours = load_decoder(tmp_path)
    prompt = random_tokens(40, 320, seed=1)
    (hidden,) = hidden_states(ours, [prompt])
    mean = ours.spec.head.pooling == "MEAN"
    assert mean == (family == "modernbert" and bool(fields))
    logits = ours.classifier(hidden.mean(0, keepdim=True) if mean else hidden[:1])
    assert relative_error(logits[0], logits_of(theirs, prompt)) < LIMIT


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_what_guesses_masked_words_is_left_away(family, tmp_path):
    theirs = write_model(tmp_path, encoder_config(family), AutoModelForMaskedLM)
    prompt = random_tokens(40, 320, seed=1)
    expected = hidden_of(theirs.base_model, prompt)
    assert relative_error(hidden_states(load_decoder(tmp_path), [prompt])[0], expected) < LIMIT


def test_buffers_of_old_files_are_left_away(tmp_path):
    theirs = write_bare(tmp_path, encoder_config("bert"))
    tensors = load_file(tmp_path / "model.safetensors") | {"embeddings.position_ids": torch.arange(130)[None]}
    save_file(tensors, tmp_path / "model.safetensors")
    prompt = random_tokens(9, 320, seed=1)
    assert relative_error(hidden_states(load_decoder(tmp_path), [prompt])[0], hidden_of(theirs, prompt)) < LIMIT


def test_old_names_of_norms(tmp_path):
    """Of google-bert/bert-base-uncased, say."""
    theirs = write_bare(tmp_path, encoder_config("bert"))
    tensors = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in list(tensors):
        for new, older in old.items():
            if name.endswith(new):
                tensors[name.replace(new, older)] = tensors.pop(name)
    assert any(name.endswith("gamma") for name in tensors)
    save_file({f"bert.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    prompt = random_tokens(9, 320, seed=1)
    assert relative_error(hidden_states(load_decoder(tmp_path), [prompt])[0], hidden_of(theirs, prompt)) < LIMIT


def test_positions_of_roberta_begin_behind_the_padding():
    spec = spec_from_config(encoder_config("roberta", architectures=["RobertaModel"]))
    assert (spec.learned_positions, spec.position_offset, spec.max_position_embeddings) == (130, 2, 128)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type='relative_key' is not supported",
        ),
        ("bert", {"is_decoder": True}, "is_decoder=true is not supported"),
        ("bert", {"type_vocab_size": 0}, "type_vocab_size must be an integer of at least 1"),
        ("modernbert", {"local_attention": None}, "local_attention must be an integer of at least 1"),
        ("modernbert", {"classifier_pooling": "max"}, "classifier_pooling must be cls or mean, got 'max'"),
    ],
)
def test_fields_that_are_not_known(family, fields, message):
    name = {"bert": "BertForSequenceClassification", "modernbert": "ModernBertForSequenceClassification"}[family]
    with pytest.raises(ValueError, match=message):
        spec_from_config(json.loads(json.dumps(encoder_config(family, **fields, architectures=[name]))))
