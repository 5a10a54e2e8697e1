"""BERT and its descendants: encoders, in which every token sees all others. They embed and classify.

Devlin et al., "BERT" (2019): learned positions and kinds of tokens, norms of the stream after each block. ModernBERT
(Warner et al., 2024): norms before each block, rotation, a gated MLP, and in two of three layers a window to both
sides.
"""

from typing import Any

from tritonllm.layers.head import ACTIVATIONS, DenseSpec, HeadSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, full_attention, layer_norm, mlp, same_layers
from tritonllm.models.families.heads import FamilyHead, count_labels, label_activation
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _bert(config: ConfigReader) -> dict[str, Any]:
    if config.get("position_embedding_type") not in (None, "absolute"):
        raise ValueError(f"config.json: position_embedding_type={config['position_embedding_type']!r} is not supported")
    if config.flag("is_decoder"):
        raise ValueError("config.json: is_decoder=true is not supported: the model is an encoder here")
    attends = full_attention(config, qkv_bias=True, o_bias=True, causal=False)
    return {
        "norm": layer_norm(config),
        "norm_position": "stream",
        "embedding_norm": True,
        "layers": same_layers(config, attends, mlp(config, gated=False, bias=True)),
        "learned_positions": config.size("max_position_embeddings"),
        "token_types": config.size("type_vocab_size"),
        "logits": False,
        "tie_word_embeddings": False,
    }


def _roberta(config: ConfigReader) -> dict[str, Any]:
    """The first rows of the positions belong to padding."""
    axes, offset = _bert(config), config.size("pad_token_id", low=0) + 1
    return {**axes, "position_offset": offset, "max_position_embeddings": axes["learned_positions"] - offset}


def _modernbert(config: ConfigReader) -> dict[str, Any]:
    count, every = config.size("num_hidden_layers"), config.size("global_attn_every_n_layers")
    half = config.size("local_attention") // 2
    windows = ConfigReader({**config, "sliding_window": half + 1}).windows([i % every != 0 for i in range(count)])
    bias, block = config.flag("attention_bias"), mlp(config, bias=config.flag("mlp_bias"))
    head = config.size("hidden_size") // config.size("num_attention_heads")
    local = config["global_rope_theta"] if config["local_rope_theta"] is None else config["local_rope_theta"]
    thetas = {None: ("full_attention", config["global_rope_theta"]), half + 1: ("sliding_attention", local)}
    kinds = {}
    for window, (kind, theta) in thetas.items():
        rope = ConfigReader({**config, "rope_theta": theta}).rope(head, kind=kind)
        attends = full_attention(config, qkv_bias=bias, o_bias=bias, rope=rope, window=window, causal=False)
        kinds[window] = LayerSpec(attention=attends, mlp=block)
    return {
        "norm": layer_norm(config, bias=config.flag("norm_bias")),
        "embedding_norm": True,
        "first_norm": False,
        "layers": tuple(kinds[window] for window in windows),
        "logits": False,
        "tie_word_embeddings": False,
    }


def _two_layers(config: ConfigReader, **first: Any) -> tuple[DenseSpec, DenseSpec]:
    hidden = config.size("hidden_size")
    dense = DenseSpec(in_features=hidden, out_features=hidden, **first)
    return dense, DenseSpec(in_features=hidden, out_features=count_labels(config), bias=True)


def _bert_head(config: ConfigReader) -> HeadSpec:
    """BERT's pooler, then the classifier; RoBERTa has the same under other names."""
    dense = _two_layers(config, bias=True, activation="tanh")
    return HeadSpec(dense=dense, pooling="CLS", activation=label_activation(config, dense[-1].out_features))


def _modernbert_head(config: ConfigReader) -> HeadSpec:
    norm = layer_norm(config, bias=config.flag("norm_bias"))
    activation = config.activation("classifier_activation")
    if activation not in ACTIVATIONS:
        raise ValueError(f"config.json: classifier_activation must be one of {', '.join(ACTIVATIONS)}")
    if config["classifier_pooling"] not in ("cls", "mean"):
        raise ValueError(f"config.json: classifier_pooling must be cls or mean, got {config['classifier_pooling']!r}")
    dense = _two_layers(config, bias=config.flag("classifier_bias"), activation=activation, norm=norm)
    labels = dense[-1].out_features
    mean = config["classifier_pooling"] == "mean"
    return HeadSpec(dense=dense, pooling="MEAN" if mean else "CLS", activation=label_activation(config, labels))


