"""Llama 4 (text): some layers do not rotate and see everything, the others see the chunk of the sequence that they are
in; one expert a token, whose input its score multiplies.

Chunks are of 8192 tokens in the published models; a sequence that is not longer is computed as if there were none.
"""

from typing import Any

from tritonllm.layers.attention import AttentionSpec, QueryScaling
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.norm import NormSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, rms_norm
from tritonllm.models.families.llama import COMMON
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames

_KINDS = {"chunked_attention", "full_attention"}


def _rotates(config: ConfigReader) -> list[bool]:
    """Which layers rotate: ``no_rope_layers`` has a 1 for those that do."""
    if config.get("no_rope_layers"):
        return config.layer_flags("no_rope_layers")
    interval = config.size("no_rope_layer_interval")
    return [(i + 1) % interval != 0 for i in range(config.size("num_hidden_layers"))]


def _chunks(config: ConfigReader, rotates: list[bool]) -> list[int | None]:
    """The chunk that each layer sees of, ``None`` for all: by ``layer_types``, else those that rotate have one."""
    kinds = config.get("layer_types")
    size = None if config.get("attention_chunk_size") is None else config.size("attention_chunk_size")
    if kinds is None:
        return [size if turns else None for turns in rotates]
    if not isinstance(kinds, list) or len(kinds) != len(rotates) or not set(kinds) <= _KINDS:
        raise ValueError(
            f"config.json: layer_types must be {' or '.join(sorted(_KINDS))} for each of {len(rotates)} layers, got "
            f"{kinds!r}"
        )
    return [size if kind == "chunked_attention" else None for kind in kinds]


def _sparse(config: ConfigReader) -> list[int]:
    """The layers that have experts."""
    given, count = config.get("moe_layers"), config.size("num_hidden_layers")
    if given is None:
        step = config.size("interleave_moe_layer_step")
        return list(range(step - 1, count, step))
    if not isinstance(given, list) or not all(isinstance(i, int) for i in given):
        raise ValueError(f"config.json: moe_layers must be a list of numbers of layers, got {given!r}")
    return given


def _llama4(config: ConfigReader) -> dict[str, Any]:
    """The norm of a head has no weights, and may as well come before the rotation, which keeps its length. Only layers
    that rotate have it, only the others multiply queries by a number that grows with the position."""
    norm, bias, activation = rms_norm(config), config.flag("attention_bias"), config.activation()
    rope = config.rope(head_size(config), interleaved=True)
    of_head = NormSpec(kind="rms", eps=norm.eps, weight=False) if config.flag("use_qk_norm") else None
    scaling = None
    if config.flag("attn_temperature_tuning"):
        scaling = QueryScaling(every=config.size("floor_scale"), factor=config.number("attn_scale"), shift=1)

    def attends(rotates: bool, chunk: int | None) -> AttentionSpec:
        axes: dict[str, Any] = {"rope": rope, "qk_norm": of_head} if rotates else {"query_scaling": scaling}
        return attention(config, qkv_bias=bias, o_bias=bias, attention_chunk=chunk, **axes)

    inner, top_k = config.size("intermediate_size"), config.size("num_experts_per_tok")
    if top_k != 1:
        raise ValueError(f"config.json: num_experts_per_tok other than 1 is not supported, got {top_k}")
    experts = MoESpec(
        num_experts=config.size("num_local_experts"),
        top_k=top_k,
        intermediate_size=inner,
        activation=activation,
        scoring="sigmoid",
        renormalize=False,
        weights_on_input=True,
        shared=MLPSpec(intermediate_size=inner, activation=activation),
    )
    dense = MLPSpec(intermediate_size=config.size("intermediate_size_mlp"), activation=activation)
    rotates, sparse = _rotates(config), _sparse(config)
    layers = [
        LayerSpec(attention=attends(turns, chunk), mlp=experts if i in sparse else dense)
        for i, (turns, chunk) in enumerate(zip(rotates, _chunks(config, rotates), strict=True))
    ]
    return {"norm": norm, "layers": tuple(layers)}


FAMILIES: dict[str, Family] = {
    "Llama4ForCausalLM": Family(
        model_type="llama4_text",
        axes=_llama4,
        names=always(
            WeightNames(
                up=("feed_forward.gate_proj", "feed_forward.up_proj"),
                down="feed_forward.down_proj",
                router="feed_forward.router",
                stacked_up="feed_forward.experts.gate_up_proj",
                stacked_down="feed_forward.experts.down_proj",
                stacked_transposed=True,
                shared="feed_forward.shared_expert",
            )
        ),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "eos_token_id": 2,
            "intermediate_size_mlp": 16384,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        reads=frozenset({"num_local_experts"}),
    ),
}
