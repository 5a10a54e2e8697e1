"""Weights into a :class:`Decoder`: from a checkpoint's files, strictly, or made up from a seed.

Everything is checked from the files' headers before the first byte is copied: every element of every parameter has
exactly one tensor, and every tensor has a place, its shape and a type that needs no more than a cast; what does not is
an error that names it. Then tensors are copied one at a time from memory-mapped files, one file open at a time, so what
the host holds beside the model is at most the largest file.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import xxhash
from tqdm import tqdm

from tritonllm.layers.norm import Norm
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import is_extra, weight_map
from tritonllm.models.finite import not_finite, refuse
from tritonllm.models.slots import PIECE, Slot, parameter_shape, unfilled
from tritonllm.models.spec import ModelSpec
from tritonllm.models.tensor_files import (
    BITS,
    PackedExperts,
    StoredTensor,
    describe,
    open_tensors,
    read,
    stored_tensors,
)

# What architectures call the output projection; with tied embeddings it may be stored all the same.
_OUTPUTS = ("lm_head.weight", "embed_out.weight", "output.weight")
# Buffers of old checkpoints that follow from the configuration: rotary frequencies and causal masks.
_DERIVED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.masked_bias|embeddings\.(position|token_type)_ids)$"
)
_MASK = re.compile(r"(^|\.)(attn|attention)\.bias$")  # [1, 1, length, length]


def hf_tensor_names(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint of ``spec``, in the first spelling that the weight map has."""
    slots = weight_map(spec)
    return {name: slots[name].shape for name in unfilled(slots, {})}


def hf_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    """The model's weights under their checkpoint names, in the first spelling that the weight map has.

    They are views of the parameters, except where a checkpoint orders the rows or counts the values differently: those
    are copies. Use :func:`copy_tensors` to write.
    """
    slots, parameters = weight_map(model.spec), dict(model.named_parameters())
    return {name: slots[name].read(parameters[slots[name].parameter]) for name in unfilled(slots, {})}


@torch.no_grad()
def load_weights(
    model: Decoder, folder: Path, *, load_format: str = "auto", allow_nan: bool = False, progress: bool | None = None
) -> None:
    """Fill ``model`` from the files of ``folder``, converting to the model's dtype.

    Names may lack their first component
    (``model.``, ``transformer.``), as those of checkpoints written from the model without its output projection do.

    Args:
        load_format: ``safetensors`` reads ``model*.safetensors``, ``pt`` ``pytorch_model*.bin``, ``auto`` the first of
            them that is there.
        allow_nan: take NaN and infinite values, too.
        progress: show a bar; ``None`` shows it if the standard error is a terminal.

    Raises:
        ValueError: no files; a file absent, truncated or corrupt; a tensor missing, left over, there twice, of a wrong
            shape or of a type that is neither floating point nor MXFP4; an output projection that differs from the
            embeddings where ``config.json`` says they are tied. Nothing has been copied then. Last, values that are NaN
            or infinite in the model's dtype, unless ``allow_nan``.
    """
    stored = stored_tensors(folder, load_format)
    plan = _plan(model, stored, f"{folder}: ")
    _check_twins(plan.twins, lambda name: _digest_in_file(name, stored[name]))
    parameters = dict(model.named_parameters())
    total = sum(stored[name].num_bytes for name in plan.slots)
    off = None if progress is None else not progress
    bar = tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, leave=False, disable=off)
    with bar:
        for path, names in groupby(plan.slots, key=lambda name: stored[name].path):
            assert path is not None
            with open_tensors(path) as file:
                for name in names:
                    slot = plan.slots[name]
                    _write(slot, parameters[slot.parameter], read(file, name, stored[name]))
                    bar.update(stored[name].num_bytes)
    if not allow_nan and (bad := not_finite(parameters)):
        places = {name: slot for name, slot in plan.slots.items() if slot.parameter in bad}
        refuse(f"{folder}: ", ((name, slot.place(parameters[slot.parameter])) for name, slot in places.items()))


