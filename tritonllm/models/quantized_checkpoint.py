"""A checkpoint with narrow weights, written from one with 16 bits: a folder in the format of compressed-tensors, which
this engine and others read.

The weights of the layers' products and experts become narrow, as ``quantization=`` makes them when a model is loaded
(:mod:`tritonllm.models.quantization`): the numbers are the same. Embeddings, the output projection, routers, norms and
biases are copied. Everything is checked from headers before the first byte is written; then tensors go one at a time
from mapped files to their places in the new ones, so beside these the process holds one tensor.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from tritonllm.layers.linear import Embedding
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.deferred_weights import products_of_layers
from tritonllm.models.families import is_supported, spec_from_config
from tritonllm.models.formats.compressed_tensors import is_target
from tritonllm.models.formats.joining import join
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.formats.registry import FIELD, format_in, stored_format
from tritonllm.models.formats.writing import TARGETS, Target, narrow_parts, quantization_config
from tritonllm.models.gguf.header import is_gguf
from tritonllm.models.kv_scales import without_kv_scales
from tritonllm.models.slots import Slot
from tritonllm.models.tensor_files import FILES, StoredTensor, TensorFile, open_tensors, stored_tensors
from tritonllm.models.tensor_writer import TensorWriter
from tritonllm.models.weights import OUTPUTS, is_derived, slots_in_files

CONFIG = "config.json"
GROUP_SIZES = tuple(1 << i for i in range(5, 13))
# Ends of files that hold weights, of which the new folder has its own; adapters and other programs' are not copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json")
_MODULES = ("*_Pooling", "*_Dense")  # folders of sentence-transformers, whose weights are copied


@dataclass(frozen=True)
class Quantized:
    """What was written.

    Attributes:
        folder: where.
        narrow: how many weights are narrow.
        others: how many tensors were copied.
        bytes_before, bytes_after: of all tensors, in the old files and the new.
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
            (MX) Specification v1.0). Engines that multiply narrow numbers round the activations of ``fp8`` and
            ``int8`` token by token; this one does not.
        group_size: columns of a group of ``w4a16``, a power of two from 32 to 4096; by default 128.
        ignore: modules that keep their weights: names, or behind ``re:`` regular expressions that names begin with.
        overwrite: write into a folder that is not empty. Weights and ``config.json`` that are there are deleted first.
        revision: branch, tag or commit of a hub id.
        progress: show a bar; ``None`` shows it if the standard error is a terminal.

    Raises:
        ValueError: an argument that does not fit; weights that are narrow already; a model that runs through
            transformers, or has all experts of a layer in one tensor; a file or tensor that is missing, left over or of
            a wrong shape; columns that are not whole groups. Nothing has been written then. Last, values that are NaN
            or infinite.
    """
    target, size = target_of(format, group_size)
    folder, out = checkpoint.resolve(str(model), revision), Path(out)
    config = _config_of(folder)
    plan = _plan(folder, config, target, size, ignore)
    _make_room(folder, out, overwrite)
    _copy_others(folder, out)
    before, after = _write_weights(plan, out, progress)
    config = {**config, FIELD: quantization_config(target, size, plan.ignored)}
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    narrow = len(plan.narrow)
    return Quantized(out, narrow, len(plan.stored) - narrow, before, after)


def target_of(format: str, group_size: int | None = None) -> tuple[Target, int]:
    """A format, and how many columns its groups have; arguments as of :func:`quantize_checkpoint`.

    Raises:
        ValueError: there is no such format, or it has no such groups.
    """
    if format not in TARGETS:
        raise ValueError(f"format must be one of {', '.join(TARGETS)}, got {format!r}")
    target = TARGETS[format]
    if group_size is None or group_size == target.group_size:
        return target, target.group_size
    if not target.other_sizes:
        has = f"groups of {target.group_size} columns" if target.group_size else "a scale for each row"
        raise ValueError(f"group_size={group_size}: {format} has {has}: leave it out")
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {group_size}")
    return target, group_size


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
class _Plan:
    """What becomes of each tensor.

    Attributes:
        stored: all that is written, by name.
        narrow: of these the ones that become narrow, each with its place in the model.
        ignored: the modules with matrices that do not.
        target, group_size: how.
    """

    stored: dict[str, StoredTensor]
    narrow: Mapping[str, Slot]
    ignored: list[str]
    target: Target
    group_size: int

    def headers_of(self, name: str) -> dict[str, StoredTensor]:
        """What is written of a tensor, by name."""
        if name not in self.narrow:
            return {name: self.stored[name]}
        (n, k), module = _sizes(self.stored[name], self.narrow[name]), name.removesuffix(".weight")
        return {f"{module}.{end}": header for end, header in self.target.headers(n, k, self.group_size).items()}

    def tensors_of(self, name: str, file: TensorFile) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that :meth:`headers_of` announces."""
        tensor = file.get(name)
        if name not in self.narrow:
            yield name, tensor
            return
        module = name.removesuffix(".weight")
        weight = tensor.mT if self.narrow[name].transposed else tensor
        try:
            parts = narrow_parts(weight, self.target, self.group_size)
        except ValueError as error:
            raise ValueError(f"{self.stored[name].path}: tensor {name}: {error}") from error
        yield from ((f"{module}.{end}", part) for end, part in parts.items())


