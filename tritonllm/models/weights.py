"""Weights into a :class:`Decoder`: from a checkpoint's files, strictly, or made up from a seed.

Everything is checked from the files' headers before the first byte is copied: every element of every parameter has
exactly one tensor, and every tensor has a place, its shape and a type that needs no more than a cast; what does not is
an error that names it. Tensors that are a narrow weight together count as one (:mod:`tritonllm.models.formats`), which
is widened on the model's device. Then tensors are copied one at a time from memory-mapped files, one file open at a
time (two, where the parts of a weight lie in two), so what the host holds beside the model is at most the largest file.
A rank of several checks all of it and reads its part (:mod:`tritonllm.models.shards`).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import xxhash
from torch import nn
from tqdm import tqdm

from tritonllm.dist.group import Group
from tritonllm.layers.norm import Norm
from tritonllm.models.decoder import Decoder
from tritonllm.models.deferred_weights import DeferredWeights, Then
from tritonllm.models.families import is_extra, weight_map
from tritonllm.models.finite import not_finite, refuse
from tritonllm.models.formats.joining import join
from tritonllm.models.formats.keeping import Arrival
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.formats.registry import format_in
from tritonllm.models.kv_scales import check_same_scale, is_kv_scale, kv_scales_of, without_kv_scales
from tritonllm.models.shards import Cut, Once, Split, cuts, expert_splits, keep_part, local_shape, splits
from tritonllm.models.slots import PIECE, Slot, parameter_shape, unfilled
from tritonllm.models.spec import ModelSpec
from tritonllm.models.tensor_files import BITS, StoredTensor, TensorFile, describe, open_tensors, read, stored_tensors
from tritonllm.models.text_part import names_in_files

Stored = StoredTensor | NarrowTensor
# What architectures call the output projection; with tied embeddings it may be stored all the same.
OUTPUTS = ("lm_head.weight", "embed_out.weight", "output.weight", "output_projection.weight")
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

    They are views of the parameters, except where a checkpoint orders the rows, counts the values or joins the experts
    differently: those are copies. Use :func:`copy_tensors` to write. One rank of several does not have them.
    """
    assert model.group.size == model.exchange.size == 1
    slots, parameters = weight_map(model.spec), dict(model.named_parameters())
    return {name: slots[name].read(parameters[slots[name].parameter]) for name in unfilled(slots, {})}


@torch.no_grad()
def load_weights(
    model: Decoder,
    folder: Path,
    *,
    load_format: str = "auto",
    allow_nan: bool = False,
    progress: bool | None = None,
    then: Then | None = None,
) -> None:
    """Fill ``model`` from the files of ``folder``, converting to the model's dtype; weights that were
    :func:`~tritonllm.layers.parameters.deferred` stay as narrow as they are stored.

    Names may lack their first component
    (``model.``, ``transformer.``), as those of checkpoints written from the model without its output projection do.

    Args:
        load_format: ``safetensors`` reads ``model*.safetensors``, ``pt`` ``pytorch_model*.bin``, ``auto`` the first of
            them that is there.
        allow_nan: take NaN and infinite values, too.
        progress: show a bar; ``None`` shows it if the standard error is a terminal.
        then: as in :class:`~tritonllm.models.deferred_weights.DeferredWeights`.

    Raises:
        ValueError: no files; a file absent, truncated or corrupt; a tensor missing, left over, there twice, of a wrong
            shape or of a type that is neither floating point nor of the checkpoint's narrow format; a narrow weight
            without its scales; an output projection that differs from the embeddings where ``config.json`` says they
            are tied; a bad scale of the cache (:mod:`tritonllm.models.kv_scales`). Nothing has been copied then. Last,
            values that are NaN or infinite in the model's dtype, unless ``allow_nan``.
    """
    every = stored_tensors(folder, load_format)
    weights, scales = without_kv_scales(every)
    stored = join(weights, format_in(folder))
    plan = _plan(model, stored, f"{folder}: ")
    _check_twins(plan.twins, lambda name: _digest_in_file(name, stored[name]))
    layers = model.whole.num_layers
    model.scales_of_layers = kv_scales_of(scales, lambda name: _scale_in_file(name, every[name]), layers)
    later = DeferredWeights(model, plan.cuts, then)
    parameters = _parameters(model)
    total = sum(plan.share_of(name) * stored[name].num_bytes for name in plan.slots)
    off = None if progress is None else not progress
    bar = tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, leave=False, disable=off)
    with bar:
        for path, names in groupby(plan.slots, key=lambda name: stored[name].path):
            assert path is not None
            with open_tensors(path) as file:
                for name in names:
                    _load(file, name, stored[name], plan.cuts[name], parameters, later)
                    bar.update(plan.share_of(name) * stored[name].num_bytes)
    if kept := later.finish():
        model.quantization = " and ".join(sorted(kept))
    model.fuse_anew()
    parameters = _parameters(model)
    plan.clear_others(parameters)
    if not allow_nan and (bad := not_finite(parameters)):
        places = [(name, cut.slot) for name, parts in plan.cuts.items() for cut in parts]
        here = ((name, slot.place(parameters[slot.parameter])) for name, slot in places if slot.parameter in bad)
        refuse(f"{folder}: ", here)


