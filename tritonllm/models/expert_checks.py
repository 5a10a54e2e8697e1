"""Whether a model has the experts that the engine's options speak of, before anything is loaded."""

import zlib
from collections.abc import Iterable

from tritonllm.config.parallel import ParallelConfig
from tritonllm.dist.group import Group
from tritonllm.experts.placement import ExpertPlacement
from tritonllm.layers.moe import MoESpec
from tritonllm.models.fallback_decoder import FallbackSpec
from tritonllm.models.local_spec import by_expert, local_experts
from tritonllm.models.spec import ModelSpec

REMEDY = "make one of this model's own load: `tritonllm rebalance-experts`"


def check_counted(spec: ModelSpec | FallbackSpec) -> None:
    """Check that the tokens of a model's experts can be counted.

    Raises:
        ValueError: it has no experts whose tokens could be counted.
    """
    if isinstance(spec, FallbackSpec):
        raise ValueError(
            f"count_expert_load: {spec.architecture} runs through transformers, whose experts are not counted: leave "
            "it out"
        )
    if not spec.experts:
        raise ValueError(f"count_expert_load: {spec.architecture} has no experts: leave it out")


def check_shared(spec: ModelSpec | FallbackSpec, size: int) -> None:
    """Whether so many engines can share its experts (``data_parallel_size`` with ``enable_expert_parallel``).

    Raises:
        ValueError: it has none, or as :func:`~tritonllm.models.local_spec.local_experts`.
    """
    if isinstance(spec, ModelSpec):
        local_experts(spec, 0, size)
    elif size > 1:
        raise ValueError(
            f"data_parallel_size={size} with enable_expert_parallel: {spec.architecture} runs through transformers, "
            "whose experts cannot be shared: leave enable_expert_parallel out"
        )


def check_exchange(size: int, ranks: int, batch_invariant: bool) -> None:
    """What else may be asked of a model whose experts ``size`` engines share.

    Args:
        ranks: the ranks of each engine's tensor parallelism.
        batch_invariant: whether a token's bits shall not depend on the rest of its step.

    Raises:
        ValueError: the two cannot be together.
    """
    if size == 1:
        return
    name = f"data_parallel_size={size} with enable_expert_parallel"
    if ranks > 1:
        raise ValueError(f"{name}: engines that share experts have one rank each, not tensor_parallel_size={ranks}")
    if batch_invariant:
        raise ValueError(
            f"deterministic: sums over the engines of {name} are not batch invariant yet: leave deterministic out"
        )


def dealt_out(spec: ModelSpec, parallel: ParallelConfig) -> ModelSpec:
    """The model as the ranks share its experts.

    Raises:
        ValueError: as :func:`~tritonllm.models.local_spec.by_expert` and :func:`read_placement`.
    """
    if not parallel.enable_expert_parallel:
        return spec
    path, size = parallel.expert_placement, parallel.tensor_parallel_size
    return by_expert(spec, None if path is None else read_placement(path, spec, size))


def read_placement(path: str, spec: ModelSpec, size: int) -> ExpertPlacement:
    """A placement of this model's experts on so many ranks (``expert_placement``).

    Raises:
        ValueError: there is no such file, it is no placement, or it is one of another model or for other ranks; the
            message says what differs and what to do.
    """
    try:
        placement = ExpertPlacement.read(path)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"expert_placement: {path} cannot be read ({why}): name the file of a placement") from error
    except ValueError as error:
        raise ValueError(f"expert_placement: {error}; {REMEDY}") from error
    for what, theirs, ours in (
        ("the architecture", placement.architecture, spec.architecture),
        ("layers with experts", _listed(placement.layers), _listed(spec.experts)),
        ("experts of a layer", {placement.num_experts}, set(spec.experts.values())),
    ):
        if theirs != ours:
            raise ValueError(
                f"expert_placement: {path} is of another model ({what}: {_shown(theirs)}, this one has "
                f"{_shown(ours)}); {REMEDY}"
            )
    if placement.tensor_parallel_size != size:
        raise ValueError(
            f"expert_placement: {path} is for tensor_parallel_size={placement.tensor_parallel_size}, not {size}; "
            f"make one for that many ranks: `tritonllm rebalance-experts -tp {size}`"
        )
    return placement


def check_agreement(placement: str | None, spec: ModelSpec | FallbackSpec, group: Group) -> None:
    """All ranks call it. Else two that had read different files would compute some pairs twice, and others not at all.

    Raises:
        ValueError: the ranks have not read the same placement.
    """
    if placement is None:
        return
    assert isinstance(spec, ModelSpec)  # the others have no ranks
    slots = [layer.mlp.slots for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    sum_of_it = zlib.crc32(repr(slots).encode())
    least, most = group.least(sum_of_it), -group.least(-sum_of_it)
    if least != most:
        raise ValueError(
            f"expert_placement: the ranks have read different placements from {placement}: bring the same file to all"
        )


def _listed(layers: Iterable[int]) -> str:
    """``0, 1, 2`` as ``0 to 2``."""
    places = sorted(layers)
    if len(places) > 2 and places == list(range(places[0], places[-1] + 1)):
        return f"{places[0]} to {places[-1]}"
    return ", ".join(map(str, places)) or "none"


def _shown(value: str | set[int]) -> str:
    return value if isinstance(value, str) else ", ".join(map(str, sorted(value)))
