"""Weights into a :class:`Decoder`: from safetensors files, strictly, or made up from a seed.

Everything is checked from the files' headers before the first byte is copied: a tensor missing or left over, of another
shape, or of a type that needs more than a cast is an error that names it. Tensors are memory-mapped and copied one at a
time to their rows of a fused parameter, so the host holds about one tensor.
"""

import re
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tritonllm.models.checkpoint import read_json
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import weight_map
from tritonllm.models.spec import ModelSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_FLOATS = ("F64", "F32", "F16", "BF16")
_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Old checkpoints carry the rotary frequencies, which follow from the configuration.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def hf_tensor_names(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a checkpoint of ``spec`` must have."""
    return {name: slot.shape for name, slot in weight_map(spec).items()}


def hf_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """The model's weights under their checkpoint names: views, so that writing to one writes the model."""
    parameters = dict(model.named_parameters())
    return {
        name: parameters[slot.parameter].narrow(0, slot.start, slot.shape[0])
        for name, slot in weight_map(model.spec).items()
    }


def load_weights(model: Decoder, folder: Path) -> None:
    """Fill ``model`` from the safetensors files of ``folder``, converting to the model's dtype.

    Raises:
        ValueError: no safetensors files; a file absent, truncated or corrupt; a tensor missing, left over, in two
            files, of a wrong shape or of a type that is not floating point; a separate output projection in a
            checkpoint that says it has none. Nothing has been copied then.
    """
    targets = hf_tensors(model)
    shapes = {name: tuple(target.shape) for name, target in targets.items()}
    if model.spec.tie_word_embeddings:
        shapes[_LM_HEAD] = shapes[_EMBEDDING]
    home: dict[str, Path] = {}
    for path in _weight_files(folder):
        for name in _check_file(path, shapes):
            if name in home:
                raise ValueError(f"tensor {name} is in both {home[name]} and {path}")
            home[name] = path
    missing = [name for name in targets if name not in home]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(
            f"{folder}: tensor {missing[0]}{others} is missing; the files are incomplete, or config.json is not theirs"
        )
    if _LM_HEAD in home and _LM_HEAD not in targets:
        _check_tied(home)
    for path, names in groupby(home, key=lambda name: home[name]):
        with _open(path) as file:
            for name in names:
                if name in targets:
                    targets[name].copy_(file.get_tensor(name))


def dummy_weights(model: Decoder, seed: int) -> None:
    """Fill ``model`` with numbers from ``seed``: norms 1, the rest normal with standard deviation 0.02.

    They are drawn where the weights are, which on a GPU is quick for billions, so a seed gives the same values on
    devices of one type and for one dtype only.
    """
    generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def _weight_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint: those the index names, or the single one."""
    index = folder / INDEX
    if index.exists():
        home = read_json(index).get("weight_map")
        if not isinstance(home, dict) or not all(isinstance(file, str) for file in home.values()):
            raise ValueError(f"{index} does not say where the tensors are; download it again")
        files = [folder / name for name in sorted(set(home.values()))]
        for file in files:
            if not file.exists():
                raise ValueError(f"{file}, named by {INDEX}, does not exist; download the missing file")
        return files
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder} has its weights in pytorch_model*.bin only; safetensors are needed: load them with transformers "
            "and call save_pretrained"
        )
    raise ValueError(f"{folder} has no weights: expected {SINGLE}, or {INDEX} and the files it names")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); it may be truncated: download it again"
        ) from error


def _check_file(path: Path, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Check names, shapes and types from the header; returns the names."""
    names = []
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if _DERIVED.search(name):
                continue
            if name not in shapes:
                raise ValueError(f"{path}: tensor {name} has no place in the model that config.json describes")
            header = file.get_slice(name)
            if tuple(header.get_shape()) != shapes[name]:
                raise ValueError(
                    f"{path}: tensor {name} has shape {list(header.get_shape())}, but config.json asks for "
                    f"{list(shapes[name])}"
                )
            if header.get_dtype() not in _FLOATS:
                raise ValueError(
                    f"{path}: tensor {name} is {header.get_dtype()}, not one of {', '.join(_FLOATS)}; "
                    "quantized checkpoints are not supported"
                )
            names.append(name)
    return names


def _check_tied(home: dict[str, Path]) -> None:
    """Some checkpoints with tied embeddings store the table twice: fine, as long as it is the same table."""
    with _open(home[_LM_HEAD]) as file, _open(home[_EMBEDDING]) as other:
        same = torch.equal(file.get_tensor(_LM_HEAD), other.get_tensor(_EMBEDDING))
    if not same:
        raise ValueError(
            f"{home[_LM_HEAD]}: {_LM_HEAD} differs from {_EMBEDDING}, but config.json says they are tied; "
            "set tie_word_embeddings to false there"
        )
