"""InternLM 2 and 3: Llama under other names, with biases of the blocks' projections by flags of their own."""

from typing import Any

from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, mlp, rms_norm, same_layers
from tritonllm.models.families.heads import INTERNLM2_REWARDS
from tritonllm.models.families.llama import COMMON
from tritonllm.models.weight_names import WeightNames


def _internlm2(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("bias")
    attends = attention(config, rope=config.rope(head_size(config)), qkv_bias=bias, o_bias=bias)
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, mlp(config))}


def _internlm3(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("bias")
    rope = config.rope(head_size(config))
    attends = attention(config, rope=rope, qkv_bias=config.flag("qkv_bias"), o_bias=bias)
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, mlp(config, bias=bias))}


# Of the code that comes with its checkpoints: transformers has no InternLM 2.
_INTERNLM2_NAMES = WeightNames(
    embed="model.tok_embeddings",
    lm_head="output",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
    qkv=("attention.wqkv",),
    qkv_by_group=True,
    o="attention.wo",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)

FAMILIES: dict[str, Family] = {
    "InternLM2ForCausalLM": Family(
        model_type="internlm2",
        axes=_internlm2,
        names=always(_INTERNLM2_NAMES),
        defaults={**COMMON, "max_position_embeddings": 2048, "bias": True, "eos_token_id": 2},
        heads=INTERNLM2_REWARDS,
    ),
    "InternLM3ForCausalLM": Family(
        model_type="internlm3",
        axes=_internlm3,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "qkv_bias": False,
            "bias": False,
            "eos_token_id": 2,
        },
        # transformers 5 writes them so
        renames={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    ),
}
