"""A checkpoint with narrow weights, written from one with 16 bits: a folder in the format of compressed-tensors, which
this engine and others read.

The weights of the layers' products and experts become narrow, as ``quantization=`` makes them when a model is loaded
(:mod:`tritonllm.models.quantization`): the numbers are the same. Embeddings, the output projection, routers, norms and
biases are copied. Everything is checked from headers before the first byte is written; then tensors go one at a time
from mapped files to their places in the new ones, so beside these the process holds one tensor.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tritonllm.layers.linear import Embedding
from tritonllm.models import checkpoint
from tritonllm.models.activation_aware import Rescaling, rescaling
from tritonllm.models.decoder import Decoder
from tritonllm.models.deferred_weights import products_of_layers
from tritonllm.models.families import is_supported, spec_from_config, weight_map
from tritonllm.models.formats.compressed_tensors import is_target
from tritonllm.models.formats.joining import join
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.formats.registry import FIELD, format_in, stored_format
from tritonllm.models.formats.writing import WRITTEN, WrittenFormat, narrow_parts, quantization_config
from tritonllm.models.gguf.header import is_gguf
from tritonllm.models.kv_scales import without_kv_scales
from tritonllm.models.slots import Slot
from tritonllm.models.spec import ModelSpec
from tritonllm.models.tensor_files import FILES, StoredTensor, TensorFile, open_tensors, stored_tensors
from tritonllm.models.tensor_writer import TensorWriter
from tritonllm.models.weights import OUTPUTS, is_derived, load_weights, slots_in_files

CONFIG = "config.json"
GROUP_SIZES = tuple(1 << i for i in range(5, 13))
# Ends of files that hold weights, of which the new folder has its own; adapters and other programs' are not copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_MODULES = ("*_Pooling", "*_Dense")  # folders of sentence-transformers, whose weights are copied


@dataclass(frozen=True)
class Quantized:
    """What was written.

    Attributes:
        folder: the new folder.
        narrow: how many weights are narrow.
        others: how many tensors were copied.
        bytes_before, bytes_after: the bytes of all tensors in the old files and in the new ones.
    """

    folder: Path
    narrow: int
    others: int
    bytes_before: int
    bytes_after: int


@torch.no_grad()
def quantize_checkpoint(
    model: str | Path,
    out: str | Path,
    format: str,
    *,
    group_size: int | None = None,
    ignore: Sequence[str] = (),
    calibrate: Sequence[Sequence[int]] | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    progress: bool | None = None,
) -> Quantized:
    """Write a checkpoint of compressed-tensors whose weights are narrow.

    ``config.json`` is written last: a folder without it is not complete.

    Args:
        model: a folder, or the id of a repository on the Hugging Face hub, with safetensors or PyTorch files.
        out: the new folder.
        format: ``"fp8"`` (e4m3) or ``"int8"``, with a scale for each row; ``"w4a16"``, integers of 4 bits with a scale
            for each group of columns (Frantar et al., "GPTQ" (2022), without its search: each number is rounded to the
            nearest); or ``"mxfp4"``, 4-bit floats with a power of two for each 32 columns (OCP Microscaling Formats
            (MX) Specification v1.0). Of ``fp8`` and ``int8`` the configuration says that products round their rows to
            the same format, token by token, which this engine does on a GPU.
        group_size: columns of a group of ``w4a16``, a power of two from 32 to 4096; by default 128.
        ignore: modules that keep their weights: names, or behind ``re:`` regular expressions that names begin with.
        calibrate: token ids of texts, on which the model runs, in float32 on the CPU, to scale weights of ``w4a16``
            before they are rounded (:mod:`tritonllm.models.activation_aware`).
        overwrite: write into a folder that is not empty. Weights and ``config.json`` that are there are deleted first.
        revision: branch, tag or commit of a hub id.
        progress: show a bar; ``None`` shows it if the standard error is a terminal.

    Raises:
        ValueError: an argument that does not fit; weights that are narrow already; a model that runs through
            transformers; all experts of a layer in one tensor where there are no names for each; a file or tensor that
            is missing, left over or of a wrong shape; columns that are not whole groups. Nothing has been written then.
            Last, values that are NaN or infinite.
    """
    form, size = written_format(format, group_size)
    if calibrate is not None and (form.rounded is None or not any(calibrate)):
        raise ValueError(f"calibrate is of w4a16 and a text that is not empty, and this is {format}: leave it out")
    folder, out = checkpoint.resolve(str(model), revision), Path(out)
    config = _config_of(folder)
    plan = _plan(folder, config, form, size, ignore)
    if calibrate is not None:
        plan = _rescaled(plan, folder, calibrate)
    _make_room(folder, out, overwrite)
    _copy_others(folder, out)
    before, after = _write_weights(plan, out, progress)
    config = {**config, FIELD: quantization_config(form, size, plan.ignored)}
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    narrow = sum(map(len, plan.narrow.values()))
    return Quantized(out, narrow, len(plan.stored) - len(plan.narrow), before, after)


def written_format(format: str, group_size: int | None = None) -> tuple[WrittenFormat, int]:
    """A format, and how many columns its groups have; arguments as of :func:`quantize_checkpoint`.

    Raises:
        ValueError: there is no such format, or it has no such groups.
    """
    if format not in WRITTEN:
        raise ValueError(f"format must be one of {', '.join(WRITTEN)}, got {format!r}")
    form = WRITTEN[format]
    if group_size is None or group_size == form.group_size:
        return form, form.group_size
    if not form.other_sizes:
        has = f"groups of {form.group_size} columns" if form.group_size else "a scale for each row"
        raise ValueError(f"group_size={group_size}: {format} has {has}: leave it out")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {group_size}")
    return form, group_size


def _config_of(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a checkpoint that can become narrow."""
    if is_gguf(folder):
        raise ValueError(f"{folder} is a GGUF file: give the model as it was published, a folder with config.json")
    config = checkpoint.read_config(folder)
    if (stored := stored_format(folder)) is not None:
        raise ValueError(f"{folder}: the weights are narrow already ({stored}): give the model as it was trained")
    if not is_supported(config):
        named = ", ".join(config.get("architectures") or []) or config.get("model_type")
        raise ValueError(f"{named} runs through transformers, which has 16-bit weights here: see docs/models.md")
    return config


