"""The files of EAGLE heads: what a ``config.json`` says, and where each tensor goes.

Layouts are those of SafeAILab and SpecForge (``midlayer.`` in an EAGLE-3 head), of vLLM (a configuration within
another, names with ``layers.0.`` or ``model.``), and of vLLM's speculators (``transformer_layer_config``).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.eagle import Eagle3Head, Eagle3Spec, EagleHead
from tritonllm.models.families import spec_from_config, weight_map
from tritonllm.models.finite import not_finite, refuse
from tritonllm.models.slots import unfilled
from tritonllm.models.spec import LayerSpec, ModelSpec
from tritonllm.models.tensor_files import StoredTensor, open_tensors, stored_tensors

EAGLE, EAGLE3 = "eagle", "eagle3"
# Parts of later heads, each of which changes what a head computes.
_UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")
_REPEATED = ("embed_tokens.weight", "lm_head.weight", "t2d")  # some files have them, too; `t2d` says what `d2t` does
_IDS = "eagle_aux_hidden_state_layer_ids"

Stored = dict[str, tuple[str, StoredTensor]]  # our name of a tensor -> the file's, and what its header says


def read_eagle_spec(folder: Path, method: str, target_layers: int) -> ModelSpec:
    """What a head's ``config.json`` describes.

    Args:
        method: ``eagle`` or ``eagle3``, as the user has said.
        target_layers: how many layers the large model has.

    Returns:
        A :class:`ModelSpec`; for an EAGLE-3 head an :class:`Eagle3Spec`.

    Raises:
        ValueError: no such file, a head of the other kind, not one layer of Llama's kind, a part that is not known, or
            an EAGLE-3 head that reads layers that are not there.
    """
    config = _config(folder)
    names = config.get("architectures") or ["LlamaForCausalLM"]
    kind = EAGLE3 if "draft_vocab_size" in config or EAGLE3 in names[0].lower() else EAGLE
    if kind != method:
        numbers = {EAGLE: "EAGLE or EAGLE-2", EAGLE3: "EAGLE-3"}
        raise ValueError(f"{folder} has a head of {numbers[kind]}, and method is {method!r}: set method={kind!r}")
    if "llama" not in names[0].lower():
        raise ValueError(f"{folder} is {names[0]}: a head is one layer of LlamaForCausalLM")
    layer = {**config, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": kind == EAGLE}
    spec = dataclasses.replace(spec_from_config(layer), first_norm=False, final_norm=False)
    if spec.num_layers != 1:
        raise ValueError(f"{folder} has {spec.num_layers} layers: a head has one; for a whole model use 'draft_model'")
    return spec if kind == EAGLE else _eagle3_spec(folder, config, spec, target_layers)


def _config(folder: Path) -> Mapping[str, Any]:
    """``config.json`` of a head with all fields at its top."""
    config: Mapping[str, Any] = checkpoint.read_config(folder)
    if isinstance(config.get("model"), Mapping):  # vLLM's converted files
        return config["model"]
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        return config
    kind = config.get("speculators_model_type", EAGLE3)  # vLLM's speculators, which have this norm unless they say no
    return {"norm_before_residual": True, **config, **layer, "architectures": [f"{layer.get('model_type')} {kind}"]}


def _eagle3_spec(folder: Path, config: Mapping[str, Any], spec: ModelSpec, target_layers: int) -> Eagle3Spec:
    own = config.get("eagle_config") or {}
    for name in _UNKNOWN:
        if config.get(name) or own.get(name):
            raise ValueError(f"{folder} has {name}, which is not supported: take a head of EAGLE-3 without it")
    if own.get("use_aux_hidden_state") is False:
        raise ValueError(
            f"{folder} has use_aux_hidden_state=false, a head without fc, which is not supported: take one of EAGLE-3 "
            "that reads three layers"
        )
    sizes = {"draft_vocab_size": spec.vocab_size, "target_hidden_size": spec.hidden_size}
    for name in sizes:
        value = sizes[name] if config.get(name) is None else config[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{folder}: config.json: {name} must be an integer of at least 1, got {value!r}")
        sizes[name] = value
    if sizes["draft_vocab_size"] > spec.vocab_size:
        raise ValueError(f"{folder}: config.json: draft_vocab_size must be at most vocab_size, {spec.vocab_size}")
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    attention = dataclasses.replace(spec.layers[0].attention, input_size=2 * spec.hidden_size)
    fields["layers"] = (LayerSpec(attention=attention, mlp=spec.layers[0].mlp),)
    return Eagle3Spec(
        **{**fields, "vocab_size": sizes["draft_vocab_size"]},
        target_vocab_size=spec.vocab_size,
        target_hidden_size=sizes["target_hidden_size"],
        reads=_reads(folder, config.get(_IDS) or own.get(_IDS), target_layers),
        norm_before_residual=bool(config.get("norm_before_residual")),
    )


def _reads(folder: Path, ids: Any, target_layers: int) -> tuple[int, ...]:
    """The layers that a head reads, counted as vLLM counts them: a number means the stream before that layer."""
    said = f"by {_IDS}"
    if ids is None:
        ids, said = [2, target_layers // 2, target_layers - 3], f"as published, for it has no {_IDS}"
    good = isinstance(ids, list) and all(type(place) is int and 0 <= place < target_layers for place in ids)
    if not good or not ids:
        raise ValueError(f"{folder} reads layers {ids} ({said}), and the model has those of 0 to {target_layers - 1}")
    return tuple(ids)


def has_bias(folder: Path) -> bool:
    """Whether ``fc`` of a head has one: ``config.json`` says so, or else the files do."""
    said = checkpoint.read_config(folder).get("bias")
    return any(name.endswith("fc.bias") for name in stored_tensors(folder)) if said is None else bool(said)


def embeds_itself(folder: Path, target: Decoder, load_format: str = "auto") -> bool:
    """Whether the files of an EAGLE-3 head have an embedding table that is not the large model's."""
    stored, table = _stored(folder, load_format), target.embed.weight
    if (found := stored.get("embed_tokens.weight")) is None:
        return False
    if found[1].shape != table.shape:
        return True
    pieces = _read(*found).split(1 << 12), table.split(1 << 12)  # without a second table on the device
    return not all(torch.equal(mine.to(theirs), theirs) for mine, theirs in zip(*pieces, strict=True))


