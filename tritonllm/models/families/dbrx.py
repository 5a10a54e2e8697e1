"""DBRX: layer norms without bias, clipped queries, keys and values, and experts that lie one below the other."""

from typing import Any

from tritonllm.layers.moe import MoESpec
from tritonllm.layers.rope import RopeSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    Family,
    always,
    attention,
    check_fixed,
    head_size,
    layer_norm,
    same_layers,
)
from tritonllm.models.weight_names import WeightNames


def _dbrx(config: ConfigReader) -> dict[str, Any]:
    """Fields of attention and of experts are in objects of their own."""
    options = config.nested("attn_config", {"kv_n_heads": 1})
    attends = attention(
        config,
        num_kv_heads=options.size("kv_n_heads"),
        rope=_rope(config, options),
        clip_qkv=options.number_or_none("clip_qkv"),
    )
    experts = _experts(config.nested("ffn_config", _EXPERTS))
    return {"norm": layer_norm(config, bias=False), "layers": same_layers(config, attends, experts)}


def _rope(config: ConfigReader, options: ConfigReader) -> RopeSpec:
    """Its base is that of ``attn_config``, as in DBRX's own code. ``rope_parameters`` of files that transformers 5
    writes has a base, too: 10000 where they were made from others, whatever ``attn_config`` says."""
    base = options.number_or_none("rope_theta")
    if base is not None:
        given = config.nested("rope_parameters") or config.nested("rope_scaling")
        config = ConfigReader({**config, "rope_parameters": {**given, "rope_theta": base}})
    return config.rope(head_size(config))


def _experts(config: ConfigReader) -> MoESpec:
    """The weights of the chosen ones are divided by their norm: of 1, so by their sum, or of none."""
    check_fixed(config, moe_normalize_expert_weights=(1.0,), uniform_expert_assignment=(False,))
    activation = config.nested("ffn_act_fn", {"name": "silu"})
    if set(activation) != {"name"}:
        raise ValueError(f"config.json: ffn_act_fn with more than a name is not supported, got {dict(activation)}")
    return MoESpec(
        num_experts=config.size("moe_num_experts"),
        top_k=config.size("moe_top_k"),
        intermediate_size=config.size("ffn_hidden_size"),
        activation=ConfigReader({"ffn_act_fn": activation["name"]}).activation("ffn_act_fn"),
        renormalize=config["moe_normalize_expert_weights"] is not None,
    )


_EXPERTS: dict[str, Any] = {
    "ffn_hidden_size": 3584,
    "moe_num_experts": 4,
    "moe_top_k": 1,
    "moe_normalize_expert_weights": 1.0,
}

FAMILIES: dict[str, Family] = {
    "DbrxForCausalLM": Family(
        model_type="dbrx",
        axes=_dbrx,
        names=always(
            WeightNames(
                embed="transformer.wte",
                norm="transformer.norm_f",
                layer="transformer.blocks.{}",
                attention_norm="norm_attn_norm.norm_1",
                mlp_norm="norm_attn_norm.norm_2",
                qkv=("norm_attn_norm.attn.Wqkv",),
                o="norm_attn_norm.attn.out_proj",
                router="ffn.router.layer",
                flat_up=("ffn.experts.mlp.w1", "ffn.experts.mlp.v1"),
                flat_down="ffn.experts.mlp.w2",
            )
        ),
        defaults={
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "eos_token_id": None,
        },
        renames={
            "d_model": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "max_seq_len": "max_position_embeddings",
        },
    ),
}
