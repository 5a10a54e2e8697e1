"""GPT-2, GPT-J, OPT, GPT-NeoX, Falcon and Phi: layer norm, biases, an MLP without a gate."""

import dataclasses
from typing import Any

import torch

from tritonllm.layers.norm import NormSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.alibi import alibi_slopes
from tritonllm.models.families.common import (
    Family,
    always,
    attention,
    full_attention,
    head_size,
    layer_norm,
    mlp,
    same_layers,
)
from tritonllm.models.spec import LayerSpec, ModelSpec
from tritonllm.models.weight_names import WeightNames

OPT_OFFSET = 2


def _gpt2(config: ConfigReader) -> dict[str, Any]:
    block = mlp(config, gated=False, bias=True)
    scale = head_size(config) ** -0.5 if config.flag("scale_attn_weights") else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx")
    scales = [scale / (i + 1) if by_layer else scale for i in range(config.size("num_hidden_layers"))]
    return {
        "norm": layer_norm(config),
        "layers": tuple(
            LayerSpec(attention=full_attention(config, scale=scale, qkv_bias=True, o_bias=True), mlp=block)
            for scale in scales
        ),
        "learned_positions": config.size("max_position_embeddings"),
    }


def gptj(config: ConfigReader) -> dict[str, Any]:
    """The first ``rotary_dim`` elements of each head rotate, neighbours together."""
    rope = config.rope(config.size("rotary_dim"), interleaved=True)
    return {
        "norm": layer_norm(config),
        "parallel": "one norm",
        "layers": same_layers(config, full_attention(config, rope=rope), mlp(config, gated=False, bias=True)),
        "logit_bias": True,
    }


def _opt(config: ConfigReader) -> dict[str, Any]:
    bias, before = config.flag("enable_bias"), config.flag("do_layer_norm_before")
    affine = config.flag("layer_norm_elementwise_affine")
    attends = full_attention(config, qkv_bias=bias, o_bias=bias)
    return {
        "norm": NormSpec(kind="layer", eps=1e-5, weight=affine, bias=affine),
        "norm_position": "pre" if before else "stream",
        "final_norm": not config.flag("_remove_final_layer_norm"),
        "layers": same_layers(config, attends, mlp(config, gated=False, bias=bias)),
        "learned_positions": config.size("max_position_embeddings") + OPT_OFFSET,
        "position_offset": OPT_OFFSET,
        "embedding_size": config.size_or("word_embed_proj_dim", config.size("hidden_size")),
    }


def _gpt_neox(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    attends = full_attention(config, rope=config.rope(head_size(config)), qkv_bias=bias, o_bias=bias)
    return {
        "norm": layer_norm(config),
        "parallel": "two norms" if config.flag("use_parallel_residual") else None,
        "layers": same_layers(config, attends, mlp(config, gated=False, bias=True)),
    }


def _phi(config: ConfigReader) -> dict[str, Any]:
    norm = layer_norm(config)
    attends = attention(
        config,
        rope=config.rope(head_size(config)),
        qkv_bias=True,
        o_bias=True,
        qk_norm=norm if config.flag("qk_layernorm") else None,
    )
    return {
        "norm": norm,
        "parallel": "one norm",
        "layers": same_layers(config, attends, mlp(config, gated=False, bias=True)),
        "logit_bias": True,
    }


def _falcon(config: ConfigReader) -> dict[str, Any]:
    new, bias, heads = config.flag("new_decoder_architecture"), config.flag("bias"), config.size("num_attention_heads")
    kv_heads = config.size_or("num_kv_heads", heads) if new or not config.flag("multi_query") else 1
    head = head_size(config)
    attends = attention(
        config,
        num_kv_heads=kv_heads,
        rope=None if config.flag("alibi") else config.rope(head),
        alibi_slopes=_falcon_slopes(heads, head) if config.flag("alibi") else None,
        qkv_bias=bias,
        o_bias=bias,
    )
    parallel = None
    if new or config.flag("parallel_attn"):
        two = config.size_or("num_ln_in_parallel_attn", 2 if new else 1) == 2
        parallel = "two norms" if two else "one norm"
    block = mlp(config, gated=False, bias=bias)
    return {"norm": layer_norm(config), "parallel": parallel, "layers": same_layers(config, attends, block)}


def _falcon_slopes(heads: int, head: int) -> tuple[float, ...]:
    """The slopes as Falcon has them: in bfloat16, and added before the products are scaled.

    transformers multiplies by positions in bfloat16 as well, which beyond 256 keys takes neighbours for one; not here.
    """
    return tuple(slope * head**-0.5 for slope in torch.tensor(alibi_slopes(heads)).bfloat16().tolist())


def _falcon_names(spec: ModelSpec) -> WeightNames:
    two = spec.parallel == "two norms"
    return WeightNames(
        embed="transformer.word_embeddings",
        norm="transformer.ln_f",
        layer="transformer.h.{}",
        attention_norm="ln_attn" if two else "input_layernorm",
        mlp_norm="ln_mlp" if two else "post_attention_layernorm",
        qkv=("self_attention.query_key_value",),
        qkv_by_group=True,
        o="self_attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )


GPT2_RENAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
GPT2_NAMES = WeightNames(
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
)
GPTJ_NAMES = WeightNames(
    embed="transformer.wte",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    attention_norm="ln_1",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
)
OPT_NAMES = WeightNames(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
    norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)
_GPT_NEOX_NAMES = WeightNames(
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    lm_head="embed_out",
    layer="gpt_neox.layers.{}",
    qkv=("attention.query_key_value",),
    qkv_by_group=True,
    o="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
_PHI_NAMES = WeightNames(
    norm="model.final_layernorm",
    o="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up=("mlp.fc1",),
    down="mlp.fc2",
)

FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family(
        model_type="gpt2",
        axes=_gpt2,
        names=always(GPT2_NAMES),
        defaults={
            "max_position_embeddings": 1024,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        renames=GPT2_RENAMES,
    ),
    "GPTJForCausalLM": Family(
        model_type="gptj",
        axes=gptj,
        names=always(GPTJ_NAMES),
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
    "OPTForCausalLM": Family(
        model_type="opt",
        axes=_opt,
        names=always(OPT_NAMES),
        defaults={
            "max_position_embeddings": 2048,
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "enable_bias": True,
            "do_layer_norm_before": True,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
        },
        renames={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    ),
    "GPTNeoXForCausalLM": Family(
        model_type="gpt_neox",
        axes=_gpt_neox,
        names=always(_GPT_NEOX_NAMES),
        in_memory=always(dataclasses.replace(_GPT_NEOX_NAMES, lm_head="lm_head")),
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            "attention_bias": True,
            "use_parallel_residual": True,
            "partial_rotary_factor": 0.25,
        },
        renames={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    ),
    "PhiForCausalLM": Family(
        model_type="phi",
        axes=_phi,
        names=always(_PHI_NAMES),
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            "qk_layernorm": False,
            "partial_rotary_factor": 0.5,
        },
    ),
    "FalconForCausalLM": Family(
        model_type="falcon",
        axes=_falcon,
        names=_falcon_names,
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "eos_token_id": 11,
            "alibi": False,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
        },
        renames={
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_head_kv": "num_kv_heads",
            "ffn_hidden_size": "intermediate_size",
            "activation": "hidden_act",
            "layer_norm_epsilon": "layer_norm_eps",
        },
        reads=frozenset({"alibi"}),
    ),
}