@torch.no_grad()
def load_eagle_weights(head: EagleHead, folder: Path, *, load_format: str = "auto", allow_nan: bool = False) -> None:
    """Fill a head's own parameters from the files of ``folder``; the tables that it shares are left alone.

    Raises:
        ValueError: a tensor missing, left over or of a wrong shape, or values that are NaN or infinite, unless
            ``allow_nan``; a ``d2t`` that does not give each row a token of its own.
    """
    parameters = dict(head.named_parameters())
    slots = {_ours(name): slot for name, slot in {**weight_map(head.spec), **head.own_slots()}.items()}
    slots = {name: slot for name, slot in slots.items() if slot.parameter in parameters}
    stored = _stored(folder, load_format)
    if isinstance(head, Eagle3Head):
        _load_targets(head, folder, stored.pop("d2t", None))
    stored = {name: found for name, found in stored.items() if name in slots or name not in _REPEATED}
    if missing := unfilled(slots, {name: name for name in slots if name in stored}):
        name = missing[0].replace("layers.0", head.layer_name)
        raise ValueError(f"{folder}: tensor {name} is missing; the files are incomplete, or no head of EAGLE")
    if more := sorted(stored.keys() - slots.keys()):
        raise ValueError(f"{folder}: tensor {stored[more[0]][0]} has no place in a head of EAGLE")
    for name, (original, tensor) in stored.items():
        slot = slots[name]
        if tensor.shape != slot.shape:
            raise ValueError(
                f"{folder}: tensor {original} has shape {list(tensor.shape)}, the model asks for {list(slot.shape)}"
            )
        slot.write(parameters[slot.parameter], _read(original, tensor))
    if not allow_nan and (bad := not_finite(parameters)):
        refuse(f"{folder}: ", ((name, parameters[name]) for name in bad))


def _load_targets(head: Eagle3Head, folder: Path, found: tuple[str, StoredTensor] | None) -> None:
    """``d2t`` says of each row of the output projection how far its token's id is from the row's number."""
    rows, vocabulary = head.spec.vocab_size, head.spec.target_vocab_size
    if found is None:
        if rows < vocabulary:
            raise ValueError(f"{folder}: tensor d2t is missing, which says what the {rows} tokens are that it drafts")
        return
    offsets = _read(*found)
    good = offsets.shape == (rows,) and not offsets.is_floating_point()
    targets = offsets + torch.arange(rows) if good else offsets.flatten()
    if not good or len(targets.unique()) < rows or not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise ValueError(
            f"{folder}: tensor d2t must give each of {rows} rows a token of its own, of 0 to {vocabulary - 1}"
        )
    head.targets.copy_(targets)


def _ours(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _stored(folder: Path, load_format: str) -> Stored:
    """The tensors of a head's files."""
    stored = {_ours(name): (name, tensor) for name, tensor in stored_tensors(folder, load_format).items()}
    return {name: found for name, found in stored.items() if "rotary_emb" not in name}


def _read(name: str, tensor: StoredTensor) -> torch.Tensor:
    assert tensor.path is not None
    with open_tensors(tensor.path) as file:
        return file.get(name)


@torch.no_grad()
def dummy_eagle_weights(head: EagleHead, seed: int) -> None:
    """Numbers from ``seed`` in the place of a file's, as :func:`~tritonllm.models.weights.dummy_weights` makes them."""
    generator = torch.Generator(head.fc.weight.device).manual_seed(seed)
    for name, parameter in head.named_parameters():
        is_norm = name.endswith("norm.weight")
        parameter.fill_(1.0) if is_norm else parameter.normal_(0.0, 0.02, generator=generator)


def write_eagle_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Save a head as published ones are: for tests, and for what trains one."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1) + "\n")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
