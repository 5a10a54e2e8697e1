"""Which launch adds and which one normalises, at the sizes where that changes."""

import dataclasses

import pytest
import torch
from support.chips import chosen_for

from tritonllm.kernels import Weight
from tritonllm.layers.fusion import (
    AddBy,
    FusionLimits,
    FusionPlanner,
    LayerPlan,
    LayerTraits,
    NormBy,
    decodes_at_once,
    few_rows,
    normalises_heads,
    plan_step,
)
from tritonllm.layers.metadata import AttentionMetadata
from tritonllm.layers.segments import Segment, Segments, decodes

CPU, META = torch.device("cpu"), torch.device("meta")
ALONE, ADDITION, PRODUCT, BEFORE = NormBy.ALONE, NormBy.ADDITION, NormBy.PRODUCT, NormBy.BEFORE
LATER, ADDS, ADDS_AND_NORMALISES = AddBy.LATER, AddBy.PRODUCT, AddBy.PRODUCT_WITH_NORM
HOPPER = FusionLimits(few=64, rounded=256, medium=range(65, 257))
OTHERS = FusionLimits(few=64, rounded=256)

DENSE = LayerTraits(sequential=True, rms=True, begins_norms=True)
LARGE = LayerTraits(sequential=True, rms=True)
ROUNDED = LayerTraits(sequential=True, rms=True, rounds_to=torch.int8)
EXPERTS = LayerTraits(sequential=True, rms=True, router=2**18, sums_last=True)
SHARED = LayerTraits(sequential=True, rms=True, router=2**18)
LAYER_NORM = LayerTraits(sequential=True, rms=False)
SANDWICH = LayerTraits(sequential=False, rms=True)
PARALLEL = LayerTraits(sequential=False, rms=False, parallel=True)


def plan(layers, rows, wanted=None, limits=HOPPER):
    """The layers' plans as tuples, and the last norm's."""
    found = plan_step(layers, limits, rows, wanted)
    return *((p.attention_norm, p.attention_add, p.mlp_norm, p.mlp_add) for p in found.layers), found.last_norm


FEW = PRODUCT, ADDS, PRODUCT, ADDS
MANY = ADDITION, LATER, ADDITION, LATER
FIRST_OF_MANY = ALONE, LATER, ADDITION, LATER


@pytest.mark.parametrize("layer", [DENSE, LARGE])
@pytest.mark.parametrize("rows", [0, 1, 64])
def test_few_rows_normalise_and_add_in_their_products(layer, rows):
    assert plan([layer] * 2, rows) == (FEW, FEW, ALONE)


@pytest.mark.parametrize(("rows", "layers"), [(1, FEW), (65, FEW), (256, FEW), (257, MANY)])
def test_products_that_round_their_rows_take_norms_along_for_more(rows, layers):
    """And beyond, the norm leaves these rounded."""
    assert plan([ROUNDED] * 2, rows)[1:] == (layers, ALONE if layers == FEW else ADDITION)
    assert {layer.rounds_to for layer in plan_step([ROUNDED] * 2, HOPPER, 257).layers} == {torch.int8}


@pytest.mark.parametrize(("rows", "rest"), [(1, FEW[1:]), (64, FEW[1:]), (65, MANY[1:]), (1000, MANY[1:])])
def test_a_stream_that_begins_with_the_first_blocks_input(rows, rest):
    """Nothing normalises it again, and no product ends a norm that none has begun."""
    found = plan_step([DENSE], HOPPER, rows, given=True).layers[0]
    assert (found.attention_norm, found.attention_add, found.mlp_norm, found.mlp_add) == (BEFORE, *rest)
    planner = FusionPlanner([DENSE], HOPPER, given=True)
    assert planner.plan(range(1), rows, None, CPU).layers == (found,)