@dataclass(frozen=True)
class _Matrix:
    """A weight that becomes narrow, which is a stored tensor or, of one that holds all experts, a part.

    Attributes:
        module: what the new files call the module that it is of.
        place: the place of the stored tensor in the model.
        own: the place of the weight.
    """

    module: str
    place: Slot
    own: Slot

    @property
    def size(self) -> tuple[int, int]:
        """N and K."""
        n, k = self.own.own_shape
        return n, k

    def read(self, file: TensorFile, name: str) -> torch.Tensor:
        """The weight ``[N, K]``."""
        if self.own is self.place:
            tensor = file.get(name)
            return tensor.mT if self.place.transposed else tensor
        assert self.own.expert is not None
        one, of_one = file.window(name, (self.own.expert,)), self.place.of_expert(self.own.expert)
        rows = torch.empty(of_one.own_shape, dtype=one.dtype)
        dataclasses.replace(of_one, expert=None, start=0).write(rows, one)
        begin = self.own.start - self.place.start
        return rows[begin : begin + self.size[0]]


@dataclass(frozen=True)
class _Rewriting:
    """What becomes of each tensor.

    Attributes:
        stored: all that is written, by name.
        narrow: the tensors that become narrow, each with the weights in it.
        ignored: the modules with matrices that do not.
        form, group_size: how weights become narrow.
        slots: the place of each tensor in the model.
        rescaled: other values of the model's parameters.
    """

    stored: dict[str, StoredTensor]
    narrow: Mapping[str, Sequence[_Matrix]]
    ignored: list[str]
    form: WrittenFormat
    group_size: int
    slots: Mapping[str, Slot]
    rescaled: Rescaling = field(default_factory=Rescaling)

    def headers_of(self, name: str) -> dict[str, StoredTensor]:
        """What is written of a tensor, by name."""
        if name not in self.narrow:
            return {name: self.stored[name]}
        return {
            f"{weight.module}.{end}": header
            for weight in self.narrow[name]
            for end, header in self.form.headers(*weight.size, self.group_size).items()
        }

    def tensors_of(self, name: str, file: TensorFile) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that :meth:`headers_of` announces."""
        if name not in self.narrow:
            yield name, self._kept(name, file.get(name))
            return
        for weight in self.narrow[name]:
            try:
                rows = self.rescaled.of_rows(weight.own.parameter, weight.read(file, name), weight.own.start)
                parts = narrow_parts(rows, self.form, self.group_size)
            except ValueError as error:
                raise ValueError(f"{self.stored[name].path}: tensor {name}: {error}") from error
            yield from ((f"{weight.module}.{end}", part) for end, part in parts.items())

    def _kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that does not become narrow, as it is from here on."""
        slot = self.slots.get(name)
        if slot is None or slot.parameter not in self.rescaled.touched:
            return tensor
        if tensor.dim() == 1:
            values = self.rescaled.vectors[slot.parameter][slot.start : slot.start + len(tensor)]
            return (values - slot.minus).to(tensor.dtype)
        rows = self.rescaled.of_rows(slot.parameter, tensor.mT if slot.transposed else tensor, slot.start)
        return (rows.mT if slot.transposed else rows).to(tensor.dtype)


