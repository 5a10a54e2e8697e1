"""Hunyuan v1, dense and with experts: the norm of each head comes after its rotation."""

from collections.abc import Mapping
from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.rope import RopeSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, mlp, rms_norm, same_layers
from tritonllm.models.families.llama import COMMON
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _rope(config: ConfigReader) -> RopeSpec:
    """A ``dynamic`` scaling with an ``alpha`` is none that depends on the length: ``alpha`` stretches the base (NTK).

    Its other fields (``factor`` 1, those of yarn) are in the files and mean nothing then.
    """
    head = head_size(config)
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(given, Mapping) or given.get("alpha") is None:
        return config.rope(head)
    if (given.get("rope_type") or given.get("type")) != "dynamic":
        raise ValueError(f"config.json: alpha of a rotation needs the type dynamic, got {dict(given)}")
    scaling = ConfigReader({"rope_theta": config.get("rope_theta") or 10000.0, **given})
    base = scaling.number("rope_theta") * scaling.number("alpha") ** (head / (head - 2))
    return ConfigReader({**config, "rope_parameters": None, "rope_scaling": None, "rope_theta": base}).rope(head)


def _attention(config: ConfigReader) -> AttentionSpec:
    bias = config.flag("attention_bias")
    norm = rms_norm(config) if config.flag("use_qk_norm") else None
    return attention(
        config, rope=_rope(config), qkv_bias=bias, o_bias=bias, qk_norm=norm, qk_norm_after_rope=norm is not None
    )


def _dense(config: ConfigReader) -> dict[str, Any]:
    if config.get("num_experts") not in (None, 0, 1):  # what files of dense models may say
        raise ValueError(f"config.json: num_experts={config['num_experts']!r} is not supported by a dense model")
    return {"norm": rms_norm(config), "layers": same_layers(config, _attention(config), mlp(config))}


def _with_experts(config: ConfigReader) -> dict[str, Any]:
    """Fields of experts are numbers, or lists with one for each layer."""
    attends, activation = _attention(config), config.activation()
    inner = config.size("intermediate_size")
    experts = config.size_of_layers("num_experts")
    top_k = config.size_of_layers("num_experts_per_tok")
    of_expert = config.size_of_layers("moe_intermediate_size", inner)
    shared = config.size_of_layers("num_shared_expert")

    def block(i: int) -> MoESpec:
        return MoESpec(
            num_experts=experts[i],
            top_k=top_k[i],
            intermediate_size=of_expert[i],
            activation=activation,
            shared=MLPSpec(intermediate_size=shared[i] * inner, activation=activation),
        )

    layers = tuple(LayerSpec(attention=attends, mlp=block(i)) for i in range(config.size("num_hidden_layers")))
    return {"norm": rms_norm(config), "layers": layers}


_NAMES = WeightNames(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared="mlp.shared_mlp",
)
_HUNYUAN: dict[str, Any] = {
    **COMMON,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "use_qk_norm": True,
    "eos_token_id": 2,
}

FAMILIES: dict[str, Family] = {
    "HunYuanDenseV1ForCausalLM": Family(
        model_type="hunyuan_v1_dense",
        axes=_dense,
        names=always(_NAMES),
        defaults=_HUNYUAN,
        renames={"attention_head_dim": "head_dim"},
        reads=frozenset({"num_experts"}),
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        model_type="hunyuan_v1_moe",
        axes=_with_experts,
        names=always(_NAMES),
        defaults={
            **_HUNYUAN,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "num_shared_expert": 1,
            "moe_intermediate_size": None,
        },
        renames={"moe_topk": "num_experts_per_tok", "attention_head_dim": "head_dim"},
        reads=frozenset({"num_experts"}),
    ),
}
