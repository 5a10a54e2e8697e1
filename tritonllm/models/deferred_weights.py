"""Weights of products that get their memory when their tensors arrive: a model that is kept narrow never takes room for
16 bits of all.

Inside :func:`~tritonllm.layers.parameters.deferred` a model is built without these parameters. The loader hands over
what it reads; when a parameter's last tensor has come, it is kept narrow as the checkpoint has it
(:mod:`tritonllm.models.formats.keeping`), widened where that cannot be, or made narrow (``quantization``).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from tritonllm.kernels import widen_weight
from tritonllm.kernels.dense.narrow import in_finer_groups
from tritonllm.kernels.dense.weight import NARROW
from tritonllm.layers.linear import Linear
from tritonllm.layers.moe import MoE
from tritonllm.layers.parameters import HoldsWeights
from tritonllm.models.decoder import Decoder
from tritonllm.models.formats.keeping import Arrival, assemble
from tritonllm.models.shards import Cut

Then = Callable[[str, HoldsWeights, str], None]


def products_of_layers(model: Decoder) -> Iterator[tuple[str, HoldsWeights, str]]:
    """The weights that can be narrow: those of the layers' products and experts, but for routers and gates of one row;
    each parameter's name in the model, its module, and its name there."""
    routers = {id(module.router) for module in model.modules() if isinstance(module, MoE)}
    for path, module in model.layers.named_modules(prefix="layers"):
        if isinstance(module, MoE):
            yield from ((f"{path}.{name}", module, name) for name in ("gate_up", "down"))
        elif isinstance(module, Linear) and id(module) not in routers and module.weight.shape[0] > 1:
            yield f"{path}.weight", module, "weight"


class DeferredWeights:
    """The weights of a model's products while their tensors come, of which some may have no memory yet.

    Args:
        model: the model; what of it was built inside :func:`~tritonllm.layers.parameters.deferred` gets its memory
            where the rest is.
        cuts: what this rank reads of each tensor.
        then: what is done with a weight that is complete and plain: its full name, its module, and its name there.
    """

    def __init__(self, model: Decoder, cuts: Mapping[str, list[Cut]], then: Then | None = None) -> None:
        self._model, self._then = model, then
        self.device = next(t.device for t in (*model.parameters(), *model.buffers()) if not t.is_meta)
        self._places = {
            model.stage.whole_name(f"{path}.{name}"): (module, name)
            for path, module in model.named_modules()
            if isinstance(module, HoldsWeights)
            for name in module.held_names
        }
        self._deferred = {name for name, (module, own) in self._places.items() if getattr(module, own).is_meta}
        self._of_layers = {model.stage.whole_name(name) for name, _, _ in products_of_layers(model)}
        self._left = Counter(cut.slot.parameter for parts in cuts.values() for cut in parts)
        self._arrived: dict[str, list[Arrival]] = {}

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._deferred

    def plain(self, parameter: str) -> torch.Tensor:
        """The parameter, to write 16 bits into."""
        module, name = self._places[parameter]
        if getattr(module, name).is_meta:
            module.hold(name, torch.empty_like(getattr(module, name), device=self.device))
        whole: torch.Tensor = getattr(module, name)
        return whole

    def take(self, parameter: str, arrivals: Iterable[Arrival]) -> None:
        """Keep narrow matrices until the parameter is complete."""
        self._arrived.setdefault(parameter, []).extend(arrivals)

    def count(self, parameter: str) -> None:
        """One of the parameter's tensors has come."""
        self._left[parameter] -= 1
        if self._left[parameter] or parameter not in self._places:
            return
        (module, name), arrivals = self._places[parameter], self._arrived.pop(parameter, [])
        empty = getattr(module, name)
        if arrivals and empty.is_meta and parameter in self._of_layers:
            weight = assemble(tuple(empty.shape), arrivals)
            if weight is not None:
                module.hold(name, weight)
                return
        for arrival in arrivals:
            arrival.write(self.plain(parameter))
        if self._then is not None:
            self._then(parameter, module, name)

    def finish(self) -> set[str]:
        """All tensors have come: experts whose two products would differ get the smaller groups of both, or are widened
        where their formats differ. Returns the narrow formats of what was kept."""
        for parameter in self._deferred:
            self.plain(parameter)  # one without tensors on this rank
        for experts in self._model.modules():
            if isinstance(experts, MoE):
                _make_alike(experts, ("gate_up", "down"))
        formats = {module.held(name).format for module, name in map(self._places.__getitem__, self._deferred)}
        return formats & NARROW.keys()


def _make_alike(module: MoE, names: Iterable[str]) -> None:
    """One format and groups for several weights."""
    weights = {name: module.held(name) for name in names}
    if len({(of.format, of.groups) for of in weights.values()}) == 1:
        return
    columns = min(of.groups.columns for of in weights.values())
    if columns and len({(of.format, of.groups.rows) for of in weights.values()}) == 1:
        for name, of in weights.items():
            if of.groups.columns > columns:
                module.hold(name, in_finer_groups(of, columns))
    else:
        _widen(module, names)


def _widen(module: MoE, names: Iterable[str]) -> None:
    for name in names:
        of = module.held(name)
        if of.format in NARROW:
            module.hold(name, torch.stack([widen_weight(one, module.dtype) for one in of.each()]))
