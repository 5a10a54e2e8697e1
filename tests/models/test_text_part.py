"""The text model of checkpoints that read images, too: the same logits as transformers', and nothing else is read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit, refused
from support.compare import relative_error
from support.tiny_models import (
    PagedRunner,
    PagedSequence,
    load_decoder,
    random_tokens,
    reference_logits,
    tiny_config,
    write_checkpoint,
)
from transformers import AutoConfig, AutoModelForImageTextToText

from tritonllm import LLM, SamplingParams
from tritonllm.models import checkpoint
from tritonllm.models.families import is_supported, spec_from_config

LIMIT = 1e-5
TEXT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
NO_HEAD = {"hidden_size": 64, "head_dim": None}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
# Of each architecture: its type, fields of its text, of its vision, and its own.
CASES = {
    "gemma3": (
        "gemma3",
        {"model_type": "gemma3_text", "sliding_window": 6, "num_hidden_layers": 7, "query_pre_attn_scalar": 16},
        {"model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "image_token_index": 90},
    ),
    "gemma4": (
        "gemma4",
        {
            "model_type": "gemma4_text",
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 101,
        },
        {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
        {"image_token_id": 90, "pad_token_id": 0},
    ),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral"},
        {"model_type": "pixtral", "head_dim": 16},
        {"image_token_index": 90},
    ),
    "qwen2-vl": ("qwen2_vl", {"rope_parameters": MROPE, **NO_HEAD}, {"embed_dim": 32, "hidden_size": 64}, QWEN),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {"rope_parameters": MROPE, **NO_HEAD},
        {"out_hidden_size": 64, "fullatt_block_indexes": [0]},
        QWEN,
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "tie_word_embeddings": True},
        {"out_hidden_size": 48, "deepstack_visual_indexes": []},
        {**QWEN, "tie_word_embeddings": True},
    ),
    "qwen3-vl-moe": (
        "qwen3_vl_moe",
        {"rope_parameters": MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        {"out_hidden_size": 48, "deepstack_visual_indexes": []},
        QWEN,
    ),
    "glm4.1v": (
        "glm4v",
        {"rope_parameters": {**MROPE, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5}, **NO_HEAD},
        {"out_hidden_size": 64},
        {"image_token_id": 90, "video_token_id": 91},
    ),
    "glm4.5v": (
        "glm4v_moe",
        {
            "rope_parameters": {**MROPE, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5},
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "moe_intermediate_size": 24,
            **NO_HEAD,
        },
        {"out_hidden_size": 64},
        {"image_token_id": 90, "video_token_id": 91},
    ),
    "cohere-compass": (
        "cohere_compass",
        {
            "rope_parameters": {"full_attention": None, "sliding_attention": MROPE},
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
            "logit_scale": 0.5,
            **NO_HEAD,
        },
        {"out_hidden_size": 64, "deepstack_visual_indexes": []},
        QWEN,
    ),
    "ernie4.5-vl": (
        "ernie4_5_vl_moe",
        {
            "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]},
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": [24, 16],
            "moe_num_shared_experts": 2,
            **NO_HEAD,
        },
        {"spatial_merge_size": 2},
        {"image_token_id": 90, "video_token_id": 91, "tie_word_embeddings": False},
    ),
    "aria": (
        "aria",
        {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2},
        {"model_type": "idefics3_vision"},
        {"image_token_index": 90, "projector_patch_to_query_dict": {16: 4}},
    ),
    "internvl": (
        "internvl",
        {"model_type": "qwen3"},
        {"image_size": [32, 32], "patch_size": [8, 8]},
        {"image_token_id": 90},
    ),
    "llava": ("llava", {"model_type": "llama"}, {"model_type": "clip_vision_model"}, {"image_token_index": 90}),
    "smolvlm": ("smolvlm", {"model_type": "llama"}, {}, {"image_token_id": 90}),
}


def write(folder, case):
    kind, text, vision, own = CASES[case]
    text = {key: value for key, value in {**TEXT, **text}.items() if value is not None}
    vision = {**VISION, **vision}
    config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **own)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(
                0.0, parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1, generator=generator
            )
        elif parameter.dim() == 1:
            parameter.data.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path, case):
    theirs = write(tmp_path, case)
    config = checkpoint.read_config(tmp_path)
    assert is_supported(config) and spec_from_config(config).text_of == config["architectures"][0]
    ours, tokens = load_decoder(tmp_path), random_tokens(40, 90, seed=1)
    sequence = PagedSequence()
    logits = PagedRunner(ours).prefill(sequence, tokens, [7, 20, 13])
    assert relative_error(logits, reference_logits(theirs, tokens)) < LIMIT
    assert not any("vis" in name for name, _ in ours.named_parameters())


def test_stacked_experts_as_published(tmp_path):
    """Those of Qwen3-VL-30B-A3B lie [experts, in, out]; transformers 5 turns them, and writes them turned."""
    theirs = write(tmp_path, "qwen3-vl-moe")
    edit(tmp_path, lambda tensors: tensors.update({name: t.mT for name, t in tensors.items() if ".experts." in name}))
    read = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    tokens = random_tokens(40, 90, seed=2)
    logits = PagedRunner(load_decoder(tmp_path)).prefill(PagedSequence(), tokens)
    for model in (theirs, read):
        assert relative_error(logits, reference_logits(model, tokens)) < LIMIT


def test_experts_for_images_are_left_out_of_a_checkpoint_of_more_than_text_alone(tmp_path):
    write(tmp_path, "ernie4.5-vl")
    tensors = load_file(tmp_path / "model.safetensors")
    experts = [name for name in tensors if name.endswith(".mlp.experts.6.up_proj.weight")]
    assert experts and "model.layers.1.mlp.gate.weight_1" in tensors  # as published
    write_checkpoint(tmp_path, tiny_config("ernie4_5_moe", moe_num_experts=6))
    edit(tmp_path, lambda own: own.update({name: tensors[name] for name in experts}))
    refused(tmp_path, f"tensor {experts[0]} has no place".replace(".", r"\."))


# What publishers have written: how text's tensors are called, those of towers, and the configuration.
FORMS = {
    "gemma3": ("language_model.model.", ["vision_tower.vision_model.head.weight", "multi_modal_projector.w"]),
    "transformers 5": ("model.language_model.", ["model.visual.merger.norm.weight"]),
    "smolvlm": ("model.text_model.", ["model.vision_model.w", "model.connector.proj.weight"]),
    "qwen2.5-vl": ("model.", ["visual.patch_embed.proj.weight"]),
    "llama4": ("language_model.model.", ["vision_model.w", "multi_modal_projector.linear_1.weight"]),
}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    write(folder, "llava")
    return folder


def own_weights(folder):
    """A copy of the text model's tensors, named as those of a checkpoint of text."""
    tensors = load_file(folder / "model.safetensors")
    ours = {name: t for name, t in tensors.items() if not any(tower in name for tower in ("vision", "projector"))}
    begins = [max(name.find(f"model.{part}") for part in ("layers", "embed", "norm")) for name in ours]
    return {name[max(at, 0) :]: t for at, (name, t) in zip(begins, ours.items(), strict=True)}


