"""Where a configuration says what format a checkpoint has."""

import json

import pytest
from support.tiny_models import tiny_config

from tritonllm.models.families import spec_from_config
from tritonllm.models.formats.bitsandbytes import BitsAndBytes
from tritonllm.models.formats.fp8 import Fp8
from tritonllm.models.formats.modelopt import ModelOpt
from tritonllm.models.formats.mxfp4 import Mxfp4
from tritonllm.models.formats.registry import METHODS, format_in, format_of, quantization_of

FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, Mxfp4),
        ({"quantization_config": FP8}, Fp8),
        ({"compression_config": FP8}, Fp8),
        ({"text_config": {"quantization_config": FP8}}, Fp8),
        ({"quantization_config": None, "llm_config": {"quantization_config": FP8}}, Fp8),
        ({"quantization_config": {"load_in_8bit": True}}, BitsAndBytes),
        (None, Mxfp4),
    ],
)
def test_where_it_stands(tmp_path, config, found):
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert isinstance(format_in(tmp_path), found)


def test_modelopts_own_file_counts_where_the_configuration_says_nothing(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    (tmp_path / "config.json").write_text("{}")
    assert isinstance(format_in(tmp_path), ModelOpt)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    assert isinstance(format_in(tmp_path), Fp8)


@pytest.mark.parametrize("quantization", [{"quant_method": "aqlm"}, {"bits": 4}, "fp8"])
def test_what_is_not_supported_is_named_before_any_work(quantization):
    """With what is."""
    config = {**tiny_config("llama"), "quantization_config": quantization}
    message = "must be an object, got 'fp8'" if quantization == "fp8" else f"supported: {', '.join(METHODS)}"
    with pytest.raises(ValueError, match=f"config.json: quantization_config .*{message}"):
        spec_from_config(config)
    with pytest.raises(ValueError, match=message):
        format_of(quantization_of(config))
