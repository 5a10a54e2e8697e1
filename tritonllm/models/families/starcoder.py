"""StarCoder 1 and SantaCoder (GPT-2 with one key head) and StarCoder 2 (Llama with layer norms and a plain MLP)."""

from typing import Any

from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, layer_norm, mlp, same_layers
from tritonllm.models.families.gpt import GPT2_RENAMES
from tritonllm.models.spec import ModelSpec
from tritonllm.models.weight_names import WeightNames


def _gpt_bigcode(config: ConfigReader) -> dict[str, Any]:
    heads = config.size("num_attention_heads")
    attends = attention(
        config,
        num_kv_heads=1 if config.flag("multi_query") else heads,
        scale=None if config.flag("scale_attn_weights") else 1.0,
        qkv_bias=True,
        o_bias=True,
    )
    return {
        "norm": layer_norm(config),
        "layers": same_layers(config, attends, mlp(config, gated=False, bias=True)),
        "learned_positions": config.size("max_position_embeddings"),
    }


def _gpt_bigcode_names(spec: ModelSpec) -> WeightNames:
    return WeightNames(
        embed="transformer.wte",
        positions="transformer.wpe",
        norm="transformer.ln_f",
        layer="transformer.h.{}",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        qkv_by_group=spec.layers[0].attention.num_kv_heads > 1,
        o="attn.c_proj",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
    )


def _starcoder2(config: ConfigReader) -> dict[str, Any]:
    bias, rope = config.flag("use_bias"), config.rope(head_size(config))
    attends = attention(config, rope=rope, window=config.window(), qkv_bias=bias, o_bias=bias)
    return {
        "norm": layer_norm(config),
        "layers": same_layers(config, attends, mlp(config, gated=False, bias=bias)),
    }


FAMILIES: dict[str, Family] = {
    "GPTBigCodeForCausalLM": Family(
        model_type="gpt_bigcode",
        axes=_gpt_bigcode,
        names=_gpt_bigcode_names,
        defaults={
            "max_position_embeddings": 1024,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
            "scale_attn_weights": True,
            "multi_query": True,
        },
        renames=GPT2_RENAMES,
    ),
    "Starcoder2ForCausalLM": Family(
        model_type="starcoder2",
        axes=_starcoder2,
        names=always(WeightNames(up=("mlp.c_fc",), down="mlp.c_proj")),
        defaults={
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "sliding_window": None,
            "use_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
        renames={"norm_epsilon": "layer_norm_eps"},
    ),
}