@pytest.mark.parametrize("form", FORMS)
def test_names(tmp_path, llava, form):
    prefix, towers = FORMS[form]
    text = {name.replace("language_model.lm_head", "lm_head"): t for name, t in own_weights(llava).items()}
    head = "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"
    named = {name.replace("model.", prefix, 1) if name.startswith("model.") else head: t for name, t in text.items()}
    (tmp_path / "config.json").write_text((llava / "config.json").read_text())
    save_file({**named, **{name: torch.zeros(3) for name in towers}}, tmp_path / "model.safetensors")
    got, want = load_decoder(tmp_path).state_dict(), load_decoder(llava).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want) and got.keys() == want.keys()
    save_file({**named, "language_model.other.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor language_model\.other\.weight has no place"):
        load_decoder(tmp_path)


def test_a_model_of_text_has_no_towers(tmp_path):
    write_checkpoint(tmp_path, tiny_config("llama"))
    edit(tmp_path, lambda tensors: tensors.update({"vision_tower.weight": torch.zeros(3)}))
    refused(tmp_path, r"tensor vision_tower\.weight has no place")


PUBLISHED = {
    "Gemma3ForConditionalGeneration": (
        {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
        },
        ("Gemma3ForCausalLM", 262208, 34, 4, 256, (1, 106), True),
    ),
    "Mistral3ForConditionalGeneration": (
        {
            "text_config": {
                "attention_dropout": 0.0,
                "head_dim": 128,
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "max_position_embeddings": 131072,
                "model_type": "mistral",
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0,
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "vision_config": {"model_type": "pixtral"},
            "torch_dtype": "bfloat16",
        },
        ("MistralForCausalLM", 131072, 40, 8, 128, (2,), False),
    ),
    "Qwen2_5_VLForConditionalGeneration": (  # the fields of text beside vision_config
        {
            "model_type": "qwen2_5_vl",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "max_position_embeddings": 128000,
            "max_window_layers": 70,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "hidden_act": "silu",
            "eos_token_id": 151645,
            "vocab_size": 151936,
            "torch_dtype": "bfloat16",
            "vision_config": {"depth": 32},
        },
        ("Qwen2ForCausalLM", 151936, 36, 2, 128, (151645,), True),
    ),
    "InternVLChatModel": (
        {
            "llm_config": {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "hidden_size": 1536,
                "intermediate_size": 8960,
                "num_attention_heads": 12,
                "num_hidden_layers": 28,
                "num_key_value_heads": 2,
                "max_position_embeddings": 32768,
                "rope_theta": 1000000.0,
                "vocab_size": 151674,
                "tie_word_embeddings": False,
                "eos_token_id": 151645,
            },
            "vision_config": {"model_type": "intern_vit_6b"},
            "torch_dtype": "bfloat16",
        },
        ("Qwen2ForCausalLM", 151674, 28, 2, 128, (151645,), False),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    config, want = PUBLISHED[name]
    spec = spec_from_config({"architectures": [name], **json.loads(json.dumps(config))})
    got = spec.architecture, spec.vocab_size, spec.num_layers, *spec.caches[0]
    assert (*got, spec.eos_token_ids, spec.tie_word_embeddings) == want
    assert spec.text_of == name and spec.dtype == torch.bfloat16


def test_what_is_not_known_is_refused_by_name():
    config = {"architectures": ["OtherForConditionalGeneration"], "text_config": {"model_type": "other"}}
    assert not is_supported(config)
    with pytest.raises(ValueError, match="architecture OtherForConditionalGeneration is not supported"):
        spec_from_config(config)
    bad = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", "hidden_size": "a"},
    }
    with pytest.raises(
        ValueError, match=r"config\.json: (the text model's part \(llama\) has a bad field|hidden_size must be)"
    ):
        spec_from_config(bad)


@pytest.mark.parametrize("text", ["gemma", "gemma2"])
def test_prompts_that_see_both_ways_are_not_taken(text):
    """PaliGemma's text is that of a family, and its prompts are not computed as the family computes them."""
    config = {"model_type": "paligemma", "text_config": tiny_config(text), "vision_config": {}}
    assert not is_supported(config)
    assert is_supported({**config, "model_type": "llava"})


def test_the_engine_runs_it(llava, caplog):
    caplog.set_level("INFO", "tritonllm")
    llm = LLM(str(llava), skip_tokenizer_init=True, num_gpu_blocks_override=64, language_model_only=True, seed=0)
    assert (
        "LlavaForConditionalGeneration: its text model alone (LlamaForCausalLM), without images or sound" in caplog.text
    )
    prompt = random_tokens(20, 90, seed=3)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    tokens = prompt + list(output.outputs[0].token_ids)
    theirs = AutoModelForImageTextToText.from_pretrained(llava, attn_implementation="eager", dtype=torch.float32)
    assert reference_logits(theirs, tokens).argmax(-1).tolist()[19:-1] == tokens[20:]