@pytest.mark.parametrize("rows", [65, 256])
def test_some_hundred_rows_begin_norms(rows):
    begins = BEFORE, ADDS_AND_NORMALISES, BEFORE, ADDS_AND_NORMALISES
    first, last = (PRODUCT, *begins[1:]), (*begins[:3], ADDS)
    assert plan([DENSE] * 3, rows) == (first, begins, last, ALONE)
    assert plan([DENSE] * 2, rows, limits=OTHERS) == (FIRST_OF_MANY, MANY, ADDITION)
    assert plan([LARGE] * 2, rows) == (FIRST_OF_MANY, MANY, ADDITION)


@pytest.mark.parametrize("limits", [HOPPER, OTHERS])
@pytest.mark.parametrize("rows", [257, 8192])
def test_many_rows_add_in_the_norm(rows, limits):
    assert plan([DENSE] * 3, rows, limits=limits) == (FIRST_OF_MANY, MANY, MANY, ADDITION)


@pytest.mark.parametrize("layer", [DENSE, LARGE, EXPERTS, SHARED, LAYER_NORM, SANDWICH])
@pytest.mark.parametrize("rows", [1, 100])
def test_the_cpu_fuses_only_sum_and_norm(layer, rows):
    first, last, end = plan([layer] * 2, rows, 1, FusionLimits.of(CPU))
    handed_on = layer.sums_last
    assert first == (*FIRST_OF_MANY[:3], ADDS_AND_NORMALISES if handed_on else LATER)
    assert last == (BEFORE if handed_on else ADDITION, *MANY[1:]) and end is ADDITION


@pytest.mark.parametrize(
    ("rows", "wanted", "last"),
    [
        (300, 64, (ADDITION, ADDS, PRODUCT, ADDS)),  # what the layer before left is added first
        (300, 65, MANY),
        (300, 0, (ADDITION, ADDS, PRODUCT, ADDS)),
        (128, 64, FEW),  # the norm that the layer before has begun is of all rows: it begins anew
        (128, 65, FIRST_OF_MANY),
        (128, 128, FIRST_OF_MANY),
        (64, 1, FEW),
    ],
)
def test_wanted_rows(rows, wanted, last):
    plans = plan([DENSE] * 3, rows, wanted)
    assert plans[:2] == plan([DENSE] * 3, rows)[:2]
    assert plans[2:] == (last, ADDITION if last[3] is LATER else ALONE)


@pytest.mark.parametrize(("rows", "at_once"), [(1, True), (16, True), (17, False), (64, False)])
@pytest.mark.parametrize("layer", [EXPERTS, SHARED])
def test_the_router_normalises_few_rows(layer, rows, at_once):
    each = PRODUCT, ADDS, PRODUCT if at_once else ALONE, ADDS
    assert plan([layer] * 2, rows) == (each, each, ALONE)
    assert plan([layer], 300, wanted=rows) == ((PRODUCT, *each[1:]), ALONE)


def test_a_router_of_another_dtype_takes_no_norm_along():
    exact = dataclasses.replace(SHARED, norms_router=False)
    each = PRODUCT, ADDS, ALONE, ADDS
    assert plan([exact] * 2, 1) == (each, each, ALONE)


@pytest.mark.parametrize("rows", [65, 300])
def test_the_sum_of_experts_normalises_many_rows(rows):
    """For the next layer, whatever that is; not before the last norm, and not before a shared MLP is added."""
    hands_on = LATER, ADDITION, ADDS_AND_NORMALISES
    assert plan([EXPERTS] * 3, rows) == ((ALONE, *hands_on), (BEFORE, *hands_on), (BEFORE, *MANY[1:]), ADDITION)
    assert plan([EXPERTS, DENSE], rows) == ((ALONE, *hands_on), (BEFORE, *MANY[1:]), ADDITION)
    assert plan([EXPERTS, DENSE], rows, 3) == ((ALONE, *hands_on), (BEFORE, *FEW[1:]), ALONE)
    assert plan([SHARED] * 2, rows) == (FIRST_OF_MANY, MANY, ADDITION)


