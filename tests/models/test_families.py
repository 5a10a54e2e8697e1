import copy
import math

import pytest
import torch
from support.real_configs import LLAMA_3_1_8B, QWEN3_0_6B
from support.tiny_models import ALL_FAMILIES, NOT_IN_TRANSFORMERS, reference_config, tiny_config
from transformers import AutoConfig

from tritonllm.layers.attention import QueryScaling
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.rope import RopeSpec
from tritonllm.models import weight_names
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import FAMILIES, is_extra, is_supported, spec_from_config, weight_map
from tritonllm.models.spec import ModelSpec
from tritonllm.models.weights import hf_tensor_names


def without(config: dict, *names: str) -> dict:
    return {key: value for key, value in config.items() if key not in names}


def windows(spec: ModelSpec) -> tuple[int | None, ...]:
    return tuple(layer.attention.window for layer in spec.layers)


def test_qwen3_0_6b():
    spec = spec_from_config(QWEN3_0_6B)
    layer = spec.layers[0]
    attention = layer.attention
    assert all(other == layer for other in spec.layers)
    assert (spec.num_layers, attention.num_heads, spec.caches[0]) == (28, 16, (8, 128))
    assert (spec.vocab_size, spec.hidden_size) == (151936, 1024)
    assert layer.mlp == MLPSpec(intermediate_size=3072, activation="silu")
    assert attention.qk_norm == spec.norm and spec.tie_word_embeddings and not attention.qkv_bias
    assert windows(spec) == (None,) * 28
    assert attention.rope == RopeSpec(base=1e6, rotary_dim=128, trained_length=40960)
    assert spec.eos_token_ids == (151645,) and spec.dtype is torch.bfloat16
    assert spec.max_position_embeddings == 40960 and spec.norm.eps == 1e-6


def test_llama_3_1_8b():
    spec = spec_from_config(LLAMA_3_1_8B)
    layer = spec.layers[0]
    attention = layer.attention
    assert (spec.num_layers, attention.num_heads, spec.caches[0]) == (32, 32, (8, 128))
    assert attention.qk_norm is None and not (spec.tie_word_embeddings or attention.qkv_bias or layer.mlp.bias)
    assert attention.rope.base == 500000.0 and dict(attention.rope.scaling) == LLAMA_3_1_8B["rope_scaling"]
    assert spec.max_position_embeddings == 131072
    parameters = sum(torch.Size(slot.shape).numel() for slot in weight_map(spec).values())
    assert parameters == 8_030_261_248


def shape(family: str, vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **more) -> dict:
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    values = (family, vocab, hidden, inner, layers)
    kv = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**dict(zip(names, values, strict=True)), **kv, **more}


