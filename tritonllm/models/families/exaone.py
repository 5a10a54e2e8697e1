"""EXAONE 3, 4 and K-EXAONE: 3 is a Llama under other names; the others have a norm of each head, and where some layers
have a window, the others do not rotate."""

from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import STACKED, Family, always, attention, head_size, mlp, rms_norm
from tritonllm.models.families.llama import COMMON, llama
from tritonllm.models.families.olmo import NAMES_OF_POST_NORMS
from tritonllm.models.families.sigmoid_experts import blocks, sigmoid_experts
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _sliding(config: ConfigReader) -> list[bool]:
    """Which layers have a window, for a file without ``layer_types``.

    ``sliding_window_pattern`` is a number, every so many layers one has none, or letters that repeat, L for a layer
    with a window; then the last layer has none.
    """
    count, pattern = config.size("num_hidden_layers"), config["sliding_window_pattern"]
    if config.window() is None or config.get("layer_types") is not None:
        return [False] * count
    if isinstance(pattern, str):
        if not pattern or not set(pattern) <= {"L", "G"}:
            raise ValueError(f"config.json: sliding_window_pattern must be of the letters L and G, got {pattern!r}")
        return [pattern[i % len(pattern)] == "L" and i < count - 1 for i in range(count)]
    every = config.size("sliding_window_pattern")
    return [(i + 1) % every != 0 for i in range(count)]


def _attentions(config: ConfigReader) -> list[AttentionSpec]:
    """The attention of each layer."""
    norm, rope, hybrid = rms_norm(config), config.rope(head_size(config)), config.window() is not None

    def attends(window: int | None) -> AttentionSpec:
        return attention(config, window=window, rope=None if hybrid and window is None else rope, qk_norm=norm)

    return [attends(window) for window in config.windows(_sliding(config))]


def _exaone4(config: ConfigReader) -> dict[str, Any]:
    """Norms after each block."""
    block = mlp(config)
    layers = tuple(LayerSpec(attention=attends, mlp=block) for attends in _attentions(config))
    return {"norm": rms_norm(config), "norm_position": "post", "layers": layers}


def _exaone_moe(config: ConfigReader) -> dict[str, Any]:
    experts = sigmoid_experts(config, shared="num_shared_experts")
    pairs = zip(_attentions(config), blocks(config, experts), strict=True)
    return {
        "norm": rms_norm(config),
        "layers": tuple(LayerSpec(attention=attends, mlp=block) for attends, block in pairs),
    }


_EXAONE: dict[str, Any] = {
    **COMMON,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}

_NAMES_OF_EXAONE_3 = WeightNames(
    embed="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    o="attn.attention.out_proj",
    up=("mlp.c_fc_0", "mlp.c_fc_1"),
    down="mlp.c_proj",
)

FAMILIES: dict[str, Family] = {
    "ExaoneForCausalLM": Family(
        model_type="exaone",
        axes=llama,
        names=always(_NAMES_OF_EXAONE_3),
        in_memory=always(WeightNames()),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 8,
            "eos_token_id": 361,
        },
        renames={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        written_as="LlamaForCausalLM",
    ),
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        axes=_exaone4,
        names=always(NAMES_OF_POST_NORMS),
        defaults={**_EXAONE, "eos_token_id": 2},
    ),
    "ExaoneMoEForCausalLM": Family(
        model_type="exaone_moe",
        axes=_exaone_moe,
        names=always(WeightNames(correction_bias="mlp.e_score_correction_bias")),
        in_memory=always(STACKED),
        defaults={
            **_EXAONE,
            "eos_token_id": 53,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "n_routed_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
        },
        renames={"num_experts": "n_routed_experts"},
        reads=frozenset({"num_experts"}),
        aliases=("ExaoneMoeForCausalLM",),
        extra_names=("mtp.",),
    ),
}
