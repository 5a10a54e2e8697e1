"""The part of a transformers model that one stage of a pipeline has.

A base model runs all of its layers and knows their number, so the list of layers keeps its length: a layer of another
stage is a module that hands on what it gets. The last of those before a stage's own layers gives what the stage before
has computed, and the first one behind keeps what the next stage goes on with. Embeddings and output projection are on
the first stage alone, as they are with our own families (:mod:`tritonllm.models.stages`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tritonllm.models.stages import Stage, stages_by_cost


class AbsentLayer(nn.Module):
    """In the place of a layer that another stage has.

    Args:
        like: the layer, of which it has the plain attributes, for base models that ask for the kind of attention.
        wraps: how many values the layer returns beside the hidden states, in one tuple; ``None`` if it returns these
            alone.

    Attributes:
        given: ``[1, T, hidden]``, what it returns instead of what it gets.
        seen: what it got last.
    """

    def __init__(self, like: nn.Module, wraps: int | None) -> None:
        super().__init__()
        for name, value in vars(like).items():
            if not name.startswith("_") and isinstance(value, str | int | float | None):
                setattr(self, name, value)
        self.wraps = wraps
        self.given: torch.Tensor | None = None
        self.seen: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.seen = hidden_states
        out = hidden_states if self.given is None else self.given
        return out if self.wraps is None else (out, *[None] * self.wraps)


class AbsentModule(nn.Module):
    """In the place of embeddings or an output projection that the first stage has."""


def layer_list(base: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of a base model's layers.

    Raises:
        ValueError: there is no such list.
    """
    for module in base.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == num_layers
            and all(map(_attends_as, range(num_layers), module))
        ):
            return module
    raise ValueError("its layers are not in one list (leave out pipeline_parallel_size)")


def _attends_as(place: int, layer: nn.Module) -> bool:
    return any(getattr(module, "layer_idx", None) == place for module in layer.modules())


def stages_in(lm: Any, architecture: str, num_layers: int, count: int) -> list[Stage]:
    """Deal the layers of a model out to ``count`` stages; its weights are not read.

    Raises:
        ValueError: there are fewer layers than stages, or no list of layers.
    """
    layers = layer_list(lm.base_model, num_layers)
    costs = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    head = lm.get_output_embeddings()
    return stages_by_cost(architecture, costs, 0 if head is None else head.weight.numel(), count)


class States:
    """Hidden states at the ends of a stage, of one run of the whole model.

    Attributes:
        before, behind: ``[N, T, hidden]``, with which the stage's first layer begins, and what its last one computes;
            of the last stage, what comes behind the last norm.
        normed: what comes behind the last norm, which the output projection reads.
        wraps: as of :class:`AbsentLayer`.
    """

    before: torch.Tensor
    behind: torch.Tensor
    normed: torch.Tensor
    wraps: int | None = None


@contextmanager
def watched(base: nn.Module, layers: nn.ModuleList, stage: Stage) -> Iterator[States]:
    """Inside the block, a run of the whole model leaves what a stage shall compute."""
    found, hooks = States(), []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.before = args[0] if args else kwargs["hidden_states"]

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        found.wraps = len(output) - 1 if isinstance(output, tuple) else None
        found.behind = output[0] if isinstance(output, tuple) else output

    def end(module: nn.Module, args: Any, output: Any) -> None:
        found.normed = output.last_hidden_state
        if stage.last:
            found.behind = found.normed

    hooks.append(layers[stage.layers.start].register_forward_pre_hook(enter, with_kwargs=True))
    hooks.append(layers[stage.layers.stop - 1].register_forward_hook(leave))
    hooks.append(base.register_forward_hook(end))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def keep_stage(lm: Any, layers: nn.ModuleList, stage: Stage, wraps: int | None) -> None:
    """Let go of what other stages have."""
    for place, layer in enumerate(layers):
        if place not in stage.layers:
            layers[place] = AbsentLayer(layer, wraps)
    if not stage.first:
        lm.set_input_embeddings(AbsentModule())
        if lm.get_output_embeddings() is not None:
            lm.set_output_embeddings(AbsentModule())
