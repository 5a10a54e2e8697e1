"""The architectures whose GGUF files can be read: names of their tensors, and what the converter changed in these.

Names are those that llama.cpp's ``convert_hf_to_gguf.py`` writes, each with the name that Hugging Face's files have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tritonllm.models.gguf.header import GGUFHeader

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LLAMA = {**_ATTENTION, **_MLP}
_FUSED = {**_LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT_OSS = {
    **_ATTENTION,
    **_EXPERTS,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
# Frequencies of the rotation, which are part of the configuration (tritonllm/models/gguf/config.py).
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_OF_CONFIG = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}


@dataclass(frozen=True, kw_only=True)
class GGUFFamily:
    """What the files of one architecture hold.

    Attributes:
        architecture: its name in Hugging Face's ``config.json``.
        layer: names of a layer's modules: the file's, then Hugging Face's; ``{}`` is the number of an expert, all of
            which the file has in one tensor.
        pairs_rows: the rows of a query or key head that turn together are neighbours; Hugging Face's lie half a head
            apart.
        norms_plus_one: norms have the factor itself; Hugging Face's files have it minus 1.
    """

    architecture: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    pairs_rows: bool = False
    norms_plus_one: bool = False

    def name(self, theirs: str) -> str | None:
        """Hugging Face's name of a tensor; ``None`` for one that is part of the configuration.

        Raises:
            ValueError: no such tensor is known.
        """
        if theirs in _OF_CONFIG:
            return None
        place, _, kind = theirs.rpartition(".")
        if place in _OUTSIDE:
            return f"{_OUTSIDE[place]}.{kind}"
        begin, _, rest = place.partition(".")
        index, _, module = rest.partition(".")
        if begin != "blk" or not index.isdecimal() or module not in self.layer or kind not in ("weight", "bias"):
            raise ValueError(f"tensor {theirs} has no place in {self.architecture}")
        name = f"model.layers.{index}.{self.layer[module]}"
        return name if module == "attn_sinks" else f"{name}.{kind}"


FAMILIES = {
    "llama": GGUFFamily(architecture="LlamaForCausalLM", pairs_rows=True),
    "qwen2": GGUFFamily(architecture="Qwen2ForCausalLM"),
    "qwen3": GGUFFamily(architecture="Qwen3ForCausalLM", layer={**_LLAMA, **_QK_NORMS}),
    "qwen3moe": GGUFFamily(architecture="Qwen3MoeForCausalLM", layer={**_ATTENTION, **_QK_NORMS, **_EXPERTS}),
    "phi3": GGUFFamily(architecture="Phi3ForCausalLM", layer=_FUSED),
    "gemma": GGUFFamily(architecture="GemmaForCausalLM", norms_plus_one=True),
    "gemma2": GGUFFamily(architecture="Gemma2ForCausalLM", layer={**_LLAMA, **_SANDWICH}, norms_plus_one=True),
    "gemma3": GGUFFamily(
        architecture="Gemma3ForCausalLM", layer={**_LLAMA, **_QK_NORMS, **_SANDWICH}, norms_plus_one=True
    ),
    "gpt-oss": GGUFFamily(architecture="GptOssForCausalLM", layer=_GPT_OSS),
}
_EXPERTS_OF_LLAMA = GGUFFamily(
    architecture="MixtralForCausalLM", layer={**_ATTENTION, **_MIXTRAL}, pairs_rows=True
)  # llama.cpp has one name for both


def family_of(header: GGUFHeader) -> GGUFFamily:
    """The family of a model; ``header`` is its first file's.

    Raises:
        ValueError: the file names none, or one that is not supported.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"{header.path}: GGUF files of the architecture {name!r} are not supported; supported: "
            f"{', '.join(FAMILIES)}. Give the model as published, in safetensors"
        )
    return _EXPERTS_OF_LLAMA if name == "llama" and header.metadata.get("llama.expert_count") else FAMILIES[name]