@torch.no_grad()
def copy_tensors(model: Decoder, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill ``model`` from tensors under their checkpoint names, as strictly as :func:`load_weights`.

    Raises:
        ValueError: as for :func:`load_weights`. Nothing has been copied then.
    """
    stored, scales = without_kv_scales({name: describe(tensor) for name, tensor in tensors.items()})
    plan = _plan(model, stored, "")
    _check_twins(plan.twins, lambda name: _digest(tensors[name]))
    model.scales_of_layers = kv_scales_of(scales, lambda name: tensors[name], model.whole.num_layers)
    parameters = _parameters(model)
    for name, parts in plan.cuts.items():
        for cut in parts:
            cut.slot.write(parameters[cut.slot.parameter], cut.of(tensors[name]))
    plan.clear_others(parameters)


def dummy_weights(model: Decoder, seed: int) -> None:
    """Fill ``model`` with numbers from ``seed``: all factors 1, the rest normal with standard deviation 0.02.

    They are drawn where the weights are, which on a GPU is quick for billions, so a seed gives the same values on
    devices of one type and for one dtype only. A rank of several draws each parameter whole and keeps its part; what
    comes before the layers of a later stage is drawn, too, and dropped.
    """
    here, some = _parameters(model), next(model.parameters())
    generator = torch.Generator(some.device).manual_seed(seed)
    shards, ranks = _shards(model)
    whole = parameter_shapes(model.whole) if shards or not (model.stage.first and model.stage.last) else {}
    for full, module in _owners(model):
        parameter, split = here.get(full), shards.get(full)
        if isinstance(module, Norm) and full.endswith(".weight"):
            if parameter is not None:
                parameter.fill_(1.0 - module.spec.weight_offset)
        elif full.endswith((".scalar", ".expert_scale", "_residual")):
            if parameter is not None:
                parameter.fill_(1.0)
        elif parameter is not None and split is None:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            drawn = some.new_empty(whole[full]).normal_(0.0, 0.02, generator=generator)
            if parameter is not None and split is not None:
                keep_part(parameter, drawn, split, ranks.rank, ranks.size)


def _shards(model: Decoder) -> tuple[dict[str, Split | Once], Group]:
    """How the whole model's parameters are cut, and for which ranks."""
    if model.exchange.size > 1:
        return expert_splits(model.whole), model.exchange.group
    return splits(model.whole) if model.group.size > 1 else {}, model.group


def _owners(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """The parameters of the whole model, in their order, each with the module that it is of."""
    if not (model.stage.first and model.stage.last):
        model = Decoder(model.whole, dtype=model.dtype, device=torch.device("meta"), max_model_len=1)
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            yield f"{path}.{name}" if path else name, module


def _parameters(model: Decoder) -> dict[str, nn.Parameter]:
    """What is here, by the names that it has in the whole model."""
    return {model.stage.whole_name(name): parameter for name, parameter in model.named_parameters()}


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of the whole model's parameters, by their names."""
    return _shapes(weight_map(spec))


def _shapes(slots: Mapping[str, Slot]) -> dict[str, tuple[int, ...]]:
    by_parameter: dict[str, list[Slot]] = {}
    for slot in slots.values():
        by_parameter.setdefault(slot.parameter, []).append(slot)
    return {name: parameter_shape(of_one) for name, of_one in by_parameter.items()}


@dataclass(frozen=True)
class _Plan:
    """Which tensors of a checkpoint go to which parameters.

    Attributes:
        slots: the place of each tensor, by the name that the checkpoint has, in its order.
        twins: an output projection that the model does not have, and the embeddings that it must be equal to.
        cuts: what this rank reads of each tensor, by the same names.
        others: parameters that only rank 0 has, and this is another.
    """

    slots: dict[str, Slot]
    twins: list[tuple[str, str]]
    cuts: dict[str, list[Cut]]
    others: list[str]

    def share_of(self, name: str) -> float:
        """How much of a tensor this rank reads, from 0 to 1."""
        return sum(math.prod(cut.slot.shape) for cut in self.cuts[name]) / math.prod(self.slots[name].shape)

    def clear_others(self, parameters: Mapping[str, torch.Tensor]) -> None:
        for name in self.others:
            parameters[name].zero_()


def _plan(model: Decoder, stored: Mapping[str, Stored], where: str) -> _Plan:
    """Check names, shapes, types and coverage; ``where`` begins messages that are not about one file."""
    (slots, tables, outputs), (shards, group) = _places(model), _shards(model)
    accepted = _accepted_names(slots, text_of=bool(model.spec.text_of))
    home: dict[str, str] = {}  # name of the slot -> name in the checkpoint
    fitting: dict[str, Slot] = {}  # by the name in the checkpoint
    for name, tensor in stored.items():
        if name not in accepted and (is_derived(name, tensor) or is_extra(model.spec, name)):
            continue
        if name not in accepted and _is_spare_bias(name, stored):
            continue
        fitting[name] = _slot_of(name, tensor, slots.get(accepted.get(name, "")))
        if accepted[name] in home:
            raise ValueError(f"{where}tensors {home[accepted[name]]} and {name} are two names of one")
        home[accepted[name]] = name
    embedding = next((home[name] for name in tables if name in home), None)
    twins = [(home.pop(name), embedding) for name in outputs if name in home and embedding is not None]
    _check_complete(slots, home, where)
    read = set(home.values())
    by_name = {name: fitting[name] for name in stored if name in read}
    own = {slot.parameter for slot in by_name.values() if model.stage.holds(slot.parameter)}
    parts = {
        name: cuts(slot, shards.get(slot.parameter), group.rank, group.size) if slot.parameter in own else []
        for name, slot in by_name.items()
    }
    others = [name for name, split in shards.items() if isinstance(split, Once) and not group.leads]
    return _Plan(by_name, twins, parts, [name for name in others if name in own])


def _places(model: Decoder) -> tuple[dict[str, Slot], list[str], list[str]]:
    """The places of the whole model's tensors, by name; the embeddings' names, and those of an output projection that
    is the same table, and has its place."""
    slots = weight_map(model.whole)
    _check_map(model, slots)
    tables = [name for name, slot in slots.items() if slot.parameter == "embed.weight"]
    outputs = [name for name in OUTPUTS if name not in slots] if model.spec.tie_word_embeddings else []
    return {**slots, **dict.fromkeys(outputs, slots[tables[0]])}, tables, outputs


def slots_in_files(model: Decoder, stored: Mapping[str, Stored], where: str) -> dict[str, Slot]:
    """The place of each tensor of a checkpoint that the model has, by the checkpoint's names, in its order. Left out is
    what a checkpoint may have and the model has not: buffers that follow from the configuration, other models' layers,
    and an output projection that is the embeddings.

    Args:
        model: may be on a meta device.
        stored: the checkpoint's weights, without scales of the cache.
        where: begins messages that are not about one file.

    Raises:
        ValueError: a tensor missing, left over, there twice, or of a wrong shape or type; the message names it.
    """
    return _plan(model, stored, where).slots


class WeightWriter:
    """Overwrites weights of a model one by one, under the names that checkpoints or transformers' memory have.

    Args:
        model: the model. Of one rank of several it is a part, and what is written whole tensors all the same.
        allow_nan: take NaN and infinite values, too.

    Raises:
        ValueError: the weights lie packed, as those of larger models do on the CPU.
    """

    def __init__(self, model: Decoder, *, allow_nan: bool = False) -> None:
        if any(parameter.layout is not torch.strided for parameter in model.parameters()):
            raise ValueError("load_weights: on the CPU these weights lie packed: use reload_weights with a folder")
        self._model, self._allow_nan = model, allow_nan
        slots, tables, outputs = _places(model)
        accepted = _accepted_names(slots, text_of=bool(model.spec.text_of))
        self._accepted = {name: tables[0] if place in outputs else place for name, place in accepted.items()}
        self._slots = {name: slot for name, slot in slots.items() if name not in outputs}
        self._parameters, self._shards = _parameters(model), _shards(model)
        self._written: dict[str, str] = {}

    @property
    def complete(self) -> bool:
        """Whether every weight was written since :meth:`forget`."""
        return not unfilled(self._slots, self._written)

    def forget(self) -> None:
        """Count anew what was written."""
        self._written.clear()

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Check that a weight can be written.

        Raises:
            ValueError: no place for it, a wrong shape or type, or NaN or infinite values; a scale of the cache that is
                another than the engine's.
        """
        if is_kv_scale(name):
            check_same_scale(name, tensor, self._model.scales_of_layers)
            return
        stored = describe(tensor)
        if self._is_nothing(name, stored):
            return
        _slot_of(name, stored, self._slots.get(self._accepted.get(name, "")))
        if not self._allow_nan and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"tensor {name} has values that are NaN or infinite: allow_nan=True takes them")

    def _is_nothing(self, name: str, stored: StoredTensor) -> bool:
        """Whether a checkpoint may have a tensor that the model has not."""
        if is_kv_scale(name):
            return True
        return name not in self._accepted and (is_derived(name, stored) or is_extra(self._model.spec, name))

    @torch.no_grad()
    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Overwrite this rank's part of one weight; nothing happens to what a checkpoint may have and the model has
        not. Raises as :meth:`check`; nothing has changed then."""
        self.check(name, tensor)
        stored = describe(tensor)
        if self._is_nothing(name, stored):
            return
        place = self._accepted[name]
        slot, (shards, group) = _slot_of(name, stored, self._slots[place]), self._shards
        if self._model.stage.holds(slot.parameter):
            for cut in cuts(slot, shards.get(slot.parameter), group.rank, group.size):
                cut.slot.write(self._parameters[slot.parameter], cut.of(tensor))
        self._written[place] = name


def _check_map(model: Decoder, slots: Mapping[str, Slot]) -> None:
    """The weight map is about this model's parameters, all of them: a copy must not broadcast."""
    shapes = {name: tuple(parameter.shape) for name, parameter in _parameters(model).items()}
    shards, group = _shards(model)
    whole = {name: shape for name, shape in _shapes(slots).items() if model.stage.holds(name)}
    mapped = {name: local_shape(shape, shards.get(name), group.rank, group.size) for name, shape in whole.items()}
    if mapped != shapes:
        name = min(name for name, _ in mapped.items() ^ shapes.items())
        raise ValueError(f"the weight map gives {name} the shape {mapped.get(name)}, the model {shapes.get(name)}")


def _accepted_names(slots: Mapping[str, Slot], *, text_of: bool = False) -> dict[str, str]:
    """Names that a checkpoint may use -> names of slots: the same, those without the base model's name, and what the
    first checkpoints of BERT call a layer norm's weight and bias; and, where the model is the text part of another
    (``text_of``), those with that one's names before them."""
    accepted = {name: name for name in slots}
    for name in slots:
        for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
            if name.endswith(new):
                accepted[name.removesuffix(new) + old] = name
    if text_of:
        accepted |= {other: slot for name, slot in list(accepted.items()) for other in names_in_files(name)}
    for name, slot in list(accepted.items()):
        if name.count(".") > 1:  # `lm_head.weight` is not in the base model
            accepted.setdefault(name.partition(".")[2], slot)
    return accepted


def is_derived(name: str, tensor: Stored) -> bool:
    """Whether it is a buffer that follows from the configuration, which nobody reads."""
    return bool(_DERIVED.search(name)) or (bool(_MASK.search(name)) and len(tensor.shape) == 4)


def _is_spare_bias(name: str, stored: Mapping[str, Stored]) -> bool:
    """Whether it is a bias of zeros, which older writers of narrow weights add to modules that have none."""
    weight, bias = stored.get(name.removesuffix("bias") + "weight"), stored[name]
    if not name.endswith(".bias") or not isinstance(weight, NarrowTensor) or isinstance(bias, NarrowTensor):
        return False
    assert bias.path is not None
    with open_tensors(bias.path) as file:
        return not bool(file.get(name).any())


def _slot_of(name: str, tensor: Stored, slot: Slot | None) -> Slot:
    """The slot for a tensor as it lies in the checkpoint, once it is checked."""
    label, narrow = f"tensor {name}" if tensor.path is None else f"{tensor.path}: tensor {name}", False
    if isinstance(tensor, NarrowTensor):
        narrow = True
    elif tensor.dtype not in BITS:
        raise ValueError(
            f"{label} is {tensor.dtype}, not one of {', '.join(BITS)}, and not a part of a narrow weight as "
            "quantization_config of config.json describes it"
        )
    if slot is None:
        raise ValueError(f"{label} has no place in the model that config.json describes")
    if narrow and slot.transposed and len(slot.shape) == 2 and not slot.flat_experts:  # a narrow one is never `Conv1D`
        slot = dataclasses.replace(slot, shape=slot.shape[::-1], transposed=False)
    fitting = slot.as_in(tensor.shape)
    if tensor.shape != fitting.shape:
        raise ValueError(f"{label} has shape {list(tensor.shape)}, but config.json asks for {list(slot.shape)}")
    return fitting


def _check_complete(slots: Mapping[str, Slot], home: Mapping[str, str], where: str) -> None:
    missing = unfilled(slots, home)
    if not missing:
        return
    others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    if missing[0] in OUTPUTS and not others:
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


def _digest_in_file(name: str, stored: Stored) -> bytes:
    assert stored.path is not None
    with open_tensors(stored.path) as file:
        if isinstance(stored, NarrowTensor):
            return _digest(stored.piece(file, None, None, torch.device("cpu")).widen(torch.float32))
        return _digest(file.get(name))


def _scale_in_file(name: str, stored: StoredTensor) -> torch.Tensor:
    assert stored.path is not None
    with open_tensors(stored.path) as file:
        return file.get(name).clone()  # the file is closed


def _digest(tensor: torch.Tensor) -> bytes:
    """A digest of the values as float32: equal for a table and its exact conversion, one of the two in memory at a
    time."""
    digest = xxhash.xxh3_128()
    for piece in tensor.split(max(1, PIECE // tensor.shape[-1])):
        digest.update(piece.to("cpu", torch.float32).contiguous().numpy())
    return digest.digest()


def _load(
    file: TensorFile,
    name: str,
    stored: Stored,
    parts: list[Cut],
    parameters: Mapping[str, torch.Tensor],
    later: DeferredWeights,
) -> None:
    """Copy the parts of one tensor. Its name ends here: it would hold the file's memory when the next one is opened."""
    for cut in parts:
        place = cut.slot.parameter
        if isinstance(stored, NarrowTensor) and place in later:
            later.take(place, _arrivals(file, stored, cut, later.device))
        elif isinstance(stored, NarrowTensor):
            for arrival in _arrivals(file, stored, cut, parameters[place].device):
                arrival.write(parameters[place])
        else:
            cut.slot.write(later.plain(place) if place in later else parameters[place], read(file, name, cut.part))
        later.count(place)


def _arrivals(file: TensorFile, stored: NarrowTensor, cut: Cut, device: torch.device) -> Iterator[Arrival]:
    """A cut of a narrow weight on a device, one expert after the other."""
    matrices: list[tuple[int | None, Cut]] = [(None, cut)]
    if len(stored.shape) > 2:
        experts, part = range(stored.shape[0]), cut.part
        if part is not None and part[0] == 0:
            experts, part = range(*part[1:]), None
        of_one = None if part is None else (part[0] - 1, *part[1:])
        slots = [
            cut.slot.of_expert(i) if cut.slot.expert is None else cut.slot.without_row() for i in range(len(experts))
        ]
        matrices = [(expert, Cut(slot, of_one)) for expert, slot in zip(experts, slots, strict=True)]
    for expert, one in matrices:
        yield Arrival(one.slot, stored.piece(file, expert, one.part, device), stored.turned)
