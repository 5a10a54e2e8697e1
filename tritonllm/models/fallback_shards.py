"""Tensor parallelism of models that run through transformers: transformers' own plan says what is cut, and how.

A plan names modules and parameters of a model, layer numbers as ``*``, and a style for each
(``transformers.PreTrainedModel.tp_plan``). Here a style becomes two things: a part of parameters for each rank, in the
words of :mod:`tritonllm.models.shards`, and what a module's inputs or results need of the other ranks, which hooks do.
Embedding tables stay whole on every rank, as those of our own families do. After Shoeybi et al., "Megatron-LM" (2019).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritonllm.dist.group import Group
from tritonllm.models.shards import Once, Section, Split, keep_part, local_shape

# Styles that leave a module as it is on every rank: what they do is about gradients or DTensors. Embeddings: see above.
_WHOLE = frozenset(
    {"replicate", "replicated_with_grad_allreduce", "local_params", "embedding_rowwise", "embedding_colwise"}
)
# Styles that cut parameters along their last dimension but one.
_COLUMNS = frozenset({"colwise", "packed_colwise", "colwise_gather_output", "colwise_rep"})
# Styles that cut parameters along their last dimension.
_ROWS = frozenset({"rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"})
_PACKED = frozenset({"packed_colwise", "packed_rowwise"})  # two projections in one parameter
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_NARROWED = frozenset({"rowwise_split_input", "rowwise_rep"})
_SUMMED = frozenset({"moe_tp_experts", "all_reduce"})
NO_PLAN = "set tensor_parallel_size=1 (pipeline_parallel_size needs no plan)"
SIZE = "set tensor_parallel_size=1, or to a divisor"
_KNOWN = _WHOLE | _COLUMNS | _ROWS | _SUMMED


@dataclass
class Sharing:
    """How ranks share a model of transformers.

    Attributes:
        splits: how a parameter is cut, by its name; those that are not there are whole everywhere.
        gathered: modules whose results the ranks put side by side, with the number of columns of all.
        narrowed: modules that get all columns and take their part.
        summed: modules whose results the ranks add up.
    """

    splits: dict[str, Split | Once] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)
    narrowed: dict[str, Split] = field(default_factory=dict)
    summed: list[str] = field(default_factory=list)


def sharing_of(lm: Any, architecture: str, size: int, *, head_size: int, num_kv_heads: int) -> Sharing:
    """How ``size`` ranks share a model; its weights are not read, so they may be on the meta device.

    Args:
        lm: the model of transformers, whole.
        head_size: elements of an attention head, which are not cut.
        num_kv_heads: key heads of a layer; of fewer than ranks, neighbouring ranks have the same one.

    Raises:
        ValueError: transformers has no plan for the model, or one with a style that is unknown here; or the ranks
            cannot have equally much of something, which the message names.
    """
    plan: dict[str, str] = lm.tp_plan or {}
    modules, parameters = dict(lm.named_modules()), dict(lm.named_parameters(remove_duplicate=False))
    found = Sharing()
    for pattern, style in plan.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        names = [*filter(matches, modules), *filter(matches, parameters)]
        if names and style not in _KNOWN:
            raise _refused(architecture, size, f"its plan cuts {names[0]} in an unknown way ({style})", NO_PLAN)
        for name in names:
            if name in modules:
                _add_module(found, name, modules[name], style)
            elif style in _COLUMNS | _ROWS:
                found.splits[name] = _split(tuple(parameters[name].shape), style)
    if not any(isinstance(split, Split) for split in found.splits.values()):
        raise _refused(architecture, size, "that has no plan to cut it (base_model_tp_plan)", NO_PLAN)
    for name, heads, is_back in [*_heads(modules, found, head_size)]:
        if heads == num_kv_heads and size % heads == 0 and not is_back:
            shared = Split(0, (Section(heads, head_size),))
            found.splits |= {f"{name}.{leaf}": shared for leaf, _ in modules[name].named_parameters(recurse=False)}
        elif heads % size:
            raise _refused(architecture, size, f"it must divide {heads}, the number of heads of {name}", SIZE)
    for name, split in found.splits.items():
        _check_even(architecture, name, split, size)
    return found


def _refused(architecture: str, size: int, reason: str, fix: str) -> ValueError:
    return ValueError(f"tensor_parallel_size={size}: {architecture} runs through transformers, and {reason}: {fix}")


def _add_module(found: Sharing, name: str, module: nn.Module, style: str) -> None:
    own = {leaf: tuple(p.shape) for leaf, p in module.named_parameters(recurse=False)}
    if style in _WHOLE:
        return
    if style in _SUMMED:
        found.summed.append(name)
        return
    for leaf, shape in own.items():
        found.splits[f"{name}.{leaf}"] = Once() if leaf == "bias" and style in _ROWS else _split(shape, style)
    if style in _GATHERED:
        found.gathered[name] = own["weight"][0]
    if style in _ROWS:
        found.summed.append(name)
    if style in _NARROWED:
        found.narrowed[name] = _split(own["weight"], style)


def _split(shape: tuple[int, ...], style: str) -> Split:
    axis = len(shape) - 1 if style in _ROWS else max(0, len(shape) - 2)
    if style in _PACKED:
        return Split(axis, (Section(shape[axis] // 2), Section(shape[axis] // 2)))
    return Split(axis, (Section(shape[axis], uneven=style in _GATHERED),))


def _check_even(architecture: str, name: str, split: Split | Once, size: int) -> None:
    for section in split.sections if isinstance(split, Split) else ():
        if not section.uneven and section.units % size and (section.size == 1 or size % section.units):
            raise _refused(architecture, size, f"it must divide {section.units}, a size of {name}", SIZE)


def _heads(modules: dict[str, nn.Module], found: Sharing, head_size: int) -> Iterator[tuple[str, int, bool]]:
    """Projections of an attention that are cut, how many heads they have, and whether it is the one back from heads."""
    for name, split in found.splits.items():
        projection, _, leaf = name.rpartition(".")
        attention = modules.get(projection.rpartition(".")[0])
        if leaf != "weight" or not hasattr(attention, "layer_idx") or not hasattr(attention, "num_key_value_groups"):
            continue
        if isinstance(split, Split) and not split.sections[0].uneven and projection not in found.narrowed:
            extent = split.sections[0].units
            if extent % head_size == 0:  # else it is no projection to heads, but to a number for each
                yield projection, extent // head_size, split.axis == 1


def cut(lm: Any, sharing: Sharing, group: Group, device: torch.device) -> None:
    """Keep this rank's part of a model, move it to ``device``, and connect it with the other ranks'."""
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    views = {}  # of a table that is whole here, under another name
    for names in by_parameter.values():
        whole = [name for name in names if name not in sharing.splits]
        for name in names:
            if name in sharing.splits and whole:
                views[name] = whole[0]
            elif name in sharing.splits:
                _replace(lm, name, part_of(lm.get_parameter(name), sharing.splits[name], group))
    lm.to(device)
    for name, source in views.items():
        split = sharing.splits[name]
        assert isinstance(split, Split)  # a table
        (mine,) = split.held(group.rank, group.size)
        _replace(lm, name, lm.get_parameter(source).data.narrow(split.axis, mine.start, len(mine)))
    modules = dict(lm.named_modules())
    for name, split in sharing.narrowed.items():
        if name in modules:
            modules[name].register_forward_pre_hook(_narrowing(split, group))
    for name in sharing.summed:
        if name in modules:
            modules[name].register_forward_hook(_summing(name, group))
    for name, columns in sharing.gathered.items():
        if name in modules:
            modules[name].register_forward_hook(_gathering(columns, group))


def part_of(whole: torch.Tensor, split: Split | Once, group: Group) -> torch.Tensor:
    """A rank's part of a parameter, in memory of its own."""
    part = whole.new_empty(local_shape(tuple(whole.shape), split, group.rank, group.size))
    keep_part(part, whole.detach(), split, group.rank, group.size)
    return part


def _replace(lm: Any, name: str, tensor: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(lm.get_submodule(module), leaf, nn.Parameter(tensor, requires_grad=False))


def _narrowing(split: Split, group: Group) -> Callable[..., Any]:
    (mine,) = split.held(group.rank, group.size)
    return lambda module, args: (args[0][..., mine.start : mine.stop], *args[1:])


def _summing(name: str, group: Group) -> Callable[..., Any]:
    def add_up(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            raise ValueError(f"{name} gives more than a tensor, which cannot be summed up over the ranks")
        rows = output.reshape(-1, output.shape[-1]).contiguous()
        return group.all_reduce(rows).view(output.shape)

    return add_up


def _gathering(columns: int, group: Group) -> Callable[..., Any]:
    def put_beside(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        rows = output.reshape(-1, output.shape[-1]) if output.shape[-1] else output.flatten(0, -2)
        return group.all_gather(rows, columns).view(*output.shape[:-1], columns)

    return put_beside