@torch.no_grad()
def copy_tensors(model: Decoder, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill ``model`` from tensors under their checkpoint names, as strictly as :func:`load_weights`.

    Raises:
        ValueError: as there. Nothing has been copied then.
    """
    plan = _plan(model, {name: describe(tensor) for name, tensor in tensors.items()}, "")
    _check_twins(plan.twins, lambda name: _digest(tensors[name]))
    parameters = dict(model.named_parameters())
    for name, slot in plan.slots.items():
        slot.write(parameters[slot.parameter], tensors[name])


def dummy_weights(model: Decoder, seed: int) -> None:
    """Fill ``model`` with numbers from ``seed``: norms' factors 1, the rest normal with standard deviation 0.02.

    They are drawn where the weights are, which on a GPU is quick for billions, so a seed gives the same values on
    devices of one type and for one dtype only.
    """
    generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Norm) and name == "weight":
                parameter.fill_(1.0 - module.spec.weight_offset)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)


@dataclass(frozen=True)
class _Plan:
    """Where tensors go.

    Attributes:
        slots: by the name that the checkpoint has, in its order.
        twins: an output projection that the model does not have, and the embeddings that it must be equal to.
    """

    slots: dict[str, Slot]
    twins: list[tuple[str, str]]


def _plan(model: Decoder, stored: Mapping[str, StoredTensor], where: str) -> _Plan:
    """Check names, shapes, types and coverage; ``where`` begins messages that are not about one file."""
    slots = weight_map(model.spec)
    _check_map(model, slots)
    embedding = next(name for name, slot in slots.items() if slot.parameter == "embed.weight")
    outputs = [name for name in _OUTPUTS if name not in slots] if model.spec.tie_word_embeddings else []
    slots = {**slots, **dict.fromkeys(outputs, slots[embedding])}
    accepted = _accepted_names(slots)
    home: dict[str, str] = {}  # name of the slot -> name in the checkpoint
    for name, tensor in stored.items():
        if name not in accepted and (_is_derived(name, tensor) or is_extra(model.spec, name)):
            continue
        _check_tensor(name, tensor, slots.get(accepted.get(name, "")))
        if accepted[name] in home:
            raise ValueError(f"{where}tensors {home[accepted[name]]} and {name} are two names of one")
        home[accepted[name]] = name
    twins = [(home.pop(name), home[embedding]) for name in outputs if name in home and embedding in home]
    _check_complete(slots, home, where)
    by_name = {name: slots[slot] for slot, name in home.items()}
    return _Plan({name: by_name[name] for name in stored if name in by_name}, twins)


def _check_map(model: Decoder, slots: Mapping[str, Slot]) -> None:
    """The weight map is about this model's parameters, all of them: a copy must not broadcast."""
    by_parameter: dict[str, list[Slot]] = {}
    for slot in slots.values():
        by_parameter.setdefault(slot.parameter, []).append(slot)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if (mapped := {name: parameter_shape(of_one) for name, of_one in by_parameter.items()}) != shapes:
        name = min(name for name, _ in mapped.items() ^ shapes.items())
        raise ValueError(f"the weight map gives {name} the shape {mapped.get(name)}, the model {shapes.get(name)}")


def _accepted_names(slots: Mapping[str, Slot]) -> dict[str, str]:
    """Names that a checkpoint may use -> names of slots: the same, those without the base model's name, and what the
    first checkpoints of BERT call a layer norm's weight and bias."""
    accepted = {name: name for name in slots}
    for name in slots:
        for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
            if name.endswith(new):
                accepted[name.removesuffix(new) + old] = name
    for name, slot in list(accepted.items()):
        if name.count(".") > 1:  # `lm_head.weight` is not in the base model
            accepted.setdefault(name.partition(".")[2], slot)
    return accepted


def _is_derived(name: str, tensor: StoredTensor) -> bool:
    return bool(_DERIVED.search(name)) or (bool(_MASK.search(name)) and len(tensor.shape) == 4)


def _check_tensor(name: str, tensor: StoredTensor, slot: Slot | None) -> None:
    label = f"tensor {name}" if tensor.path is None else f"{tensor.path}: tensor {name}"
    if tensor.dtype not in BITS:
        raise ValueError(
            f"{label} is {tensor.dtype}, not one of {', '.join(BITS)}; other quantized checkpoints are not supported"
        )
    if slot is None:
        raise ValueError(f"{label} has no place in the model that config.json describes")
    if tensor.shape != slot.shape:
        raise ValueError(f"{label} has shape {list(tensor.shape)}, but config.json asks for {list(slot.shape)}")


def _check_complete(slots: Mapping[str, Slot], home: Mapping[str, str], where: str) -> None:
    missing = unfilled(slots, home)
    if not missing:
        return
    others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    if missing[0] in _OUTPUTS and not others:
        why = (
            "if the model uses its embeddings as output projection, set tie_word_embeddings to true in config.json; "
            "else the files are incomplete"
        )
    else:
        why = "the files are incomplete, or config.json is not theirs"
    raise ValueError(f"{where}tensor {missing[0]}{others} is missing; {why}")


def _check_twins(twins: list[tuple[str, str]], digest: Callable[[str], bytes]) -> None:
    """Some checkpoints with tied embeddings store the table twice: fine, as long as it is the same table."""
    for output, embedding in twins:
        if digest(output) != digest(embedding):
            raise ValueError(
                f"tensor {output} differs from {embedding}, but config.json says they are tied; "
                "set tie_word_embeddings to false there"
            )


def _digest_in_file(name: str, stored: StoredTensor) -> bytes:
    assert stored.path is not None
    with open_tensors(stored.path) as file:
        return _digest(file.get(name))


def _digest(tensor: torch.Tensor) -> bytes:
    """Of the values as float32: equal for a table and its exact conversion, one of the two in memory at a time."""
    digest = xxhash.xxh3_128()
    for piece in tensor.split(max(1, PIECE // tensor.shape[-1])):
        digest.update(piece.to("cpu", torch.float32).contiguous().numpy())
    return digest.digest()


def _write(slot: Slot, parameter: torch.Tensor, tensor: torch.Tensor | PackedExperts) -> None:
    if isinstance(tensor, torch.Tensor):
        slot.write(parameter, tensor)
        return
    for i in range(len(tensor)):
        slot.of_expert(i).write(parameter, tensor.expert(i, parameter.dtype, parameter.device))
