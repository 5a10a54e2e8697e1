"""The one place that decides what is fused: where a step adds to its residual stream, and where it normalises it.

A pre-norm layer adds a block's last product to the stream, normalises the stream, and multiplies that by the next
block's first weight. How many launches that takes depends on the number of rows:

- **few**: reading the weights bounds the products. A block's last product adds to the stream, and its first product
  normalises: a step is half as many kernels.
- **some hundred** (medium, on Hopper): a block's last product adds to the stream and begins the norm; the product that
  follows ends it (:mod:`tritonllm.kernels.dense.medium`).
- **many**: products are cuBLAS's. What a block computed is pending until the norm that follows adds it. What sums up
  the experts adds to the stream and computes the next norm itself. For products that round their rows, the norm leaves
  these rounded.

Other layers (norms after a block, parallel blocks) only add and normalise in one launch.

:class:`FusionPlanner` makes one :class:`FusionPlan` for each size of a step; :class:`~tritonllm.layers.residual.Stream`
does what it says. A kernel knows what it can take along and for which sizes that pays (``MAX_M`` of
:mod:`~tritonllm.kernels.dense.linear`, ``rows_that_begin_norms`` and ``begins_norms`` of
:mod:`~tritonllm.kernels.dense.medium`); it is asked here and nowhere else.

Tensor parallelism is a trait of a layer: a rank's part of a result is not added to the stream, so it is pending until
the block that follows sums it up and enters. Up to so many rows as the ranks' GPUs can write to each other's memory
faster than NCCL (:attr:`FusionLimits.summed`), that is one launch with the addition and the norm. Adapters
have their place here too: a trait, which :func:`plan_step` will turn into another way to add or to normalise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from tritonllm.kernels.dense.linear import MAX_M
from tritonllm.kernels.dense.medium import begins_norms, rows_that_begin_norms
from tritonllm.kernels.dense.portable.tiles import MAX_BLOCK_M
from tritonllm.kernels.dense.weight import PLAIN, Weight
from tritonllm.layers.metadata import AttentionMetadata

# Tokens times elements of the router up to which norm and logits are one launch: of Qwen3-30B-A3B 16 tokens (with the
# choice of experts 5.9 us, apart 9.6; one token 2.8 and 5.3).
MAX_ROUTED_AT_ONCE = 2**22


class NormBy(Enum):
    """What normalises a block's input."""

    ALONE = auto()  # a launch of its own
    ADDITION = auto()  # the launch that adds what is pending; without a norm, what is pending is only added
    SUM = auto()  # as ADDITION; where ranks have parts of what is pending, the same launch sums them up first
    PRODUCT = auto()  # the block's first product, or its router
    BEFORE = auto()  # what added to the stream before has begun the norm or computed it


class AddBy(Enum):
    """What adds a block's result to the stream."""

    LATER = auto()  # the launch in which the next block enters
    PRODUCT = auto()  # the block's last product
    PRODUCT_WITH_NORM = auto()  # the block's last product, which also begins or computes the norm that follows


@dataclass(frozen=True)
class LayerPlan:
    """Where one layer of a step normalises and adds."""

    attention_norm: NormBy
    attention_add: AddBy
    mlp_norm: NormBy
    mlp_add: AddBy
    rounds_to: torch.dtype | None = None  # of 8 bits: as what an addition leaves the norm


@dataclass(frozen=True)
class FusionPlan:
    """Where a whole step normalises and adds.

    Attributes:
        layers: a plan for each layer that runs.
        last_norm: how the norm behind the layers is computed.
    """

    layers: tuple[LayerPlan, ...]
    last_norm: NormBy