@pytest.mark.parametrize("layer", [DENSE, LARGE, EXPERTS, SHARED, LAYER_NORM])
@pytest.mark.parametrize("rows", [1, 64, 128, 5000])
def test_a_part_of_a_sum_is_pending(layer, rows):
    """Whatever the size: nothing but the launch behind the sum over the ranks may add it."""
    partial = dataclasses.replace(layer, partial=True)
    assert plan([partial] * 2, rows, wanted=1) == (FIRST_OF_MANY, MANY, ADDITION)


def test_a_sum_over_ranks_takes_the_norm_along():
    """Up to so many rows as the ranks send each other; of the last layer's, only the wanted ones are left."""
    limits, summed = FusionLimits(summed=16), NormBy.SUM
    partial, of_layer_norms = (dataclasses.replace(layer, partial=True) for layer in (LARGE, LAYER_NORM))
    first = ALONE, LATER, summed, LATER
    assert plan([partial] * 2, 16, limits=limits) == (first, (summed, LATER, summed, LATER), summed)
    assert plan([partial] * 2, 17, limits=limits) == (FIRST_OF_MANY, MANY, ADDITION)
    assert plan([partial] * 2, 17, 16, limits=limits) == (FIRST_OF_MANY, (ADDITION, LATER, summed, LATER), summed)
    assert plan([of_layer_norms] * 2, 16, limits=limits) == (FIRST_OF_MANY, MANY, ADDITION)


def test_sizes_up_to_the_limit_have_one_plan():
    planner = FusionPlanner([dataclasses.replace(LARGE, partial=True)] * 2, FusionLimits(summed=16))
    found = [planner.plan(range(2), rows, wanted, CPU) for rows, wanted in ((1, None), (16, None), (17, 1), (99, 16))]
    assert found[0] is found[1] and found[2] is found[3]
    assert [(p.layers[1].attention_norm, p.last_norm) for p in found[1:3]] == [
        (NormBy.SUM, NormBy.SUM),
        (ADDITION, NormBy.SUM),
    ]


def test_ranks_that_leave_sums_to_others_fuse_none():
    planner = FusionPlanner([dataclasses.replace(LARGE, partial=True)] * 2, summed=-1)
    assert planner.plan(range(2), 0, None, CPU).last_norm is planner.plan(range(2), 1, None, CPU).last_norm is ADDITION


def test_parallel_parts_are_pending_together():
    partial = dataclasses.replace(PARALLEL, partial=True)
    assert plan([partial] * 2, 3) == ((ALONE, LATER, ALONE, LATER), (ADDITION, LATER, ALONE, LATER), ADDITION)


def test_layers_that_differ():
    """A norm that was begun is computed again by a layer that cannot end it."""
    begins = PRODUCT, ADDS_AND_NORMALISES, BEFORE, ADDS_AND_NORMALISES
    assert plan([DENSE, LARGE, DENSE], 128) == (begins, FIRST_OF_MANY, (ADDITION, *begins[1:3], ADDS), ALONE)
    assert plan([DENSE, EXPERTS], 128) == (begins, FIRST_OF_MANY, ADDITION)


def test_layer_norms_are_launches_of_their_own():
    each = ALONE, ADDS, ALONE, ADDS
    assert plan([LAYER_NORM] * 2, 64) == (each, each, ALONE)
    assert plan([LAYER_NORM] * 2, 65) == (FIRST_OF_MANY, MANY, ADDITION)


@pytest.mark.parametrize("rows", [1, 64, 128, 300])
def test_other_layers_fuse_nothing_else(rows):
    assert plan([SANDWICH] * 2, rows) == (FIRST_OF_MANY, MANY, ADDITION)
    assert plan([PARALLEL] * 2, rows, 1) == ((ALONE, LATER, ALONE, LATER), (ADDITION, LATER, ALONE, LATER), ADDITION)