def _names(base: str) -> WeightNames:
    return WeightNames(
        embed=f"{base}.embeddings.word_embeddings",
        positions=f"{base}.embeddings.position_embeddings",
        token_types=f"{base}.embeddings.token_type_embeddings",
        embedding_norm=f"{base}.embeddings.LayerNorm",
        layer=f"{base}.encoder.layer.{{}}",
        attention_norm="attention.output.LayerNorm",
        mlp_norm="output.LayerNorm",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        o="attention.output.dense",
        up=("intermediate.dense",),
        down="output.dense",
    )


_MODERNBERT_NAMES = WeightNames(
    embed="model.embeddings.tok_embeddings",
    embedding_norm="model.embeddings.norm",
    norm="model.final_norm",
    layer="model.layers.{}",
    attention_norm="attn_norm",
    mlp_norm="mlp_norm",
    qkv=("attn.Wqkv",),
    o="attn.Wo",
    up=("mlp.Wi",),
    down="mlp.Wo",
)
_BERT: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "is_decoder": False,
}
_ROBERTA = {**_BERT, "pad_token_id": 1}
_BERT_HEAD = FamilyHead(spec=_bert_head, names=("bert.pooler.dense", "classifier"))
_ROBERTA_HEAD = FamilyHead(spec=_bert_head, names=("classifier.dense", "classifier.out_proj"))
_MODERNBERT_HEAD = FamilyHead(spec=_modernbert_head, names=("head.dense", "classifier"), norm_names=("head.norm", ""))
# What the files have beside an encoder: BERT's pooler, which only classifiers use, and heads that guess masked words.
_BESIDE_BERT = ("bert.pooler.", "pooler.", "cls.")
_BESIDE_ROBERTA = ("roberta.pooler.", "pooler.", "lm_head.")

FAMILIES: dict[str, Family] = {
    "BertModel": Family(
        model_type="bert",
        axes=_bert,
        names=always(_names("bert")),
        defaults=_BERT,
        extra_names=_BESIDE_BERT,
        heads={"BertForMaskedLM": FamilyHead(), "BertForSequenceClassification": _BERT_HEAD},
    ),
    "RobertaModel": Family(
        model_type="roberta",
        axes=_roberta,
        names=always(_names("roberta")),
        defaults=_ROBERTA,
        extra_names=_BESIDE_ROBERTA,
        heads={"RobertaForMaskedLM": FamilyHead(), "RobertaForSequenceClassification": _ROBERTA_HEAD},
    ),
    "XLMRobertaModel": Family(
        model_type="xlm-roberta",
        axes=_roberta,
        names=always(_names("roberta")),
        defaults=_ROBERTA,
        extra_names=_BESIDE_ROBERTA,
        heads={"XLMRobertaForMaskedLM": FamilyHead(), "XLMRobertaForSequenceClassification": _ROBERTA_HEAD},
    ),
    "ModernBertModel": Family(
        model_type="modernbert",
        axes=_modernbert,
        names=always(_MODERNBERT_NAMES),
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "norm_bias": False,
            "max_position_embeddings": 8192,
            "attention_bias": False,
            "mlp_bias": False,
            "global_attn_every_n_layers": 3,
            "local_attention": 128,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "classifier_pooling": "cls",
            "classifier_bias": False,
            "classifier_activation": "gelu",
            "eos_token_id": 50282,
            "tie_word_embeddings": False,
        },
        renames={"hidden_activation": "hidden_act", "norm_eps": "layer_norm_eps"},
        extra_names=("head.", "decoder."),
        heads={"ModernBertForMaskedLM": FamilyHead(), "ModernBertForSequenceClassification": _MODERNBERT_HEAD},
    ),
}