@dataclass(frozen=True)
class LayerTraits:
    """What of a layer decides its fusions.

    Attributes:
        sequential: two blocks, one after the other, each with a norm before it and none after it, which change the
            stream by adding to it alone.
        rms: whether its norms are RMS norms; the kernels of products know no others.
        parallel: whether both blocks read the layer's input.
        begins_norms: whether it pays that its products begin norms and end them.
        rounds_to: what its products round their rows to, if they do: the launch that does takes the norm along.
        router: how many elements the router's weight has; 0 if the MLP is dense.
        norms_router: whether the launch of the router can take the norm before it along: they are of one dtype.
        sums_last: whether nothing comes after the sum of the experts: there are experts, and no shared MLP.
        partial: whether its blocks compute a rank's part of a sum.
        settles: whether something comes behind the MLP that reads or changes the whole stream, so that nothing is
            pending where the layer ends; not ``sequential`` then.
    """

    sequential: bool
    rms: bool
    parallel: bool = False
    partial: bool = False
    begins_norms: bool = False
    rounds_to: torch.dtype | None = None
    router: int = 0
    norms_router: bool = True
    sums_last: bool = False
    settles: bool = False

    @classmethod
    def of_dense(
        cls, *, sequential: bool, rms: bool, parallel: bool, weights: Sequence[Weight], partial: bool = False
    ) -> "LayerTraits":
        """A layer whose products have these ``weights``, from the first to the last. Narrow ones begin no norms."""
        plain = all(weight.format == PLAIN for weight in weights)
        begins = sequential and rms and not partial and plain and all(begins_norms(weight.data) for weight in weights)
        rounds = {weight.data.dtype if weight.rounds_rows else None for weight in weights}
        rounds_to = rounds.pop() if len(rounds) == 1 and sequential and rms else None
        traits = cls(sequential=sequential, rms=rms, parallel=parallel, partial=partial)
        return replace(traits, begins_norms=begins, rounds_to=rounds_to)

    @classmethod
    def of_experts(
        cls,
        *,
        sequential: bool,
        rms: bool,
        parallel: bool,
        router: torch.Tensor,
        shared: bool,
        norms_router: bool = True,
        partial: bool = False,
    ) -> "LayerTraits":
        """A layer with experts, and perhaps a ``shared`` MLP."""
        return cls(
            sequential=sequential,
            rms=rms,
            parallel=parallel,
            router=router.numel(),
            norms_router=norms_router,
            sums_last=not shared,
            partial=partial,
        )


@dataclass(frozen=True)
class FusionLimits:
    """For how many rows a device fuses what.

    Attributes:
        few: most rows of which products normalise first and add to the stream; -1 for none, as on the CPU.
        rounded: the same where products round their rows.
        medium: rows of which products begin norms and end them.
        routed: most rows, times elements of the router, of which norm and router are one launch.
        summed: most rows of which the launch that sums up the ranks' parts adds and normalises; -1 for none.
    """

    few: int = -1
    rounded: int = -1
    medium: range = range(0)
    routed: int = MAX_ROUTED_AT_ONCE
    summed: int = -1

    @classmethod
    def of(cls, device: torch.device, summed: int = -1) -> "FusionLimits":
        if device.type == "cpu":
            return cls(summed=summed)
        return cls(MAX_M, MAX_BLOCK_M, rows_that_begin_norms(device), summed=summed)


def few_rows(x: torch.Tensor) -> bool:
    """A product with ``x[T, ...]`` is bound by reading the weights: our kernels compute it, with what is around it."""
    return not x.is_cpu and x.shape[0] <= MAX_M  # on a CPU nothing depends on the size: no guard of a compiler does


def decodes_at_once(metadata: AttentionMetadata) -> bool:
    """The step has only decodes, which share no keys: one operation goes from their projections to their attention."""
    return metadata.cascade is None and metadata.segments.only_decodes


def normalises_heads(kind: str, over: str, after_rope: bool = False) -> bool:
    """The launch that rotates queries and keys knows their norm: ``kind``, ``over`` and its place are the specs'."""
    return kind == "rms" and over != "all" and not after_rope


class _Handed(Enum):
    """What a layer leaves to the next one, or what begins a step."""

    STREAM = auto()  # nothing is pending
    ADDEND = auto()  # a result to be added
    BEGUN = auto()  # a norm to be ended
    NORMED = auto()  # the next block's input


def plan_step(
    layers: Sequence[LayerTraits], limits: FusionLimits, rows: int, wanted: int | None = None, *, given: bool = False
) -> FusionPlan:
    """Decide a step's fusions.

    Args:
        layers: the layers that run, in their order.
        rows: how many tokens the step has.
        wanted: how many tokens' results are wanted of the last layer, which computes only these behind its attention;
            ``None`` for all.
        given: whether the stream begins with the first block's input (:class:`~tritonllm.layers.residual.Stream`).
    """
    plans: list[LayerPlan] = []
    handed = _Handed.NORMED if given else _Handed.STREAM
    for place, layer in enumerate(layers):
        last = place == len(layers) - 1
        plan = _plan_layer(layer, limits, rows, wanted if last else None, handed, last)
        plans.append(plan)
        handed = _handed_on(layer, plan)
    if handed is not _Handed.ADDEND:
        return FusionPlan(tuple(plans), NormBy.ALONE)
    return FusionPlan(tuple(plans), _by_addition(layers[-1], limits, rows if wanted is None else wanted))


