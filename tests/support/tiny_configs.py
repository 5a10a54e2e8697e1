"""A tiny ``config.json`` of every family, and of the model of transformers that computes the same."""

from typing import Any

from tritonllm.models.families import FAMILIES

_SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "torch_dtype": "float32",
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
_ALPHA = {
    "type": "dynamic",
    "alpha": 1000.0,
    "factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# What each family's configuration has beside, or in place of, the fields of _SMALL.
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 16, "attention_bias": False, "use_sliding_window": False},
    "phi3": {"sliding_window": None, "original_max_position_embeddings": 256},
    "glm": {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True},
    "olmo2": {"attention_bias": False},
    # transformers gives layers with a window the default base, whatever the file says: as published
    "olmo3": {
        "attention_bias": False,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "yarn", **{key: value for key, value in _YARN.items() if key != "type"}},
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "exaone4": {
        "head_dim": 24,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "seed_oss": {"head_dim": 24, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    "granite": {
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 8.0,
    },
    "minicpm": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
    "smollm3": {"no_rope_layers": [1, 1, 0], "use_sliding_window": False, "attention_bias": False},
    "stablelm": {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "num_key_value_heads": 4},
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "tie_word_embeddings": True, "use_qk_norm": True},
    "cohere2": {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma2": {
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 20,
        "sliding_window": 7,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 20,
        "sliding_window": 7,
        "sliding_window_pattern": 2,
        "rope_theta": 100000.0,
        "rope_local_base_freq": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "head_dim": 16},
    "internlm2": {"bias": False},
    "internlm3": {"head_dim": 24, "qkv_bias": False, "bias": False, "rope_scaling": {"type": "dynamic", "factor": 6.0}},
    "gpt2": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    "gptj": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 256,
        "n_inner": None,
        "rotary_dim": 8,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    },
    "bloom": {"seq_length": 256, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "mpt": {
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 256,
        "layer_norm_epsilon": 1e-5,
        "attn_config": {"clip_qkv": 1.5, "alibi": True},
        "tie_word_embeddings": True,
    },
    "opt": {
        "ffn_dim": 88,
        "word_embed_proj_dim": 64,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "tie_word_embeddings": True,
    },
    "gpt_neox": {
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
    },
    "phi": {
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 4,
        "qk_layernorm": False,
    },
    "falcon": {
        "activation": "gelu",
        "layer_norm_epsilon": 1e-5,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "use_sliding_window": False,
    },
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "glm4_moe": {
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "dots1": {
        "head_dim": 16,
        "attention_bias": True,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "sliding_window": 7,
        "max_window_layers": 2,
    },
    "solar_open": {
        "head_dim": 24,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "rope_scaling": _YARN,
    },
    "hy_v3": {
        "head_dim": 24,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_shared_experts": 2,
        "num_experts_per_tok": 3,
        "router_scaling_factor": 2.826,
    },
    "minimax_m2": {
        "head_dim": 24,
        "rotary_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    "exaone_moe": {
        "head_dim": 24,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "granitemoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 6.0,
    },
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.3,
        "logits_scaling": 6.0,
        "tie_word_embeddings": True,
    },
    "cohere2_moe": {
        "head_dim": 16,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 40,
        "sliding_window": 9,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "llama4_text": {
        "head_dim": 24,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "moe_layers": [0, 2],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 64,
        "floor_scale": 8,
        "attn_scale": 0.5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "ernie4_5": {"head_dim": 24, "use_bias": False, "tie_word_embeddings": True},
    "ernie4_5_moe": {
        "use_bias": False,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 24, "rope_scaling": _ALPHA, "tie_word_embeddings": True},
    "hunyuan_v1_moe": {"head_dim": 16, "rope_scaling": _ALPHA, "num_experts": 6, "moe_topk": 2},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "rope_theta": 150000.0,
        "rope_scaling": {**_YARN, "truncate": False},
        "attention_bias": True,
        "swiglu_limit": 7.0,
    },
}
ALL_FAMILIES = sorted(_EXTRA)
NOT_IN_TRANSFORMERS = ("internlm2", "minicpm")
# Fields of _SMALL under other names there; a configuration has one or the other.
_OF_GPT2 = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "intermediate_size")
_OWN_NAMES = {
    "gpt2": _OF_GPT2,
    "gptj": _OF_GPT2,
    "bloom": ("max_position_embeddings", "intermediate_size"),
    "mpt": _OF_GPT2,
    "opt": ("intermediate_size",),
    "cohere2_moe": ("rms_norm_eps",),
    "gemma2": ("hidden_act",),
    "gemma3_text": ("hidden_act",),
    "gpt_neox": ("rope_theta",),
    "falcon": ("intermediate_size",),
}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A ``config.json`` in the style of transformers 4."""
    (architecture,) = (name for name, known in FAMILIES.items() if known.model_type == family)
    small = {key: value for key, value in _SMALL.items() if key not in _OWN_NAMES.get(family, ())}
    return {"architectures": [architecture], "model_type": family, **small, **_EXTRA[family], **changes}


def reference_config(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers is asked for: where it has no such model, another that computes the same.

    That is a Granite for MiniCPM, and for InternLM 2 a Llama.
    """
    if config["model_type"] == "internlm2":
        rest = {key: value for key, value in config.items() if key != "bias"}
        return {**rest, "model_type": "llama", "attention_bias": config["bias"]}
    if config["model_type"] != "minicpm":
        return config
    scales = {name: config[name] for name in ("scale_emb", "scale_depth", "dim_model_base")}
    rest = {key: value for key, value in config.items() if key not in scales}
    head = config["hidden_size"] // config["num_attention_heads"]
    return {
        **rest,
        "model_type": "granite",
        "embedding_multiplier": scales["scale_emb"],
        "residual_multiplier": scales["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "attention_multiplier": head**-0.5,
        "logits_scaling": config["hidden_size"] / scales["dim_model_base"],
    }