A13B = {"head_dim": 128, "num_experts": 64, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32}
A3B = {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (shape("olmo3", 100278, 4096, 11008, 32, 32, 32), 7_298_011_136),
        (shape("ernie4_5", 103424, 1024, 3072, 18, 16, 2, head_dim=128), 360_748_032),
        (shape("ernie4_5_moe", 103424, 2560, 12288, 28, 20, 4, **A3B), 21_825_437_888),
        (shape("seed_oss", 155136, 5120, 27648, 64, 80, 8, head_dim=128), 36_151_104_512),
        (shape("hunyuan_v1_moe", 128167, 4096, 3072, 32, 32, 8, tie_word_embeddings=True, **A13B), 80_393_183_232),
        (shape("internlm2", 92544, 4096, 14336, 32, 32, 8, bias=False), 7_737_708_544),
        (shape("internlm3", 128512, 4096, 10240, 48, 32, 2, head_dim=128), 8_804_241_408),
        (
            {"model_type": "bloom", "vocab_size": 250880, "n_embed": 14336, "n_layer": 70, "n_head": 112},
            176_247_271_424,
        ),
        ({"model_type": "mpt", "vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32}, 6_649_286_656),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_of_published_models(config, parameters):
    """Of OLMo 3 7B, ERNIE 4.5 0.3B and 21B-A3B, Seed-OSS 36B, Hunyuan-A13B, InternLM 2 7B and 3 8B, BLOOM, MPT 7B."""
    shapes = hf_tensor_names(spec_from_config(config)).values()
    assert sum(torch.Size(shape).numel() for shape in shapes) == parameters


def test_transformers_5_spelling():
    """`rope_parameters` and `dtype` mean what `rope_theta`, `rope_scaling` and `torch_dtype` meant."""
    new = without(LLAMA_3_1_8B, "rope_theta", "rope_scaling", "torch_dtype")
    new["rope_parameters"] = {**LLAMA_3_1_8B["rope_scaling"], "rope_theta": 500000.0}
    new["dtype"] = "bfloat16"
    assert spec_from_config(new) == spec_from_config(LLAMA_3_1_8B)


# What a configuration must say; the rest has defaults.
NEEDED = {
    *("architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("attention_types", "num_layers", "num_heads"),
    *("intermediate_size", "d_model", "n_layers", "n_heads", "n_embd", "n_layer", "n_head", "ffn_dim"),
}
NO_DEFAULT = {  # their classes leave them out
    "dots1": {"n_routed_experts", "num_experts_per_tok"},
    "cohere_compass_text": {"rope_parameters", "layer_types"},
}


@pytest.mark.parametrize("family", [family for family in ALL_FAMILIES if family not in NOT_IN_TRANSFORMERS])
def test_fields_left_out(family):
    """What the configuration class of transformers has a default for takes that default."""
    config = tiny_config(family, num_attention_heads=32, hidden_size=512)
    if "n_embd" in config:  # GPT-J and CodeGen rotate 64 elements of a head
        width = 2048 if family in ("gptj", "codegen") else 512
        config |= {"n_head": 32, "n_embd": width, "hidden_size": width}
    if family in ("mpt", "dbrx"):
        config |= {"n_heads": 32, "d_model": 512}
    if family == "xglm":
        config["d_model"] = 512
    if family == "helium":  # 20 key heads
        config["num_attention_heads"] = 20
    if family == "gpt_neo":
        config["num_heads"] = 32
    needed = NEEDED | NO_DEFAULT.get(family, set())
    config = {key: value for key, value in config.items() if key in needed}
    theirs = AutoConfig.for_model(family, **{key: value for key, value in config.items() if key != "model_type"})
    assert spec_from_config(config) == spec_from_config({**theirs.to_dict(), "architectures": config["architectures"]})


@pytest.mark.parametrize("family", [family for family in ALL_FAMILIES if family not in NOT_IN_TRANSFORMERS])
def test_both_styles_mean_the_same(family):
    """`rope_parameters` and the rest as transformers 5 writes them, from a file in the style of transformers 4."""
    config = tiny_config(family)
    fields = copy.deepcopy({key: value for key, value in config.items() if key != "model_type"})
    assert spec_from_config(config) == spec_from_config(AutoConfig.for_model(family, **fields).to_dict())


def test_minicpm_is_scaled_like_a_granite():
    """transformers has no MiniCPM; the parity tests compare it with the Granite that computes the same."""
    config = tiny_config("minicpm")
    granite = {**reference_config(config), "architectures": ["GraniteForCausalLM"]}
    ours, theirs = spec_from_config(config), spec_from_config(granite)
    assert ours.residual_multiplier == pytest.approx(1.4 / 3**0.5)
    for name in ("embedding_multiplier", "residual_multiplier", "logit_scale"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name))
    assert ours.norm == theirs.norm and ours.layers[0].mlp == theirs.layers[0].mlp


def test_null_fields_follow_from_others():
    spec = spec_from_config(tiny_config("qwen2", num_key_value_heads=None, head_dim=None))
    assert spec.caches[0] == (4, 16)
    assert spec_from_config(tiny_config("gpt2", n_inner=None)).layers[0].mlp.intermediate_size == 256


def test_mistral_has_a_window_unless_told_otherwise():
    config = tiny_config("mistral")
    assert windows(spec_from_config(config)) == (None,) * 3
    assert windows(spec_from_config(without(config, "sliding_window"))) == (4096,) * 3


def test_another_name_of_an_architecture():
    config = tiny_config("mpt")
    assert spec_from_config({**config, "architectures": ["MptForCausalLM"]}) == spec_from_config(config)


def test_an_exaone_3_that_transformers_wrote_as_a_llama():
    """Its tensors have EXAONE's names all the same."""
    config = tiny_config("exaone")
    spec = spec_from_config(config)
    assert spec.architecture == "ExaoneForCausalLM" and "transformer.wte.weight" in weight_map(spec)
    assert spec_from_config({**config, "architectures": ["LlamaForCausalLM"]}) == spec
    for end in ("Model", "ForSequenceClassification"):
        other = spec_from_config({**config, "architectures": [f"Llama{end}"]})
        assert other.architecture == f"Exaone{end}" and not other.logits
    assert spec_from_config(tiny_config("llama")).architecture == "LlamaForCausalLM"


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
    assert windows(spec_from_config(tiny_config(family, **changes))) == want


@pytest.mark.parametrize("window", [0, -1, None])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"])
def test_a_window_that_is_not_used_may_be_any_number(family, window):
    """transformers writes 0 for Qwen2-MoE without a window."""
    config = tiny_config(family, use_sliding_window=False, sliding_window=window)
    assert set(windows(spec_from_config(config))) == {None}


WINDOWED = ["mistral", "mixtral", "phi3", "gemma2", "gemma3_text", "cohere2", "exaone4", "gpt_oss", "olmo3"]


@pytest.mark.parametrize("window", [0, -1])
@pytest.mark.parametrize("family", [*WINDOWED, "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"])
def test_a_window_that_is_used_holds_the_token_itself(family, window):
    config = {**tiny_config(family), "use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    with pytest.raises(ValueError, match=f"sliding_window must be an integer of at least 1, got {window}"):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"sliding_window_pattern": 4}, (8, 8, 8, None, 8)),
        ({"sliding_window_pattern": "LLLG"}, (8, 8, 8, None, None)),  # the last layer sees everything
        ({"sliding_window_pattern": "LG"}, (8, None, 8, None, None)),
        (
            {"sliding_window_pattern": "LG", "layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
            (None,) * 4 + (8,),
        ),
        ({"sliding_window": None, "sliding_window_pattern": None}, (None,) * 5),
    ],
)
def test_exaone_windows(changes, want):
    spec = spec_from_config(
        tiny_config("exaone4", **{"num_hidden_layers": 5, "layer_types": None, "sliding_window": 8, **changes})
    )
    assert windows(spec) == want
    hybrid = any(want)
    assert [layer.attention.rope is None for layer in spec.layers] == [hybrid and window is None for window in want]


def test_yarn_reaches_further_than_it_was_trained():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert spec_from_config(tiny_config("qwen2", rope_scaling=yarn)).max_position_embeddings == 256
    short = tiny_config("qwen2", rope_scaling=yarn, max_position_embeddings=64)
    assert spec_from_config(short).max_position_embeddings == 256


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"architecture MambaForCausalLM is not supported; supported: \w+, \w+",
        ),
        ({"model_type": "mamba"}, "architecture mamba is not supported"),
        ({}, "architecture None is not supported"),
    ],
)
def test_unknown_architecture(config, message):
    with pytest.raises(ValueError, match=message) as raised:
        spec_from_config(config)
    assert not is_supported(config)
    assert all(name in str(raised.value) for name in FAMILIES)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, "4", True, 2.0])
