"""Published mixtures of experts: what their configurations mean, and every name of their tensors in tiny shapes."""

import copy
import json

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import refused
from support.real_configs import DBRX, GLM_4_6, LLAMA_4_SCOUT
from support.tiny_models import load_decoder
from transformers import AutoConfig

from tritonllm.layers.attention import QueryScaling
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.families import spec_from_config, weight_map

NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
PROJECTIONS = [f"self_attn.{p}_proj.weight" for p in "qkvo"]


def parameters(spec) -> int:
    """Of a checkpoint with experts one by one, or stacked where there is no other form."""
    slots = weight_map(spec).values()
    single = {slot.parameter for slot in slots if slot.expert is not None}
    return sum(torch.Size(slot.shape).numel() for slot in slots if slot.axis == 0 or slot.parameter not in single)


def swiglu(name: str) -> list[str]:
    return [f"{name}.{projection}_proj.weight" for projection in ("gate", "up", "down")]


def test_glm_4_6():
    spec = spec_from_config(GLM_4_6)
    attention, experts = spec.layers[91].attention, spec.layers[91].mlp
    assert [isinstance(layer.mlp, MLPSpec) for layer in spec.layers] == [True] * 3 + [False] * 89
    assert (attention.num_heads, *spec.caches[0], attention.qkv_bias) == (96, 8, 128, True)
    assert attention.qk_norm == spec.norm and not attention.o_bias and attention.rope.rotary_dim == 64
    assert (experts.num_experts, experts.top_k, experts.scale, experts.scoring) == (160, 8, 2.5, "sigmoid")
    assert experts.correction_bias and experts.renormalize and experts.shared.intermediate_size == 1536
    assert spec.max_position_embeddings == 202752
    assert 352e9 < parameters(spec) < 354e9  # 357 billion with the layer that drafts


def glm_names(layers: int, dense: int, experts: int) -> list[str]:
    """As GLM-4.6's index lists them, the layer that drafts included."""
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for i in range(layers + 1):
        mine = [*NORMS, *PROJECTIONS, "self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        mine += [f"self_attn.{p}_proj.bias" for p in "qkv"]
        if i < dense:
            mine += swiglu("mlp")
        else:
            mine += ["mlp.gate.weight", "mlp.gate.e_score_correction_bias", *swiglu("mlp.shared_experts")]
            mine += [name for e in range(experts) for name in swiglu(f"mlp.experts.{e}")]
        if i == layers:
            mine += [f"{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")]
            mine += ["shared_head.head.weight", "shared_head.norm.weight"]
        names += [f"model.layers.{i}.{name}" for name in mine]
    return names


def write(folder, config: dict, names: list[str], shape_of) -> None:
    """Random tensors of these names; those without a place have 3 elements."""
    shapes = {name: shape_of(name) for name in names}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def add(folder, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: torch.zeros(3)}, folder / "model.safetensors")


def test_names_of_glm_4_6(tmp_path):
    tiny = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101}
    tiny |= {"intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    config = {**GLM_4_6, **tiny, "n_routed_experts": 8, "max_position_embeddings": 128, "torch_dtype": "float32"}
    slots = weight_map(spec_from_config(config))
    names = glm_names(3, 1, 8)
    write(tmp_path, config, names, lambda name: slots[name].shape if name in slots else (3,))
    load_decoder(tmp_path)
    add(tmp_path, "model.layers.1.mlp.other.weight")
    refused(tmp_path, r"tensor model\.layers\.1\.mlp\.other\.weight has no place")


def test_llama_4_scout():
    spec = spec_from_config(LLAMA_4_SCOUT)
    rotating, still = spec.layers[0].attention, spec.layers[3].attention
    assert spec.architecture == "Llama4ForCausalLM" and spec.text_of == "Llama4ForConditionalGeneration"
    assert [layer.attention.rope is None for layer in spec.layers] == [False, False, False, True] * 12
    assert rotating.rope.interleaved and rotating.rope.scaling["factor"] == 16.0
    assert rotating.qk_norm is not None and not rotating.qk_norm.weight and rotating.query_scaling is None
    assert still.qk_norm is None and still.query_scaling == QueryScaling(every=8192, factor=0.1, shift=1)
    experts = spec.layers[0].mlp
    assert all(layer.mlp == experts for layer in spec.layers) and isinstance(experts, MoESpec)
    assert (experts.num_experts, experts.top_k, experts.scoring, experts.weights_on_input) == (16, 1, "sigmoid", True)
    assert (experts.intermediate_size, experts.shared.intermediate_size) == (8192, 8192)
    assert spec.max_position_embeddings == 8192  # the first chunk of the layers that see one
    assert spec.eos_token_ids == (200001, 200007, 200008)
    assert 107e9 < parameters(spec) < 108e9


def test_waves_of_llama_4_scout():
    """Its two factors are equal: waves of more than the trained length are slowed, all others kept."""
    cos, sin = spec_from_config(LLAMA_4_SCOUT).layers[0].attention.rope.table(2)[1].double().chunk(2)
    frequencies = 500000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    want = torch.where(2 * torch.pi / frequencies < 8192, frequencies, frequencies / 16)
    torch.testing.assert_close(torch.atan2(sin, cos), want, rtol=1e-4, atol=1e-9)
    assert (want < frequencies).sum() == 29


def scout_names(layers: int) -> list[str]:
    """As Scout's index lists them."""
    names = ["embed_tokens.weight", "norm.weight"]
    mine = [*NORMS, *PROJECTIONS, "feed_forward.router.weight", *swiglu("feed_forward.shared_expert")]
    mine += ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
    names += [f"layers.{i}.{name}" for i in range(layers) for name in mine]
    text = [f"language_model.model.{name}" for name in names] + ["language_model.lm_head.weight"]
    towers = ["vision_model.class_embedding", "vision_model.model.layers.0.mlp.fc1.weight"]
    return [*text, *towers, "multi_modal_projector.linear_1.weight"]


def test_names_of_llama_4_scout(tmp_path):
    config = copy.deepcopy(LLAMA_4_SCOUT)
    tiny = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101}
    config["text_config"] |= {**tiny, "intermediate_size": 24, "num_hidden_layers": 4, "num_local_experts": 4}
    config["text_config"] |= {"intermediate_size_mlp": 48, "attention_chunk_size": 128}
    slots = weight_map(spec_from_config({**config, "torch_dtype": "float32"}))

    def shape_of(name: str) -> tuple[int, ...]:
        ours = name.removeprefix("language_model.")
        return slots[ours].shape if ours in slots else (3,)

    write(tmp_path, {**config, "torch_dtype": "float32"}, scout_names(4), shape_of)
    load_decoder(tmp_path)
    add(tmp_path, "language_model.model.layers.1.feed_forward.other.weight")
    refused(tmp_path, r"tensor language_model\.model\.layers\.1\.feed_forward\.other\.weight has no place")