def _plan(
    folder: Path, config: Mapping[str, Any], form: WrittenFormat, group_size: int, ignore: Sequence[str]
) -> _Rewriting:
    stored = stored_tensors(folder)
    joined = join(without_kv_scales(stored)[0], format_in(folder))
    already = next((name for name, tensor in joined.items() if isinstance(tensor, NarrowTensor)), None)
    if already is not None:
        raise ValueError(f"{folder}: {already} is narrow already ({joined[already].dtype}): give the model in 16 bits")
    stored = {name: tensor for name, tensor in stored.items() if not is_derived(name, tensor)}
    spec = spec_from_config(config)
    model = Decoder(spec, dtype=spec.dtype, device=torch.device("meta"), max_model_len=1)
    slots = slots_in_files(model, joined, f"{folder}: ")
    products = {name for name, _, _ in products_of_layers(model)}
    found = {
        name: _matrices(name, stored[name], slot, spec)
        for name, slot in slots.items()
        if slot.parameter in products and len(slot.shape) > 1
    }
    every = [weight.module for weights in found.values() for weight in weights]
    every += [name.rpartition(".")[0] for name in stored]
    for pattern in ignore:
        if not any(is_target(module, pattern) for module in every):
            raise ValueError(f"ignore={pattern!r} is no module of {folder}: give a name, or re: and an expression")
    narrow = {name: weights for name, weights in found.items() if not _all_ignored(name, weights, ignore)}
    if not narrow:
        raise ValueError(f"ignore leaves no weight of {folder} to make narrow")
    _check_groups(narrow, form, group_size)
    tables = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Embedding)}
    looked_up = {name for name, slot in slots.items() if slot.parameter in tables} - set(OUTPUTS)
    others = [name for name, tensor in stored.items() if name.endswith(".weight") and len(tensor.shape) == 2]
    ignored = {name.removesuffix(".weight") for name in others if name not in narrow and name not in looked_up}
    ignored |= {weight.module for name, weights in found.items() if name not in narrow for weight in weights}
    return _Rewriting(stored, narrow, sorted(ignored | {OUTPUTS[0].removesuffix(".weight")}), form, group_size, slots)


def _rescaled(plan: _Rewriting, folder: Path, sequences: Sequence[Sequence[int]]) -> _Rewriting:
    """The plan with the model's parameters scaled by what they meet in texts."""
    spec = spec_from_config(checkpoint.read_config(folder))
    longest = max(map(len, sequences))
    model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=longest)
    load_weights(model, folder)
    rounded = plan.form.rounded
    assert rounded is not None
    found = rescaling(model, sequences, lambda weight: rounded(weight, plan.group_size), spec.dtype)
    for name, slot in plan.slots.items():
        if slot.parameter in found.touched and slot.order is not None:
            raise ValueError(
                f"calibrate: tensor {name} has its rows in another order, which is not scaled: leave it out"
            )
    return dataclasses.replace(plan, rescaled=found)


def _matrices(name: str, stored: StoredTensor, place: Slot, spec: ModelSpec) -> list[_Matrix]:
    """The weights in a tensor: itself, or those of all experts, called as where experts are stored one by one."""
    if len(stored.shape) == 2 and not place.flat_experts and name.endswith(".weight"):
        return [_Matrix(name.removesuffix(".weight"), place, place)]
    slots, rows = weight_map(spec), range(place.start, place.start + place.own_shape[place.axis])
    of_one = {
        other: slot
        for other, slot in slots.items()
        if slot.parameter == place.parameter and slot.expert is not None and slot.start in rows and slot.order is None
    }
    if not of_one or len(stored.shape) != 3:
        raise ValueError(
            f"tensor {name} {list(stored.shape)} holds all experts of a layer, and there are no names here for each: "
            "compressed-tensors needs them"
        )
    end = name.rpartition(".")[2]
    alike = (other for other, slot in slots.items() if slot.parameter == place.parameter and other.endswith(end))
    before, instead = _beginnings(next(alike), name)
    modules = {other: instead + other.removeprefix(before).removesuffix(".weight") for other in of_one}
    return [_Matrix(modules[other], place, slot) for other, slot in of_one.items()]


