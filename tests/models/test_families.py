import pytest
import torch
from support.real_configs import LLAMA_3_1_8B, QWEN3_0_6B
from support.tiny_models import tiny_config
from transformers import AutoConfig

from tritonllm.models.decoder import Decoder
from tritonllm.models.families import FAMILIES, spec_from_config, weight_map
from tritonllm.models.spec import RopeSpec

ALL = ["llama", "mistral", "qwen2", "qwen3"]


def without(config: dict, *names: str) -> dict:
    return {key: value for key, value in config.items() if key not in names}


def test_qwen3_0_6b():
    spec = spec_from_config(QWEN3_0_6B)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_size) == (28, 16, 8, 128)
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (151936, 1024, 3072)
    assert spec.qk_norm and spec.tie_word_embeddings and not spec.qkv_bias
    assert spec.sliding_window == (None,) * 28
    assert spec.rope == RopeSpec(base=1e6, rotary_dim=128, trained_length=40960)
    assert spec.eos_token_ids == (151645,) and spec.dtype is torch.bfloat16
    assert spec.max_position_embeddings == 40960 and spec.norm_eps == 1e-6


def test_llama_3_1_8b():
    spec = spec_from_config(LLAMA_3_1_8B)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_size) == (32, 32, 8, 128)
    assert not (spec.qk_norm or spec.tie_word_embeddings or spec.qkv_bias or spec.mlp_bias)
    assert spec.rope.base == 500000.0 and dict(spec.rope.scaling) == LLAMA_3_1_8B["rope_scaling"]
    assert spec.max_position_embeddings == 131072
    parameters = sum(torch.Size(slot.shape).numel() for slot in weight_map(spec).values())
    assert parameters == 8_030_261_248


def test_transformers_5_spelling():
    """`rope_parameters` and `dtype` mean what `rope_theta`, `rope_scaling` and `torch_dtype` meant."""
    new = without(LLAMA_3_1_8B, "rope_theta", "rope_scaling", "torch_dtype")
    new["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500000.0}
    new["dtype"] = "bfloat16"
    assert spec_from_config(new) == spec_from_config(LLAMA_3_1_8B)


@pytest.mark.parametrize("family", ALL)
def test_fields_left_out(family):
    """What the configuration class of transformers has a default for takes that default."""
    optional = (
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "hidden_act",
        "tie_word_embeddings",
        "eos_token_id",
    )
    config = without(tiny_config(family, num_attention_heads=32), *optional, "torch_dtype")
    if family != "qwen3":
        config["head_dim"] = 16
    spec, theirs = spec_from_config(config), AutoConfig.for_model(family)
    assert spec.num_kv_heads == theirs.num_key_value_heads
    assert spec.max_position_embeddings == theirs.max_position_embeddings
    assert spec.norm_eps == theirs.rms_norm_eps
    assert spec.rope.base == theirs.rope_parameters["rope_theta"]
    assert spec.activation == theirs.hidden_act
    assert spec.tie_word_embeddings == theirs.tie_word_embeddings
    assert spec.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert spec.dtype is torch.float32


def test_null_fields_follow_from_others():
    spec = spec_from_config(tiny_config("qwen2", num_key_value_heads=None, head_dim=None))
    assert spec.num_kv_heads == 4 and spec.head_size == 16


def test_mistral_has_a_window_unless_told_otherwise():
    config = tiny_config("mistral")
    assert spec_from_config(config).sliding_window == (None,) * 3
    assert spec_from_config(without(config, "sliding_window")).sliding_window == (4096,) * 3


def test_model_type_without_architectures():
    assert spec_from_config(without(tiny_config("qwen2"), "architectures")).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(("given", "want"), [(None, ()), (7, (7,)), ([7, 9], (7, 9))], ids=["none", "one", "several"])
def test_eos(given, want):
    assert spec_from_config(tiny_config("llama", eos_token_id=given)).eos_token_ids == want


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (None, None, 8)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None, None, None)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 8, None),
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows(family, changes, want):
    assert spec_from_config(tiny_config(family, **changes)).sliding_window == want


def test_yarn_reaches_further_than_it_was_trained():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert spec_from_config(tiny_config("qwen2", rope_scaling=yarn)).max_position_embeddings == 256
    short = tiny_config("qwen2", rope_scaling=yarn, max_position_embeddings=64)
    assert spec_from_config(short).max_position_embeddings == 256


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported; supported: LlamaFor"),
        ({"model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({}, "architecture None is not supported"),
    ],
)
def test_unknown_architecture(config, message):
    with pytest.raises(ValueError, match=message) as raised:
        spec_from_config(config)
    assert all(name in str(raised.value) for name in FAMILIES)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, "4", True, 2.0])
def test_bad_sizes(name, value):
    with pytest.raises(ValueError, match=rf"config\.json: {name} must be an integer of at least 1, got"):
        spec_from_config(tiny_config("llama", **{name: value}))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act must be one of silu.*'relu'"),
        ("llama", {"hidden_act": None}, "hidden_act must be one of"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, "torch_dtype must be one of float32"),
        ("llama", {"dtype": "int8"}, "json: dtype must be one of float32"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list"),
        ("llama", {"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ("llama", {"head_dim": 12}, "head_size must be a multiple of 8"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.* is not supported"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("llama", {"num_experts": 8}, "num_experts=8 is not supported"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True is not supported"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must be .* each of 3 layers"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types must be full_attention or sliding"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window or sliding_window is off"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None}, "max_window_layers must be"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling: .*'longrope'"),
        ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "rope_scaling: .*'mrope'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: .*needs a positive 'factor'"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "speed": 1}}, "rope_scaling: .*speed"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
            "rope_parameters: .*full_attention",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            "rope_parameters with partial_rotary_factor is not supported",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(family, changes, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config(tiny_config(family, **changes))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ALL)
def test_weight_map_fills_each_parameter_once(family, tied):
    config = tiny_config(family, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    spec = spec_from_config(config)
    model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    parameters = dict(model.named_parameters())
    times = {name: torch.zeros(p.shape) for name, p in parameters.items()}
    for slot in weight_map(spec).values():
        rows = times[slot.parameter][slot.start : slot.start + slot.shape[0]]
        assert rows.shape == slot.shape
        rows += 1
    assert all(bool((count == 1).all()) for count in times.values())
