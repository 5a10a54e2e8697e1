"""A tiny ``config.json`` of every encoder family."""

from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
_ROBERTA = {"layer_norm_eps": 1e-5, "type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "gelu"}
_EXTRA: dict[str, dict[str, Any]] = {
    "bert": {"layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu"},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "modernbert": {
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "local_attention": 8,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 1000.0,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
    },
    "gemma3_text": {
        "head_dim": 16,
        "num_key_value_heads": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 20,
        "sliding_window": 10,
        "sliding_window_pattern": 2,
        "rope_theta": 100000.0,
        "rope_local_base_freq": 1000.0,
        "rms_norm_eps": 1e-5,
        "use_bidirectional_attention": True,
    },
}
ENCODERS = tuple(_EXTRA)
CLASSIFIERS = ("bert", "roberta", "xlm-roberta", "modernbert")


def encoder_config(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **_SMALL, **_EXTRA[family], **fields}
