"""Activation-aware scaling: the model computes what it did, and columns with large inputs become finer."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.narrow_formats import kept, widened
from support.tiny_models import (
    ALL_FAMILIES,
    PagedRunner,
    PagedSequence,
    load_decoder,
    random_tokens,
    tiny_config,
    write_checkpoint,
)

from tritonllm import quantize_checkpoint
from tritonllm.models.activation_aware import rescaling
from tritonllm.models.quantized_checkpoint import written_format

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
TEXTS = [random_tokens(n, 90, seed=n) for n in (60, 40)]
TOKENS = random_tokens(50, 90, seed=1)
# norms before blocks; biases and one norm's differences from 1; norms after blocks, too; LayerNorm; nothing but values
FAMILIES = {
    "qwen3": {"qkv", "o", "up", "down"},
    "qwen2": {"qkv", "o", "up", "down"},
    "gemma2": {"qkv", "o", "up", "down"},
    "olmo2": {"o", "down"},
    "qwen3_moe": {"qkv", "o"},
    "stablelm": {"qkv", "o", "up", "down"},
    "gpt2": {"qkv", "o", "up"},
}


def write(folder, family, **fields):
    """A model of which some hidden columns are far larger than the others."""
    folder.mkdir()
    write_checkpoint(folder, tiny_config(family, **fields), seed=3)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            tensor[::64] *= 30
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(model):
    return PagedRunner(model).prefill(PagedSequence(), TOKENS)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ("qwen3", "gemma2") else pytest.mark.long) for name in ALL_FAMILIES],
)
def test_the_model_computes_what_it_did(tmp_path, family):
    """What is scaled is scaled on both sides."""
    model = load_decoder(write(tmp_path / "wide", family))
    found = rescaling(model, TEXTS, lambda weight: torch.round(weight * 8) / 8, torch.float32)
    ends = {name.split(".")[-2] for name in found.columns}
    assert ends == FAMILIES.get(family, ends) and ends
    parameters = dict(model.named_parameters())
    before = logits(model)
    for name, values in found.vectors.items():
        parameters[name].data.copy_(values)
    for name in {*found.rows, *found.columns}:
        parameters[name].data.copy_(found.of_rows(name, parameters[name].data, 0))
    assert relative_error(logits(model), before) < 1e-4


def test_a_calibrated_checkpoint_is_nearer(tmp_path):
    """Than one whose weights are only rounded, where inputs differ much; and what is not narrow is scaled, too."""
    folder = write(tmp_path / "wide", "qwen3", **SIZES)
    how = {"ignore": ["re:model.layers.1.self_attn.[qkv]_proj"]}
    quantize_checkpoint(folder, tmp_path / "plain", "w4a16", **how)
    quantize_checkpoint(folder, tmp_path / "calibrated", "w4a16", calibrate=TEXTS, **how)
    wanted = logits(load_decoder(folder))
    errors = [relative_error(logits(load_decoder(tmp_path / name)), wanted) for name in ("calibrated", "plain")]
    assert errors[0] < 0.8 * errors[1], errors
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("calibrated", "plain")]
    assert configs[0] == configs[1]
    wide, calibrated = load_file(folder / "model.safetensors"), load_file(tmp_path / "calibrated" / "model.safetensors")
    for end in ("self_attn.k_proj.weight", "input_layernorm.weight"):
        assert not torch.equal(wide[f"model.layers.1.{end}"], calibrated[f"model.layers.1.{end}"])
    for end in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.q_norm.weight"):
        assert torch.equal(wide[end], calibrated[end])


def test_norms_that_are_rounded_cost_nothing(tmp_path):
    """Columns get what a norm in bfloat16 was divided by in truth."""
    folder = write(tmp_path / "wide", "qwen3", **SIZES)
    model = load_decoder(folder)
    found = rescaling(model, TEXTS, lambda weight: torch.round(weight * 8) / 8, torch.bfloat16)
    norm = dict(model.named_parameters())["layers.0.attention_norm.weight"]
    stored = found.vectors["layers.0.attention_norm.weight"]
    assert torch.equal(stored, stored.bfloat16().float())
    torch.testing.assert_close(stored * found.columns["layers.0.attention.qkv.weight"], norm.data, rtol=1e-6, atol=0)


def test_refused(tmp_path):
    folder = write(tmp_path / "wide", "qwen3", **SIZES)
    with pytest.raises(ValueError, match=r"calibrate is of w4a16 and a text .* this is fp8: leave it out"):
        quantize_checkpoint(folder, tmp_path / "out", "fp8", calibrate=TEXTS)
    with pytest.raises(ValueError, match="calibrate is of w4a16 and a text that is not empty"):
        quantize_checkpoint(folder, tmp_path / "out", "w4a16", calibrate=[])
    neox = write(tmp_path / "neox", "gpt_neox", hidden_size=128, intermediate_size=256)
    with pytest.raises(ValueError, match=r"calibrate: tensor \S+query_key_value\S+ has its rows in another order"):
        quantize_checkpoint(neox, tmp_path / "out", "w4a16", calibrate=TEXTS)
    assert not (tmp_path / "out").exists()


def test_weights_with_rows_and_columns_the_other_way_round(tmp_path):
    """GPT-2's, and its biases: the one product that becomes narrow has its own error, and the rest has none."""
    folder = write(tmp_path / "wide", "gpt2", n_embd=128, n_layer=1)
    ignore = [f"re:.*{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")]
    for name, texts in (("plain", None), ("calibrated", TEXTS)):
        quantize_checkpoint(folder, tmp_path / name, "w4a16", calibrate=texts, ignore=ignore)
    wanted = logits(load_decoder(folder))
    plain, calibrated = (logits(load_decoder(tmp_path / name)) for name in ("plain", "calibrated"))
    assert relative_error(calibrated, plain) < 1e-4 < relative_error(plain, wanted)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("plain", "calibrated")]
    assert not torch.equal(*(tensors["transformer.h.0.attn.c_attn.weight"] for tensors in files))


def test_the_error_that_is_searched_is_that_of_what_is_written(tmp_path):
    """``rounded`` of a format gives the values that its tensors are read as."""
    folder = write(tmp_path / "wide", "qwen3", **SIZES)
    quantize_checkpoint(folder, tmp_path / "out", "w4a16")
    form, size = written_format("w4a16")
    plain, values = dict(load_decoder(folder).named_parameters()), widened(kept(tmp_path / "out"))
    for name in ("layers.0.attention.qkv.weight", "layers.1.mlp.down.weight"):
        assert form.rounded is not None
        assert torch.equal(form.rounded(plain[name].data, size), values[name])