def test_dbrx():
    spec = spec_from_config(DBRX)
    attention, experts = spec.layers[39].attention, spec.layers[39].mlp
    assert all(layer == spec.layers[0] for layer in spec.layers) and spec.num_layers == 40
    assert (attention.num_heads, *spec.caches[0], attention.clip_qkv) == (48, 8, 128, 8.0)
    assert attention.rope.base == 500000.0 and not (attention.qkv_bias or attention.o_bias)
    assert (spec.norm.kind, spec.norm.weight, spec.norm.bias) == ("layer", True, False)
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (16, 4, 10752)
    assert (experts.scoring, experts.renormalize, experts.activation) == ("softmax", True, "silu")
    assert (spec.max_position_embeddings, spec.tie_word_embeddings) == (32768, False)
    assert parameters(spec) == 131_596_523_520


def test_rotation_of_dbrx_in_a_file_of_transformers_5():
    """It writes a base of its own beside that of ``attn_config``, from which the model was trained."""
    fields = copy.deepcopy({key: value for key, value in DBRX.items() if key != "model_type"})
    written = AutoConfig.for_model("dbrx", **fields).to_dict()
    assert written["rope_parameters"]["rope_theta"] == 10000.0
    assert spec_from_config(written) == spec_from_config(DBRX)
    other = {**DBRX, "attn_config": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}
    rope = spec_from_config(other).layers[0].attention.rope
    assert (rope.base, rope.scaling["factor"]) == (1e6, 2.0)


def test_names_of_dbrx(tmp_path):
    """As its index lists them; the experts' rows follow one another."""
    experts = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}
    tiny = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 101, "max_seq_len": 128, "torch_dtype": "float32"}
    config = {**DBRX, **tiny, "attn_config": {**DBRX["attn_config"], "kv_n_heads": 2}, "ffn_config": experts}
    of_layer = {
        "norm_attn_norm.norm_1.weight": (64,),
        "norm_attn_norm.attn.Wqkv.weight": (64 + 2 * 32, 64),
        "norm_attn_norm.attn.out_proj.weight": (64, 64),
        "norm_attn_norm.norm_2.weight": (64,),
        "ffn.router.layer.weight": (4, 64),
        **{f"ffn.experts.mlp.{name}": (4 * 24, 64) for name in ("w1", "v1", "w2")},
    }
    shapes = {f"transformer.blocks.{i}.{name}": shape for i in range(2) for name, shape in of_layer.items()}
    shapes |= {"transformer.wte.weight": (101, 64), "transformer.norm_f.weight": (64,), "lm_head.weight": (101, 64)}
    write(tmp_path, config, list(shapes), shapes.__getitem__)
    experts_of_layer, tensors = load_decoder(tmp_path).layers[1].mlp, load_file(tmp_path / "model.safetensors")
    w1, v1, w2 = (
        tensors[f"transformer.blocks.1.ffn.experts.mlp.{name}"][2 * 24 : 3 * 24] for name in ("w1", "v1", "w2")
    )
    assert torch.equal(experts_of_layer.gate_up[2], torch.cat([w1, v1]))
    assert torch.equal(experts_of_layer.down[2], w2.T)
    add(tmp_path, "transformer.blocks.1.ffn.other.weight")
    refused(tmp_path, r"tensor transformer\.blocks\.1\.ffn\.other\.weight has no place")