@pytest.mark.parametrize("partial", [False, True])
def test_nothing_is_pending_behind_layers_that_settle(partial):
    """Within a layer it is as in others."""
    layer = dataclasses.replace(SANDWICH, settles=True, partial=partial)
    assert plan([layer] * 2, 8) == (FIRST_OF_MANY, FIRST_OF_MANY, ALONE)


def test_traits():
    """What kernels say of the weights counts for layers that could use it."""
    fit, wide = torch.empty(1024, 64, dtype=torch.bfloat16), torch.empty(2**17 + 8, 64, dtype=torch.bfloat16)
    common = {"sequential": True, "rms": True, "parallel": False}
    assert LayerTraits.of_dense(**common, weights=[Weight(fit)] * 2) == DENSE
    assert LayerTraits.of_dense(**common, weights=[Weight(fit), Weight(wide)]) == LARGE
    assert LayerTraits.of_dense(**common, weights=[Weight(fit), Weight(fit.half())]) == LARGE
    assert LayerTraits.of_dense(**common, weights=[Weight(fit), Weight(fit, torch.ones(1024, 1), "fp8")]) == LARGE
    assert not LayerTraits.of_dense(**{**common, "rms": False}, weights=[Weight(fit)]).begins_norms
    assert not LayerTraits.of_dense(**{**common, "sequential": False}, weights=[Weight(fit)]).begins_norms
    router = torch.empty(128, 2048)
    assert LayerTraits.of_experts(**common, router=router, shared=False) == EXPERTS
    assert LayerTraits.of_experts(**common, router=router, shared=True) == SHARED
    assert not LayerTraits.of_experts(**common, router=router, shared=True, norms_router=False).norms_router


@pytest.mark.parametrize("hopper", [True, False])
def test_limits(hopper):
    with chosen_for(90 if hopper else 80):
        assert FusionLimits.of(META) == (HOPPER if hopper else OTHERS)
    assert FusionLimits.of(CPU) == FusionLimits()


def test_one_plan_for_each_size():
    """And only one for all sizes beyond the limits."""
    planner = FusionPlanner([DENSE] * 3, HOPPER)
    sizes = [
        (rows, wanted) for rows in range(1, 3000) for wanted in (None, 1, 100, rows) if not wanted or wanted <= rows
    ]
    plans = {size: planner.plan(range(3), *size, CPU) for size in sizes}
    for (rows, wanted), found in plans.items():
        assert found == plan_step([DENSE] * 3, HOPPER, rows, wanted)
    assert len({id(found) for found in plans.values()}) < 1000
    assert planner.plan(range(3), 5000, None, CPU) is planner.plan(range(3), 8192, None, CPU)
    rehearsal = planner.plan((0, 1, 1), 128, None, CPU)
    assert rehearsal.layers == plans[128, None].layers


def test_the_device_of_the_first_step_decides():
    planner = FusionPlanner([DENSE])
    assert planner.plan(range(1), 3, None, CPU).layers == (LayerPlan(*FIRST_OF_MANY),)


def test_few_rows():
    """A matter of the shape alone, so that a captured graph always takes the same path. Nothing is fused on the CPU."""
    assert not few_rows(torch.empty(1, 6))
    assert few_rows(torch.empty(64, 6, device="meta")) and not few_rows(torch.empty(65, 6, device="meta"))


def test_attention():
    empty = torch.empty(0)
    step = AttentionMetadata(Segments(decodes(3)), empty, empty, empty, empty)
    shared = AttentionMetadata(Segments(decodes(3)), empty, empty, empty, empty, cascade=object())
    mixed = AttentionMetadata(Segments(decodes(3), chunk=Segment(1, 2, 2)), empty, empty, empty, empty)
    assert decodes_at_once(step)
    assert not decodes_at_once(mixed) and not decodes_at_once(shared)
    assert normalises_heads("rms", "head") and normalises_heads("rms", "heads")
    assert not normalises_heads("rms", "head", after_rope=True)
    assert not normalises_heads("rms", "all") and not normalises_heads("layer", "heads")
