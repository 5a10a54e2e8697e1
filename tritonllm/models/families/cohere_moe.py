"""Cohere 2 with experts: as Cohere 2, with a choice of how experts are scored and shared ones are added."""

from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, layer_norm, rms_norm, sparse_layers
from tritonllm.models.families.llama import COMMON
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _experts(config: ConfigReader) -> MoESpec:
    """The softmax is over the chosen experts. Shared ones are as wide as the others, and are added, or averaged with
    the sum of the others."""
    inner, activation = config.size("intermediate_size"), config.activation()
    shared = config.size("num_shared_experts", low=0) * inner
    scoring, together = config["expert_selection_fn"], config["shared_expert_combination_strategy"]
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"config.json: expert_selection_fn must be softmax or sigmoid, got {scoring!r}")
    if together not in ("sum", "average"):
        raise ValueError(f"config.json: shared_expert_combination_strategy must be sum or average, got {together!r}")
    half = 0.5 if shared and together == "average" else 1.0
    return MoESpec(
        num_experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=inner,
        activation=activation,
        scoring=scoring,
        renormalize=scoring == "softmax" or config.flag("norm_topk_prob"),
        scale=half,
        shared=MLPSpec(intermediate_size=shared, activation=activation) if shared else None,
        shared_scale=half,
    )


def _cohere2_moe(config: ConfigReader) -> dict[str, Any]:
    """Layers with a window rotate; of those without, dense ones may. The first ``first_k_dense_replace`` are dense, and
    have windows by a pattern of their own."""
    bias, count = config.flag("attention_bias"), config.size("num_hidden_layers")
    first = config.size("first_k_dense_replace", low=0)
    before, after = config.size("prefix_dense_sliding_window_pattern"), config.size("sliding_window_pattern")
    sliding = [(i + 1) % before != 0 for i in range(first)] + [(i + 1) % after != 0 for i in range(count - first)]
    rope, experts = config.rope(head_size(config), interleaved=True), _experts(config)
    layers = []
    for window, sparse in zip(config.windows(sliding[:count]), sparse_layers(config), strict=True):
        turns = window is not None or (not sparse and before == 1)
        attends = attention(config, window=window, rope=rope if turns else None, qkv_bias=bias, o_bias=bias)
        block: MLPSpec | MoESpec = experts
        if not sparse:
            inner = config.size("prefix_dense_intermediate_size")
            block = MLPSpec(intermediate_size=inner, activation=config.activation())
        layers.append(LayerSpec(attention=attends, mlp=block))
    return {
        "norm": layer_norm(config, bias=False) if config.get("rms_norm_eps") is None else rms_norm(config),
        "parallel": "one norm",
        "layers": tuple(layers),
        "logit_scale": config.number("logit_scale"),
    }


FAMILIES: dict[str, Family] = {
    "Cohere2MoeForCausalLM": Family(
        model_type="cohere2_moe",
        axes=_cohere2_moe,
        names=always(WeightNames()),
        defaults={
            **{key: value for key, value in COMMON.items() if key != "rms_norm_eps"},
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "eos_token_id": 255001,
            "head_dim": 128,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "prefix_dense_sliding_window_pattern": 1,
            "first_k_dense_replace": 0,
            "num_experts_per_tok": 2,
            "num_experts": 8,
            "num_shared_experts": 0,
            "shared_expert_combination_strategy": "average",
            "expert_selection_fn": "softmax",
            "norm_topk_prob": True,
        },
        reads=frozenset({"logit_scale", "num_experts"}),
    ),
}
