"""Checkpoints of ModelOpt: FP8 and NVFP4, said in config.json or in a file of its own."""

import json

import pytest
import torch
from support.checkpoints import edit, refused
from support.narrow_formats import check_pair, float8, nvfp4, positive, write_pair

from tritonllm.models.formats.registry import format_of


def fp8(shape, generator):
    numbers, scale = float8(shape, generator), positive((), generator)
    parts = {".weight": numbers, ".weight_scale": scale, ".input_scale": torch.tensor(2.0)}
    return parts, numbers.float() * scale


@pytest.mark.parametrize("form", [nvfp4, fp8])
def test_weights(tmp_path, form):
    config = {"quant_method": "modelopt", "quant_algo": form.__name__.upper(), "ignore": ["lm_head"]}
    cache = {f"model.layers.0.self_attn.{kind}_proj.{kind}_scale": torch.ones(()) for kind in "kv"}
    fields = {"num_hidden_layers": 2, "intermediate_size": 96}
    check_pair(write_pair(tmp_path, "llama", form, config, change=lambda t: t.update(cache), **fields))


def test_experts_and_a_file_of_its_own(tmp_path):
    fields = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 32}
    pair = write_pair(tmp_path, "qwen3_moe", nvfp4, None, **fields)
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (pair.narrow / "hf_quant_config.json").write_text(json.dumps(content))
    check_pair(pair)
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(pair.narrow, lambda tensors: tensors.pop(f"{name}_scale_2"))
    refused(pair.narrow, rf"tensor {name} \[64, 32\] is modelopt and needs {name}_scale_2 of type F32")


def test_an_algorithm_that_is_not_supported():
    with pytest.raises(ValueError, match="quant_algo 'W4A8_AWQ' is not supported; supported: FP8, "):
        format_of({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})