def test_bad_sizes(name, value):
    with pytest.raises(ValueError, match=rf"config\.json: {name} must be an integer of at least 1, got"):
        spec_from_config(tiny_config("llama", **{name: value}))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"hidden_act": "tanh"}, "hidden_act must be one of silu.*'tanh'"),
        ("llama", {"hidden_act": "relu"}, "activation of a gated MLP must be one of silu.*'relu'"),
        ("llama", {"hidden_act": None}, "hidden_act must be one of"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, "torch_dtype must be one of float32"),
        ("llama", {"dtype": "int8"}, "json: dtype must be one of float32"),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list"),
        ("llama", {"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ("llama", {"head_dim": 12}, "head_size must be a multiple of 8"),
        (
            "llama",
            {"quantization_config": {"quant_method": "aqlm"}},
            "quant_method='aqlm' is not supported; supported: fp8,",
        ),
        ("llama", {"partial_rotary_factor": -0.5}, "partial_rotary_factor must be a number above 0, got -0.5"),
        ("llama", {"rope_theta": "big"}, "rope_theta must be a number above 0, got 'big'"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ("llama", {"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
        ("gpt2", {"n_layer": 0}, "n_layer must be an integer of at least 1, got 0"),
        ("gptj", {"rotary_dim": None}, "rotary_dim must be an integer of at least 1, got None"),
        ("gptj", {"rotary_dim": 24}, "rotary_dim must be at most head_size=16, got 24"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm=True is not supported"),
        ("mpt", {"no_bias": False}, "no_bias=False is not supported"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type='rmsnorm' is not supported"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi=False is not supported"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln=True is not supported"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config: prefix_lm=True is not supported"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type='multiquery_attention' is not"),
        ("mpt", {"attn_config": "torch"}, "attn_config must be an object, got 'torch'"),
        ("mpt", {"attn_config": {"clip_qkv": 0}}, "clip_qkv must be a number above 0, got 0"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale='inv_sqrt_d_model' is not supported"),
        ("dbrx", {"attn_config": 8}, "attn_config must be an object, got 8"),
        ("dbrx", {"attn_config": {"kv_n_heads": 3}}, "multiple of num_kv_heads"),
        ("dbrx", {"attn_config": {"kv_n_heads": None}}, "kv_n_heads must be an integer of at least 1, got None"),
        ("dbrx", {"attn_config": {"rope_theta": -1.0}}, "rope_theta must be a number above 0, got -1.0"),
        ("dbrx", {"ffn_config": "glu"}, "ffn_config must be an object, got 'glu'"),
        ("dbrx", {"ffn_config": {"moe_top_k": 5}}, "top_k must be from 1 to the 4 experts"),
        (
            "dbrx",
            {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
            "moe_normalize_expert_weights other than 1.0 is not supported, got 2.0",
        ),
        ("dbrx", {"ffn_config": {"uniform_expert_assignment": True}}, "uniform_expert_assignment other than False"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "mish"}}}, "ffn_act_fn must be one of silu, .*, got 'mish'"),
        (
            "dbrx",
            {"ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}},
            "ffn_act_fn with more than a name is not supported, got .*'approximate'",
        ),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0, got 0"),
        ("gemma2", {"final_logit_softcapping": "on"}, "final_logit_softcapping must be a number, got 'on'"),
        (
            "gemma4_text",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention other than False or 'vision",
        ),
        ("gemma4_text", {"num_experts": None}, "num_experts must be an integer of at least 1, got None"),
        ("gemma4_text", {"top_k_experts": 5}, "top_k must be from 1 to the 4 experts to choose from, got 5"),
        (
            "gemma4_text",
            {"vocab_size_per_layer_input": 100},
            "vocab_size_per_layer_input must be at least vocab_size=101",
        ),
        ("gemma4_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers leaves none of the first 0 layers"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "leaves none of the first 1 layers with keys that layer 1 reads"),
        ("gemma4_text", {"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config must have head_dim and"),
        ("gemma4_text", {"global_head_dim": 20}, "head_size must be a multiple of 8 from 16 to 512, got 20"),
        (
            "gemma4_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0},
                    "sliding_attention": {},
                }
            },
            "partial_rotary_factor must be at most 1, got 2.0",
        ),
        ("ernie4_5_moe", {"moe_intermediate_size": []}, "moe_intermediate_size must be an integer of at least 1, got"),
        ("kolibri1", {"sliding_window": None}, "sliding_window must be an integer of at least 1, got None"),
        ("phimoe", {"router_jitter_noise": 0.1}, "router_jitter_noise other than 0.01 is not supported, got 0.1"),
        ("mimo_v2_flash", {"v_head_dim": 32}, "value_size must be None or from 1 to 23, got 32"),
        ("mimo_v2_flash", {"swa_v_head_dim": 24}, "swa_v_head_dim other than 16 is not supported, got 24"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern must be a list of 0 or 1 for each"),
        ("laguna", {"gating": "per-layer"}, "gating other than True or 'per-head' or 'per-element' is not supported"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input other than False"),
        ("laguna", {"num_attention_heads_per_layer": [4, 8]}, "num_attention_heads_per_layer must be an integer of"),
        ("laguna", {"num_attention_heads_per_layer": [4, 3, 4]}, r"num_heads \(3\) must be a multiple of num_kv_heads"),
        ("gemma3_text", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping=3.0 is not supported"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit other than 7.0 is not supported, got 6.0"),
        ("mixtral", {"num_experts_per_tok": 5}, "top_k must be from 1 to the 4 experts"),
        ("llama", {"hidden_size": 100, "head_dim": None}, "head_size must be a multiple of 8 from 16 to 512, got 25"),
        ("glm4_moe", {"head_dim": 42}, "head_size must be a multiple of 8 from 16 to 512, got 42"),
        ("minimax_m2", {"rotary_dim": 0}, "rotary_dim must be an integer of at least 1, got 0"),
        (
            "minimax_m2",
            {"scoring_func": "softmax"},
            "scoring_func other than 'sigmoid' is not supported, got 'softmax'",
        ),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list other than .* is not supported"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias other than False is not supported, got True"),
        ("hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be dense or sparse for each of 3 layers"),
        ("sarvam_moe", {"use_bias": True}, "use_bias other than False is not supported, got True"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm other than False is not supported, got True"),
        ("ctrl", {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon other than 1e-06 is not supported, got 1e-05"),
        ("xglm", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok other than 1 is not supported, got 2"),
        ("llama4_text", {"moe_layers": 2}, "moe_layers must be a list of numbers of layers, got 2"),
        (
            "llama4_text",
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types must be chunked_attention or full_att",
        ),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size must be an integer of at least 1, got 0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("cohere2_moe", {"expert_selection_fn": "max"}, "expert_selection_fn must be softmax or sigmoid, got 'max'"),
        (
            "cohere2_moe",
            {"shared_expert_combination_strategy": "max"},
            "shared_expert_combination_strategy must be sum or average, got 'max'",
        ),
        ("glm4_moe", {"n_group": 3}, r"num_groups \(3\) must divide num_experts \(8\)"),
        (
            "exaone4",
            {"layer_types": None, "sliding_window_pattern": "LXG"},
            "must be of the letters L and G, got 'LXG'",
        ),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be an integer of"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min other than 1e-12 is not supported, got 0.1"),
        ("hunyuan_v1_dense", {"num_experts": 2}, "num_experts=2 is not supported by a dense model"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True is not supported"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha must be a number above 0"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "linear", "alpha": 2.0}}, "alpha of a rotation needs the type"),
        (
            "hunyuan_v1_moe",
            {"moe_topk": [1, 2]},
            "moe_topk must be an integer .* or a list of one for each of 3 layers",
        ),
        ("hunyuan_v1_moe", {"num_experts": 0}, "num_experts must be an integer of at least 1"),
        ("hunyuan_v1_moe", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped=1 is not supported"),
        ("smollm3", {"no_rope_layers": [1, 2, 1]}, "no_rope_layers must be a list of 0 or 1 for each of 3 layers"),
        ("minicpm", {"sparse_config": {"kernel_size": 32}}, "sparse_config=.* is not supported"),
        ("gpt_neo", {"attention_types": 3}, "attention_types must be pairs of a list and a number, got 3"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "attention_types must be global or local for"),
        ("gpt_neo", {"attention_types": [[["sparse"], 3]]}, "attention_types must be global or local for"),
        ("granite_swa", {"layer_rope_theta": [1e4, 0]}, "layer_rope_theta must be a list of 3 numbers, 0 for none"),
        (
            "ministral3",
            {"rope_scaling": {"llama_4_scaling_beta": 0.1}},
            "original_max_position_embeddings must be an int",
        ),
        (
            "mellum",
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters must have an object or null for full_att",
        ),
        (
            "cohere_compass_text",
            {"architectures": ["CohereCompassTextForSequenceClassification"], "pooling": "mean"},
            "pooling other than 'eos' is not supported, got 'mean'",
        ),
        ("doge", {"is_moe": True}, "is_moe other than False is not supported, got True"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ("llama", {"num_experts": 8}, "num_experts=8 is not supported"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True is not supported"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must be .* each of 3 layers"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types must be full_attention or sliding"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "sliding_window or its use is off"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None}, "max_window_layers must be"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling: .*short_factor"),
        ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "rope_scaling: .*'mrope'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: .*needs a positive 'factor'"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0, "speed": 1}}, "rope_scaling: .*speed"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
            "rope_parameters: .*full_attention",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(family, changes, message):
    with pytest.raises(ValueError, match=message):
        spec_from_config(tiny_config(family, **changes))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_weight_map_fills_each_parameter_once(family, stacked):
    """By either spelling of the experts in files; tests/models/test_names_in_memory.py has the others."""
    spec = spec_from_config(tiny_config(family))
    model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    times = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    slots = weight_names.weight_map(spec, FAMILIES[spec.architecture].names(spec)).values()
    stacks = {slot.parameter for slot in slots if slot.axis == 1}
    singles = {slot.parameter for slot in slots if slot.expert is not None}
    for slot in slots:
        if slot.parameter in stacks & singles and (slot.axis == 1) != stacked:
            continue
        place = slot.place(times[slot.parameter])
        assert place.shape == slot.own_shape
        place += 1
    assert all(bool((count == 1).all()) for count in times.values())


def test_doge_sees_all_keys():
    """Beyond its window a token would see those of the largest bias alone."""
    assert spec_from_config(tiny_config("doge", keep_window_size=200)).max_position_embeddings == 200
    assert spec_from_config(tiny_config("doge", keep_window_size=2048)).max_position_embeddings == 256


@pytest.mark.parametrize("end", ["ForCausalLM", "Model", "ForSequenceClassification"])
def test_transformers_writes_sarvam_as_glm(end):
    """The type tells it from GLM-4.5, whose files have other names of tensors."""
    ours = spec_from_config(tiny_config("sarvam_moe", architectures=[f"SarvamMoE{end}"]))
    theirs = spec_from_config(tiny_config("sarvam_moe", architectures=[f"Glm4Moe{end}"]))
    assert (
        ours == theirs and ours.architecture == f"SarvamMoE{end}" and "model.word_embeddings.weight" in weight_map(ours)
    )
    assert spec_from_config(tiny_config("glm4_moe")).architecture == "Glm4MoeForCausalLM"


def test_only_families_that_draft_have_extra_layers():
    glm, qwen = spec_from_config(tiny_config("glm4_moe")), spec_from_config(tiny_config("qwen3_moe"))
    assert is_extra(glm, "model.layers.3.eh_proj.weight")
    assert not is_extra(glm, "model.layers.2.mlp.gate.weight") and not is_extra(glm, "model.layers.4.eh_proj.weight")
    assert not is_extra(glm, "model.layers.30.eh_proj.weight")
    assert not is_extra(qwen, "model.layers.3.eh_proj.weight")
    gemma = spec_from_config(tiny_config("gemma4_text"))  # the last layer reads the keys of another
    assert is_extra(gemma, "model.layers.3.self_attn.k_proj.weight")
    assert is_extra(gemma, "model.layers.3.self_attn.k_norm.weight")
    assert not is_extra(gemma, "model.layers.3.self_attn.q_norm.weight")
    assert not is_extra(gemma, "model.layers.2.self_attn.v_proj.bias")
    ernie = spec_from_config(tiny_config("ernie4_5_moe"))
    exaone = spec_from_config(tiny_config("exaone_moe"))
    assert is_extra(exaone, "mtp.layers.0.mlp.up_proj.weight") and not is_extra(exaone, "model.layers.3.fc.weight")
    assert is_extra(ernie, "model.mtp_block.0.mlp.up_proj.weight") and not is_extra(ernie, "model.norm.weight")


def test_axes_of_published_models():
    """What a reader of docs/models.md would check."""
    phi3 = spec_from_config(tiny_config("phi3", partial_rotary_factor=0.75)).layers[0].attention
    assert phi3.rope.rotary_dim == 12
    gemma3 = spec_from_config(tiny_config("gemma3_text"))
    assert windows(gemma3) == (7, None, 7)
    assert [layer.attention.rope.base for layer in gemma3.layers] == [1000.0, 100000.0, 1000.0]
    assert [bool(layer.attention.rope.scaling) for layer in gemma3.layers] == [False, True, False]
    assert gemma3.embedding_multiplier == 8.0 and gemma3.norm.weight_offset == 1.0
    olmo3 = spec_from_config(tiny_config("olmo3"))
    assert windows(olmo3) == (7, None, 7) and olmo3.norm_position == "post"
    assert [bool(layer.attention.rope.scaling) for layer in olmo3.layers] == [False, True, False]
    exaone = spec_from_config(tiny_config("exaone4"))
    assert [layer.attention.rope is None for layer in exaone.layers] == [False, True, False]
    hunyuan = spec_from_config(
        tiny_config("hunyuan_v1_moe", num_shared_expert=[1, 2, 1], moe_intermediate_size=[24] * 3)
    )
    assert [layer.mlp.shared.intermediate_size for layer in hunyuan.layers] == [88, 176, 88]
    assert {layer.mlp.intermediate_size for layer in hunyuan.layers} == {24}
    dense = spec_from_config(tiny_config("hunyuan_v1_dense", num_experts=1))
    assert dense == spec_from_config(tiny_config("hunyuan_v1_dense"))
    rope = hunyuan.layers[0].attention.rope
    assert not rope.scaling and rope.base == pytest.approx(1e4 * 1000 ** (16 / 14))
    minitron = spec_from_config(without(tiny_config("nemotron", rope_percent=0.25), "partial_rotary_factor"))
    assert minitron.layers[0].attention.rope.rotary_dim == 4 and minitron.norm.bias and minitron.norm.weight_offset == 0
    internlm = spec_from_config(tiny_config("internlm3", qkv_bias=True)).layers[0]
    assert (internlm.attention.qkv_bias, internlm.attention.o_bias, internlm.mlp.bias) == (True, False, False)
    internlm = spec_from_config(tiny_config("internlm3", bias=True)).layers[0]
    assert (internlm.attention.qkv_bias, internlm.attention.o_bias, internlm.mlp.bias) == (False, True, True)
    glm = spec_from_config(tiny_config("glm4_moe"))
    assert [type(layer.mlp) for layer in glm.layers] == [MLPSpec, MoESpec, MoESpec]
    smol = spec_from_config(tiny_config("smollm3"))
    assert [layer.attention.rope is None for layer in smol.layers] == [False, False, True]
    opt = spec_from_config(tiny_config("opt", do_layer_norm_before=False, word_embed_proj_dim=32))
    assert (opt.norm_position, opt.embedding_size, opt.learned_positions, opt.position_offset) == ("stream", 32, 258, 2)
    assert spec_from_config(tiny_config("falcon")).caches[0].heads == 1


def test_queries_grow_only_where_they_can():
    """What the first positions do not have costs nothing in a model that is served with short sequences."""
    spec = spec_from_config(tiny_config("ministral3"))
    assert [layer.attention.query_scaling for layer in spec.layers] == [QueryScaling(every=10, factor=0.7)] * 3
    assert spec.up_to(11) == spec
    assert {layer.attention.query_scaling for layer in spec.up_to(10).layers} == {None}
    factors = QueryScaling(every=4, factor=0.5).of(torch.tensor([0, 3, 4, 11]))
    assert factors.tolist() == pytest.approx([1.0, 1.0, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3)])


def test_codegen_is_cut_in_four():
    spec = spec_from_config(tiny_config("codegen", n_head=6, n_embd=96))
    with pytest.raises(ValueError, match="n_head must be a multiple of 4, got 6"):
        weight_map(spec)


@pytest.mark.parametrize(
    ("heads", "want"),
    [(4, [2**-2, 2**-4, 2**-6, 2**-8]), (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])],
)
def test_alibi_slopes(heads, want):
    """A power of two, and the rest of the next power's slopes in between (Press et al.)."""
    bloom = spec_from_config(tiny_config("bloom", hidden_size=16 * heads, num_attention_heads=heads))
    assert bloom.layers[0].attention.alibi_slopes == tuple(want) and bloom.embedding_norm
    config = tiny_config("falcon", alibi=True, hidden_size=16 * heads, num_attention_heads=heads)
    attention = spec_from_config(config).layers[0].attention
    assert attention.rope is None and attention.alibi_slopes == tuple(slope / 4 for slope in want)
