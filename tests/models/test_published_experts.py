"""Published mixtures of experts: what their configurations mean, and DBRX's tensors in tiny shapes.

The names of other checkpoints' tensors: ``test_published_names.py``.
"""

import copy
import json

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit, refused
from support.real_configs import DBRX, GLM_4_6, LLAMA_4_SCOUT, MIMO_V2_FLASH
from support.tiny_models import load_decoder
from transformers import AutoConfig

from tritonllm.layers.attention import QueryScaling
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.families import spec_from_config, weight_map


def parameters(spec) -> int:
    """Of a checkpoint with experts one by one, or stacked where there is no other form."""
    slots = weight_map(spec).values()
    single = {slot.parameter for slot in slots if slot.expert is not None}
    return sum(torch.Size(slot.shape).numel() for slot in slots if slot.axis == 0 or slot.parameter not in single)


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


def test_mimo_v2_flash():
    spec = spec_from_config(MIMO_V2_FLASH)
    whole, sliding = spec.layers[5].attention, spec.layers[1].attention
    assert [layer.attention.window for layer in spec.layers[:7]] == [None, *[129] * 4, None, 129]
    assert (*whole.cache, *sliding.cache) == (4, 192, 8, 192) and (whole.value_size, whole.value_scale) == (128, 0.707)
    assert (whole.rope.base, sliding.rope.base, whole.rope.rotary_dim) == (5e6, 1e4, 64)
    assert (whole.sinks, sliding.sinks) == (False, True) and spec.max_position_embeddings == 262144
    experts = spec.layers[1].mlp
    assert isinstance(spec.layers[0].mlp, MLPSpec) and all(layer.mlp == experts for layer in spec.layers[1:])
    assert (experts.num_experts, experts.top_k, experts.scoring, experts.scale) == (256, 8, "sigmoid", 1.0)
    assert 308e9 < parameters(spec) < 310e9  # 309 billion
    theirs = AutoConfig.for_model(**{k: v for k, v in MIMO_V2_FLASH.items() if k != "architectures"})
    assert spec_from_config({**theirs.to_dict(), "architectures": MIMO_V2_FLASH["architectures"]}) == spec


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
    assert spec.max_position_embeddings == 10485760
    chunks = [layer.attention.attention_chunk for layer in spec.layers]
    assert chunks == [8192, 8192, 8192, None] * 12
    assert spec.up_to(8193).layers == spec.layers and spec.up_to(8192).attention_chunk is None
    assert spec.eos_token_ids == (200001, 200007, 200008)
    assert 107e9 < parameters(spec) < 108e9


def test_waves_of_llama_4_scout():
    """Its two factors are equal: waves of more than the trained length are slowed, all others kept."""
    cos, sin = spec_from_config(LLAMA_4_SCOUT).layers[0].attention.rope.table(2)[1].double().chunk(2)
    frequencies = 500000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    want = torch.where(2 * torch.pi / frequencies < 8192, frequencies, frequencies / 16)
    torch.testing.assert_close(torch.atan2(sin, cos), want, rtol=1e-4, atol=1e-9)
    assert (want < frequencies).sum() == 29


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
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    experts_of_layer, tensors = load_decoder(tmp_path).layers[1].mlp, load_file(tmp_path / "model.safetensors")
    w1, v1, w2 = (
        tensors[f"transformer.blocks.1.ffn.experts.mlp.{name}"][2 * 24 : 3 * 24] for name in ("w1", "v1", "w2")
    )
    assert torch.equal(experts_of_layer.gate_up[2], torch.cat([w1, v1]))
    assert torch.equal(experts_of_layer.down[2], w2.T)
    edit(tmp_path, lambda tensors: tensors.update({"transformer.blocks.1.ffn.other.weight": torch.zeros(3)}))
    refused(tmp_path, r"tensor transformer\.blocks\.1\.ffn\.other\.weight has no place")
