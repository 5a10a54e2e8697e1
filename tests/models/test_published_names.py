"""Every name of the tensors of published checkpoints, in tiny shapes: each has a place, or belongs to a tower or to a
layer that drafts, and is left out.

Where the lists come from, since no checkpoint was at hand:

- Gemma 3: the index of google/medgemma-27b-it, a Gemma 3 27B. That of the 4B, the same class, was not found.
- Qwen3-VL: the index of nvidia/Cosmos-Reason2-8B, a Qwen3-VL 8B.
- Qwen3-VL-MoE: its towers as Qwen3-VL's. That its stacked experts are ``[experts, in, out]``, which transformers 5
  turns on loading, is what VeOmni's documents say of Qwen/Qwen3-VL-30B-A3B-Instruct. Its index was not found.
- Mistral Small 3.1 and 3.2: the names that Ollama converts from. An index was not found.
- Llama 4 Scout: the names that torchtitan's adapter of its checkpoint knows, towers included. An index was not found.
- GLM-4.6: the index of GLM-4.5-Air's first two layers, as an issue of GPTQModel quotes it, with the norms of heads that
  GLM-4.6's ``use_qk_norm`` adds, and the layer that drafts as llama.cpp reads it: GLM-4.5 has its own embeddings and
  output projection there, GLM-4.6 has not.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit, refused
from support.real_configs import GLM_4_6, LLAMA_4_SCOUT
from support.tiny_models import load_decoder

from tritonllm.models.families import is_extra, spec_from_config, weight_map

TINY = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101}
TINY |= {"intermediate_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 128}
ATTENTION = [f"self_attn.{p}_proj.weight" for p in "qkvo"]
HEAD_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]


def swiglu(name: str) -> list[str]:
    return [f"{name}.{projection}_proj.weight" for projection in ("gate", "up", "down")]


def both(*names: str) -> list[str]:
    return [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]


def layers(prefix: str, names: list[str], count: int = 3) -> list[str]:
    return [f"{prefix}.{i}.{name}" for i in range(count) for name in names]


SIGLIP = [
    *both("embeddings.patch_embedding", "post_layernorm"),
    "embeddings.position_embedding.weight",
    *layers("encoder.layers", both("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"), 2),
    *layers("encoder.layers", both(*(f"self_attn.{p}_proj" for p in ("q", "k", "v", "out"))), 2),
]
GEMMA_3 = [
    "language_model.model.embed_tokens.weight",
    "language_model.model.norm.weight",
    *layers("language_model.model.layers", [*NORMS, *ATTENTION, *HEAD_NORMS, *swiglu("mlp")]),
    *layers("language_model.model.layers", [f"{p}_feedforward_layernorm.weight" for p in ("pre", "post")]),
    "multi_modal_projector.mm_input_projection_weight",
    "multi_modal_projector.mm_soft_emb_norm.weight",
    *(f"vision_tower.vision_model.{name}" for name in SIGLIP),
]
MERGER = both("linear_fc1", "linear_fc2", "norm")
QWEN_VISION = [
    *layers("blocks", both("attn.proj", "attn.qkv", "mlp.linear_fc1", "mlp.linear_fc2", "norm1", "norm2"), 2),
    *layers("deepstack_merger_list", MERGER),
    *(f"merger.{name}" for name in MERGER),
    *both("patch_embed.proj"),
    "pos_embed.weight",
]


def qwen3_vl(mlp: list[str]) -> list[str]:
    text = [*NORMS, *ATTENTION, *HEAD_NORMS, *mlp]
    return [
        "lm_head.weight",
        "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
        *layers("model.language_model.layers", text),
        *(f"model.visual.{name}" for name in QWEN_VISION),
    ]


PIXTRAL = [
    "ln_pre.weight",
    "patch_conv.weight",
    *layers("transformer.layers", ["attention_norm.weight", "ffn_norm.weight", *swiglu("feed_forward")], 2),
    *layers("transformer.layers", [f"attention.{p}_proj.weight" for p in "qkvo"], 2),
]
MISTRAL_SMALL = [
    "language_model.lm_head.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.norm.weight",
    *layers("language_model.model.layers", [*NORMS, *ATTENTION, *swiglu("mlp")]),
    *(
        f"multi_modal_projector.{name}.weight"
        for name in ("linear_1", "linear_2", "norm", "patch_merger.merging_layer")
    ),
    *(f"vision_tower.{name}" for name in PIXTRAL),
]
SCOUT_MLP = ["router.weight", *swiglu("shared_expert"), "experts.gate_up_proj", "experts.down_proj"]
SCOUT_VISION = [
    "class_embedding",
    "positional_embedding_vlm",
    "patch_embedding.linear.weight",
    *both("layernorm_pre", "layernorm_post"),
    *layers("model.layers", both("input_layernorm", "post_attention_layernorm", "mlp.fc1", "mlp.fc2"), 2),
    *layers("model.layers", both(*(f"self_attn.{p}_proj" for p in "qkvo")), 2),
    "vision_adapter.mlp.fc1.weight",
    "vision_adapter.mlp.fc2.weight",
]
SCOUT = [
    "language_model.lm_head.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.norm.weight",
    *layers("language_model.model.layers", [*NORMS, *ATTENTION, *(f"feed_forward.{name}" for name in SCOUT_MLP)]),
    "multi_modal_projector.linear_1.weight",
    *(f"vision_model.{name}" for name in SCOUT_VISION),
]
GLM_LAYER = [*NORMS, *ATTENTION, *HEAD_NORMS, *(f"self_attn.{p}_proj.bias" for p in "qkv")]
GLM_EXPERTS = [name for e in range(8) for name in swiglu(f"mlp.experts.{e}")]
GLM_EXPERTS += ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", *swiglu("mlp.shared_experts")]


def glm(drafts: list[str]) -> list[str]:
    """The first layer is dense, the fourth drafts."""
    drafting = [*GLM_LAYER, *GLM_EXPERTS, "eh_proj.weight", "enorm.weight", "hnorm.weight", *drafts]
    names = [f"0.{name}" for name in [*GLM_LAYER, *swiglu("mlp")]]
    names += [f"{i}.{name}" for i in (1, 2) for name in [*GLM_LAYER, *GLM_EXPERTS]] + [f"3.{n}" for n in drafting]
    outside = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    return [*outside, *(f"model.layers.{name}" for name in names)]


def text_of(kind: str, model: str, text: dict[str, Any], **config: Any) -> dict[str, Any]:
    """A published ``config.json`` with a tiny model of text."""
    text = {**TINY, "model_type": text.pop("model_type", kind), **text}
    vision = {"hidden_size": 32, "depth": 2, "num_hidden_layers": 2}
    return {"architectures": [model], "model_type": kind, "text_config": text, "vision_config": vision, **config}


def scout() -> dict[str, Any]:
    config = copy.deepcopy(LLAMA_4_SCOUT)
    config["text_config"] |= {**TINY, "intermediate_size": 24, "num_local_experts": 4, "intermediate_size_mlp": 48}
    return config


QWEN = {"model_type": "qwen3_vl_text", "rope_theta": 5000000, "rms_norm_eps": 1e-6, "attention_bias": False}
QWEN |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}}
QWEN_MOE = {**QWEN, "model_type": "qwen3_vl_moe_text", "num_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE |= {"moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
GLM = {**GLM_4_6, **TINY, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_routed_experts": 8}
PUBLISHED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gemma 3": (
        text_of(
            "gemma3",
            "Gemma3ForConditionalGeneration",
            {"model_type": "gemma3_text", "sliding_window": 16, "query_pre_attn_scalar": 16},
        ),
        GEMMA_3,
    ),
    "qwen3-vl": (
        text_of("qwen3_vl", "Qwen3VLForConditionalGeneration", {**QWEN}, tie_word_embeddings=False),
        qwen3_vl(swiglu("mlp")),
    ),
    "qwen3-vl-moe": (
        text_of("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", {**QWEN_MOE}, tie_word_embeddings=False),
        qwen3_vl(["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    ),
    "mistral small 3.2": (
        text_of(
            "mistral3",
            "Mistral3ForConditionalGeneration",
            {"model_type": "mistral", "rope_theta": 1e9, "sliding_window": None},
        ),
        MISTRAL_SMALL,
    ),
    "llama 4 scout": (scout(), SCOUT),
    "glm-4.6": (GLM, glm(["shared_head.norm.weight"])),
    "glm-4.5, with norms of heads": (
        GLM,
        glm(["shared_head.norm.weight", "shared_head.head.weight", "embed_tokens.weight"]),
    ),
}


def in_text(name: str) -> str:
    """The name that a checkpoint of the text model alone has."""
    for prefix, begins in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return begins + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def write(folder: Path, name: str) -> None:
    """Random tensors of these names; those without a place have 3 elements."""
    config, names = PUBLISHED[name]
    config = {**config, "torch_dtype": "float32"}
    slots, generator = weight_map(spec_from_config(config)), torch.Generator().manual_seed(0)
    shapes = {name: slots[in_text(name)].shape if in_text(name) in slots else (3,) for name in names}
    save_file({n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_tensor_has_a_place(tmp_path, name):
    """And each place a tensor, or loading would say so; one name more is refused."""
    write(tmp_path, name)
    spec = load_decoder(tmp_path).spec
    places = weight_map(spec)
    left_out = [name for name in PUBLISHED[name][1] if in_text(name) not in places]
    assert left_out and all(is_extra(spec, name) for name in left_out)
    other = next(name for name in PUBLISHED[name][1] if ".layers.1." in name).rpartition(".layers.")[0]
    edit(tmp_path, lambda tensors: tensors.update({f"{other}.layers.1.other.weight": torch.zeros(3)}))
    refused(tmp_path, rf"tensor {other}\.layers\.1\.other\.weight has no place")


def test_stacked_experts_of_qwen3_vl_either_way(tmp_path):
    """As published, and as transformers 5 writes them; no other shape, and no other model's."""
    write(tmp_path, "qwen3-vl-moe")
    straight = load_decoder(tmp_path).state_dict()

    def turn(tensors):
        tensors.update({name: t.mT.contiguous() for name, t in tensors.items() if ".experts." in name})

    edit(tmp_path, turn)
    shapes = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert shapes["model.language_model.layers.0.mlp.experts.gate_up_proj"] == (8, 64, 48)
    assert shapes["model.language_model.layers.0.mlp.experts.down_proj"] == (8, 24, 64)
    turned = load_decoder(tmp_path).state_dict()
    assert turned.keys() == straight.keys()
    assert all(torch.equal(tensor, straight[name]) for name, tensor in turned.items())
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.zeros(8, 25, 64)}))
    refused(tmp_path, r"experts\.down_proj has shape \[8, 25, 64\], but config\.json asks for \[8, 64, 24\]")


def test_other_stacked_experts_lie_one_way(tmp_path):
    config = {**TINY, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "float32"}
    config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    slots = weight_map(spec_from_config(config))
    stacked = {name: slot for name, slot in slots.items() if ".mlp.experts." not in name or name.count(".") == 5}
    tensors = {name: torch.zeros(slot.shape) for name, slot in stacked.items()}
    name = "model.layers.2.mlp.experts.gate_up_proj"
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    load_decoder(tmp_path)
    save_file({**tensors, name: tensors[name].mT.contiguous()}, tmp_path / "model.safetensors")
    refused(tmp_path, r"gate_up_proj has shape \[8, 64, 48\], but config\.json asks for \[8, 48, 64\]")