def _by_addition(layer: LayerTraits, limits: FusionLimits, rows: int) -> NormBy:
    """What adds what a layer left pending, and normalises."""
    return NormBy.SUM if layer.partial and layer.rms and rows <= limits.summed else NormBy.ADDITION


def _plan_layer(
    layer: LayerTraits, limits: FusionLimits, rows: int, wanted: int | None, handed: _Handed, last: bool
) -> LayerPlan:
    kept = rows if wanted is None else wanted
    if layer.partial:
        enter = _by_addition(layer, limits, rows) if handed is _Handed.ADDEND else NormBy.ALONE
        between = NormBy.ALONE if layer.parallel else _by_addition(layer, limits, kept)
        return LayerPlan(enter, AddBy.LATER, between, AddBy.LATER)
    # a product that begins a norm has the rows of the one that ends it; a norm that is computed need not be ended
    medium = layer.begins_norms and wanted is None and rows in limits.medium and handed is not _Handed.NORMED
    few = not medium and layer.sequential and kept <= (limits.few if layer.rounds_to is None else limits.rounded)
    by_product = NormBy.PRODUCT if layer.rms else NormBy.ALONE
    if handed is _Handed.ADDEND:
        enter = NormBy.ADDITION
    elif handed is _Handed.NORMED or (handed is _Handed.BEGUN and medium):
        enter = NormBy.BEFORE
    else:
        enter = by_product if medium or few or layer.rounds_to is not None else NormBy.ALONE
    if medium:
        add = AddBy.PRODUCT if last else AddBy.PRODUCT_WITH_NORM
        return LayerPlan(enter, AddBy.PRODUCT_WITH_NORM, NormBy.BEFORE, add)
    if few:
        routed = layer.norms_router and kept * layer.router <= limits.routed
        return LayerPlan(enter, AddBy.PRODUCT, by_product if routed else NormBy.ALONE, AddBy.PRODUCT)
    hands_on = layer.sums_last and layer.sequential and layer.rms and not last
    add = AddBy.PRODUCT_WITH_NORM if hands_on else AddBy.LATER
    between = NormBy.ALONE if layer.parallel else NormBy.ADDITION
    return LayerPlan(enter, AddBy.LATER, between, add, layer.rounds_to)


def _handed_on(layer: LayerTraits, plan: LayerPlan) -> _Handed:
    if layer.settles:
        return _Handed.STREAM
    if plan.mlp_add is AddBy.PRODUCT_WITH_NORM:
        return _Handed.NORMED if layer.router else _Handed.BEGUN
    return _Handed.ADDEND if plan.mlp_add is AddBy.LATER else _Handed.STREAM


class FusionPlanner:
    """The plans of a model: one for each size of a step, made when the first such step comes.

    Args:
        layers: the layers, from the first to the last.
        limits: ``None`` asks the device of the first step.
        summed: without limits, theirs (:attr:`FusionLimits.summed`).
        given: as in :func:`plan_step`.
    """

    def __init__(
        self,
        layers: Sequence[LayerTraits],
        limits: FusionLimits | None = None,
        summed: int = -1,
        *,
        given: bool = False,
    ) -> None:
        self.layers = tuple(layers)
        self._limits, self._summed, self.given = limits, summed, given
        self._partial = any(layer.partial for layer in layers)
        self._plans: dict[tuple[Sequence[int], int, int | None], FusionPlan] = {}

    def plan(self, running: Sequence[int], rows: int, wanted: int | None, device: torch.device) -> FusionPlan:
        """The plan of a step of so many ``rows``, of which so many are ``wanted``, through the layers at ``running``
        (hashable), on ``device``."""
        limits = self._limits = self._limits or FusionLimits.of(device, self._summed)
        # beyond its limits, a step's plan depends on its size no more: few plans are kept
        if self._partial:
            rows = _beyond(rows, limits.summed)
            wanted = None if wanted is None else _beyond(wanted, limits.summed)
        else:
            most = max(limits.few, limits.rounded)
            rows = min(rows, max(most + 1, limits.medium.stop))
            wanted = None if wanted is None else min(wanted, most + 1)
        key = running, rows, wanted
        plan = self._plans.get(key)
        if plan is None:
            layers = [self.layers[place] for place in running]
            plan = self._plans[key] = plan_step(layers, limits, rows, wanted, given=self.given)
        return plan


def _beyond(rows: int, limit: int) -> int:
    """The number of rows that stands for all up to the limit, or for all beyond it."""
    return 0 if rows <= limit else limit + 1