def _beginnings(name: str, other: str) -> tuple[str, str]:
    """What stands in two names before what is the same in both."""
    parts, others = name.split("."), other.split(".")
    while parts and others and parts[-1] == others[-1]:
        parts, others = parts[:-1], others[:-1]
    before, instead = ("".join(f"{part}." for part in each) for each in (parts, others))
    return before, instead


def _all_ignored(name: str, weights: Sequence[_Matrix], ignore: Sequence[str]) -> bool:
    """Whether a tensor is left as it is.

    Raises:
        ValueError: a part of it would be.
    """
    kept = [any(is_target(weight.module, pattern) for pattern in ignore) for weight in weights]
    if any(kept) and not all(kept):
        raise ValueError(f"ignore names some of the weights in {name}, which is one tensor: name all or none")
    return all(kept)


def _check_groups(narrow: Mapping[str, Sequence[_Matrix]], form: WrittenFormat, group_size: int) -> None:
    """That every weight has whole groups of columns."""
    columns = {weight.module: weight.size[1] for weights in narrow.values() for weight in weights}
    bad = [module for module, k in columns.items() if group_size and k % group_size]
    if not bad:
        return
    fits = [size for size in GROUP_SIZES if size < group_size and not any(k % size for k in columns.values())]
    fix = f"group_size={fits[-1]}, or " if form.other_sizes and fits else ""
    raise ValueError(
        f"tensor {bad[0]}.weight has {columns[bad[0]]} columns, which are not whole groups of {group_size}: use {fix}"
        f"fp8 or int8, or ignore={bad[0]!r}"
    )


def _make_room(folder: Path, out: Path, overwrite: bool) -> None:
    """An output folder without weights."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out: {out} is a file; name a folder")
    if out.resolve() == folder.resolve():
        raise ValueError(f"out: {out} is the model's own folder; name another")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"out: {out} is not empty; name another folder, or use overwrite")
        for path in [out / CONFIG, *(path for path in out.iterdir() if path.name.endswith(_WEIGHTS))]:
            path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)


def _copy_others(folder: Path, out: Path) -> None:
    """Tokenizer, generation_config, templates and what else is there, but no weights."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == CONFIG or path.resolve() == out.resolve():
            continue
        if path.is_dir():
            whole = any(path.match(pattern) for pattern in _MODULES)
            leave_out = None if whole else shutil.ignore_patterns(*(f"*{end}" for end in _WEIGHTS), ".*")
            shutil.copytree(path, out / path.name, ignore=leave_out, dirs_exist_ok=True)
        elif not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, out / path.name)


def _write_weights(plan: _Rewriting, out: Path, progress: bool | None) -> tuple[int, int]:
    """Write all tensors, file by file as they are stored; how many bytes they had and have."""
    groups = [(path, list(names)) for path, names in groupby(plan.stored, key=lambda name: plan.stored[name].path)]
    index, single = FILES["safetensors"]
    stem, end = single.split(".")
    files = [f"{stem}-{i + 1:05}-of-{len(groups):05}.{end}" for i in range(len(groups))] if groups[1:] else [single]
    before, after, home = sum(tensor.num_bytes for tensor in plan.stored.values()), 0, dict[str, str]()
    off = None if progress is None else not progress
    with tqdm(total=before, desc="writing weights", unit="B", unit_scale=True, leave=False, disable=off) as bar:
        for file, (path, names) in zip(files, groups, strict=True):
            headers = {written: header for name in names for written, header in plan.headers_of(name).items()}
            home |= dict.fromkeys(headers, file)
            assert path is not None
            with open_tensors(path) as source, TensorWriter(out / file, headers) as writer:
                for name in names:
                    for written, tensor in plan.tensors_of(name, source):
                        writer.write(written, tensor)
                    bar.update(plan.stored[name].num_bytes)
                after += writer.num_bytes
    if groups[1:]:
        said = {"metadata": {"total_size": after}, "weight_map": dict(sorted(home.items()))}
        (out / index).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return before, after
