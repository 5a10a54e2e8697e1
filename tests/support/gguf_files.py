"""GGUF files of tiny checkpoints, made as llama.cpp's converter makes them; names come from the package gguf."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from support.tiny_tokenizer import CHAT_TEMPLATE

_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def write_gguf(
    path: Path,
    folder: Path,
    arch: str,
    *,
    kind: str = "F32",
    tensors_per_file: int = 0,
    more: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write the checkpoint of ``folder``.

    Args:
        arch: llama.cpp's name of the architecture.
        kind: the type of matrices; other tensors are F32.
        tensors_per_file: make several files, whose names follow from ``path``; 0 makes one.
        more: tensors to write, too.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_file)
    writer.add_file_type(0)
    for name, key in _FIELDS.items():
        if config.get(name) is not None:
            add_value(writer, f"{arch}.{key}", config[name])
    if arch == "gpt-oss":
        add_value(writer, f"{arch}.expert_feed_forward_length", config["intermediate_size"])
    scaling = config.get("rope_scaling")
    if scaling is not None and "factor" in scaling:
        add_value(writer, f"{arch}.rope.scaling.type", scaling.get("rope_type") or scaling["type"])
        add_value(writer, f"{arch}.rope.scaling.factor", scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            length = scaling["original_max_position_embeddings"]
            add_value(writer, f"{arch}.rope.scaling.original_context_length", length)
    if (folder / "tokenizer.json").exists():
        add_byte_level(writer, json.loads((folder / "tokenizer.json").read_text()))
    names = gguf.get_tensor_name_map(
        next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config["num_hidden_layers"]
    )
    for name, tensor in _converted(load_file(folder / "model.safetensors"), arch, config).items():
        stem, _, end = name.rpartition(".")
        stem = name if name.endswith(".sinks") else stem
        found = names.get_name(stem)
        assert found is not None, name
        add_tensor(writer, f"{found}.{end if end != 'sinks' else 'weight'}", tensor, kind)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    close(writer)


def _converted(tensors: dict[str, torch.Tensor], arch: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the converter makes of Hugging Face's tensors, under names of Hugging Face's form."""
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        which = name.split(".")[-2].removesuffix("_proj") if "self_attn" in name else ""
        if arch == "llama" and which in heads:
            each = array.reshape(heads[which], 2, -1, *array.shape[1:])
            array = each.swapaxes(1, 2).reshape(array.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + np.float32(1)
        if arch == "gpt-oss" and ".experts." in name:
            found |= _experts_of_gpt_oss(name, array)
        elif ".experts." in name:
            before, _, behind = name.partition(".experts.")
            number, _, module = behind.partition(".")
            experts.setdefault(f"{before}.experts.{module}", {})[int(number)] = array
        else:
            found[name] = array
    return found | {name: np.stack([of[i] for i in range(len(of))]) for name, of in experts.items()}


def _experts_of_gpt_oss(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """``[E, in, out]`` or, of a bias, ``[E, out]``; gate and up alternate along ``out``."""
    stem, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    array = array if kind == "bias" else array.swapaxes(1, 2)
    if stem.endswith("down_proj"):
        return {f"{stem}.{kind}": np.ascontiguousarray(array)}
    gate, up = (stem.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj"))
    return {f"{part}.{kind}": np.ascontiguousarray(array[:, i::2]) for i, part in enumerate((gate, up))}


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A number or a text, of the type that the converter gives it."""
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str = "F32") -> None:
    """A tensor; matrices are made of blocks of that type, by the library's rounding."""
    if array.ndim < 2 or kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(array))
    else:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), number), raw_dtype=number)


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], pre: str = "gpt-2") -> None:
    """What ``tokenizer.json`` of byte-level BPE holds, and llama.cpp's name for how it splits texts."""
    vocabulary = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
