"""GPT-1, GPT-Neo, CodeGen and BioGPT: as GPT-2, GPT-J and OPT, with their own order of norms, windows and tensors."""

import dataclasses
from typing import Any

from tritonllm.layers.norm import NormSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, full_attention, layer_norm, mlp, same_layers
from tritonllm.models.families.gpt import GPT2_NAMES, GPT2_RENAMES, GPTJ_NAMES, OPT_NAMES, OPT_OFFSET, gptj
from tritonllm.models.spec import LayerSpec

_CODEGEN_PARTS = 4  # its files are cut for this many chips
_GPT1_ACTIVATIONS = {"gelu": "gelu_new"}  # what it calls gelu is the approximation by tanh


def _gpt1(config: ConfigReader) -> dict[str, Any]:
    """The original transformer's order: the stream is normalised after each block."""
    act = config["hidden_act"]
    config = ConfigReader({**config, "hidden_act": _GPT1_ACTIVATIONS.get(act, act), "intermediate_size": None})
    attends = full_attention(config, qkv_bias=True, o_bias=True)
    return {
        "norm": layer_norm(config),
        "norm_position": "stream",
        "layers": same_layers(config, attends, mlp(config, gated=False, bias=True)),
        "learned_positions": config.size("max_position_embeddings"),
    }


def _gpt_neo(config: ConfigReader) -> dict[str, Any]:
    """Products of queries and keys are not scaled; some layers see a window."""
    block, window = mlp(config, gated=False, bias=True), config.size("window_size")
    kinds = _gpt_neo_kinds(config)
    return {
        "norm": layer_norm(config),
        "layers": tuple(
            LayerSpec(
                attention=full_attention(config, scale=1.0, window=window if kind == "local" else None, o_bias=True),
                mlp=block,
            )
            for kind in kinds
        ),
        "learned_positions": config.size("max_position_embeddings"),
    }


def _gpt_neo_kinds(config: ConfigReader) -> list[str]:
    """Whether a layer is ``local`` or ``global``: ``attention_layers``, or ``attention_types``, lists of kinds with how
    often each list comes."""
    kinds, count = config.get("attention_layers"), config.size("num_hidden_layers")
    types: Any = config.get("attention_types")
    try:
        kinds = kinds or [kind for some, times in types for _ in range(times) for kind in some]
    except (TypeError, ValueError) as error:
        raise ValueError(f"config.json: attention_types must be pairs of a list and a number, got {types!r}") from error
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"global", "local"}:
        raise ValueError(
            f"config.json: attention_types must be global or local for each of {count} layers, got {kinds!r}"
        )
    return kinds


def _biogpt(config: ConfigReader) -> dict[str, Any]:
    """Its norms have an epsilon of their own, whatever ``layer_norm_eps`` says."""
    attends = full_attention(config, qkv_bias=True, o_bias=True)
    return {
        "norm": NormSpec(kind="layer", eps=1e-5, bias=True),
        "layers": same_layers(config, attends, mlp(config, gated=False, bias=True)),
        "learned_positions": config.size("max_position_embeddings") + OPT_OFFSET,
        "position_offset": OPT_OFFSET,
        "embedding_multiplier": config.size("hidden_size") ** 0.5 if config.flag("scale_embedding") else 1.0,
    }


def _order_of_codegen(heads: int, kv_heads: int) -> tuple[int, ...]:
    """Each part has its queries, then its values, then its keys."""
    if heads % _CODEGEN_PARTS:
        raise ValueError(f"config.json: n_head must be a multiple of {_CODEGEN_PARTS}, got {heads}")
    size = heads // _CODEGEN_PARTS
    starts = 0, heads + kv_heads, heads
    return tuple(start + part * size + i for part in range(_CODEGEN_PARTS) for start in starts for i in range(size))


_GPT1_NAMES = dataclasses.replace(GPT2_NAMES, embed="transformer.tokens_embed", positions="transformer.positions_embed")
_GPT_NEO_NAMES = dataclasses.replace(
    GPT2_NAMES,
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    o="attn.attention.out_proj",
    transposed=False,
)
_CODEGEN_NAMES = dataclasses.replace(GPTJ_NAMES, qkv=("attn.qkv_proj",), qkv_order=_order_of_codegen)
_BIOGPT_NAMES = dataclasses.replace(
    OPT_NAMES,
    embed="biogpt.embed_tokens",
    positions="biogpt.embed_positions",
    norm="biogpt.layer_norm",
    lm_head="output_projection",
    layer="biogpt.layers.{}",
)

FAMILIES: dict[str, Family] = {
    "OpenAIGPTLMHeadModel": Family(
        model_type="openai-gpt",
        axes=_gpt1,
        names=always(_GPT1_NAMES),
        defaults={
            "max_position_embeddings": 512,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "eos_token_id": None,
        },
        renames={**GPT2_RENAMES, "afn": "hidden_act"},
    ),
    "GPTNeoForCausalLM": Family(
        model_type="gpt_neo",
        axes=_gpt_neo,
        names=always(_GPT_NEO_NAMES),
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "window_size": 256,
            "attention_types": [[["global", "local"], 12]],
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
        renames={
            "num_layers": "num_hidden_layers",
            "num_heads": "num_attention_heads",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "layer_norm_eps",
        },
    ),
    "CodeGenForCausalLM": Family(
        model_type="codegen",
        axes=gptj,
        names=always(_CODEGEN_NAMES),
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": False,
            "eos_token_id": 50256,
            "rotary_dim": 64,
        },
        renames=GPT2_RENAMES,
    ),
    "BioGptForCausalLM": Family(
        model_type="biogpt",
        axes=_biogpt,
        names=always(_BIOGPT_NAMES),
        defaults={
            "max_position_embeddings": 1024,
            "hidden_act": "gelu",
            "scale_embedding": True,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
    ),
}