def _sizes(stored: StoredTensor, slot: Slot) -> tuple[int, int]:
    """N and K of a weight."""
    n, k = stored.shape
    return (k, n) if slot.transposed else (n, k)


def _plan(folder: Path, config: Mapping[str, Any], target: Target, group_size: int, ignore: Sequence[str]) -> _Plan:
    every = stored_tensors(folder)
    weights, _ = without_kv_scales(every)
    joined = join(weights, format_in(folder))
    if (found := next((name for name, tensor in joined.items() if isinstance(tensor, NarrowTensor)), None)) is not None:
        raise ValueError(f"{folder}: {found} is narrow already ({joined[found].dtype}): give the model in 16 bits")
    spec = spec_from_config(config)
    model = Decoder(spec, dtype=spec.dtype, device=torch.device("meta"), max_model_len=1)
    slots = slots_in_files(model, joined, f"{folder}: ")
    products = {name for name, _, _ in products_of_layers(model)}
    of_products = {name: slot for name, slot in slots.items() if slot.parameter in products and len(slot.shape) > 1}
    kept = {name for name in of_products if any(is_target(name.removesuffix(".weight"), one) for one in ignore)}
    for pattern in ignore:
        if not any(is_target(name.removesuffix(".weight"), pattern) for name in every):
            raise ValueError(f"ignore={pattern!r} is no module of {folder}: give a name, or re: and an expression")
    narrow = {name: slot for name, slot in of_products.items() if name not in kept}
    if not narrow:
        raise ValueError(f"ignore leaves no weight of {folder} to make narrow")
    stored = {name: tensor for name, tensor in every.items() if not is_derived(name, tensor)}
    _check(narrow, stored, target, group_size)
    tables = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Embedding)}
    looked_up = {name for name, slot in slots.items() if slot.parameter in tables} - set(OUTPUTS)
    others = [name for name, tensor in stored.items() if name.endswith(".weight") and len(tensor.shape) == 2]
    ignored = {name.removesuffix(".weight") for name in others if name not in narrow and name not in looked_up}
    return _Plan(stored, narrow, sorted(ignored | {OUTPUTS[0].removesuffix(".weight")}), target, group_size)


def _check(narrow: Mapping[str, Slot], stored: Mapping[str, StoredTensor], target: Target, group_size: int) -> None:
    """That every weight can be written as one of its own, in whole groups."""
    columns = dict[str, int]()
    for name, slot in narrow.items():
        shape = list(stored[name].shape)
        if len(shape) > 2 or slot.flat_experts or not name.endswith(".weight"):
            raise ValueError(
                f"tensor {name} {shape} holds all experts of a layer, and compressed-tensors has a weight for each: "
                "give a checkpoint with experts one by one, as transformers writes them"
            )
        columns[name] = _sizes(stored[name], slot)[1]
    bad = [name for name, k in columns.items() if group_size and k % group_size]
    if not bad:
        return
    fits = [size for size in GROUP_SIZES if size < group_size and not any(k % size for k in columns.values())]
    fix = f"group_size={fits[-1]}, or " if target.other_sizes and fits else ""
    raise ValueError(
        f"tensor {bad[0]} has {columns[bad[0]]} columns, which are not whole groups of {group_size}: use {fix}fp8 or "
        f"int8, or ignore={bad[0].removesuffix('.weight')!r}"
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


def _write_weights(plan: _Plan, out: Path, progress: bool | None) -> tuple[int, int]:
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
