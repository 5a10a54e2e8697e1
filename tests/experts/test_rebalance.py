"""The rebalancer and what it stands on: plain data, no engine."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.placement import ExpertPlacement, rank_loads, taken_slots
from tritonllm.experts.rebalance import balance_of, in_order, overall, place_layer, rebalance, report

counts = st.one_of(st.integers(0, 3), st.integers(0, 1000), st.integers(0, 10**30))


@st.composite
def layers(draw):
    """A layer's loads, a number of ranks and of redundant experts that fit each other."""
    load = draw(st.lists(counts, min_size=1, max_size=24))
    ranks = draw(st.integers(1, 8))
    redundant = -len(load) % ranks + ranks * draw(st.integers(0, 6))
    return load, ranks, redundant


@given(layers())
def test_any_layer(layer):
    """Each expert has a slot, ranks have equally many, and none has more load than the most loaded one without."""
    load, ranks, redundant = layer
    slots = place_layer(load, ranks, redundant)
    assert len(slots) == len(load) + redundant and set(slots) == set(range(len(load)))
    loads = rank_loads(slots, load, ranks)
    assert len(loads) == ranks and sum(loads) == sum(load)
    plain = in_order(len(load), ranks)
    if plain is not None:
        assert max(loads) <= max(rank_loads(plain, load, ranks))
    assert place_layer(load, ranks, redundant) == slots


@given(layers())
def test_no_expert_is_twice_on_a_rank_if_that_can_be_avoided(layer):
    """But where the experts in their order are better."""
    load, ranks, redundant = layer
    slots = place_layer(load, ranks, redundant)
    each = len(slots) // ranks
    of_ranks = [slots[begin : begin + each] for begin in range(0, len(slots), each)]
    avoidable = redundant <= len(load) * (ranks - 1)
    assert (
        not avoidable
        or slots == in_order(len(load), ranks, redundant)
        or all(len(set(own)) == each for own in of_ranks)
    )


@given(layers(), st.integers(1, 70))
def test_tokens_take_every_copy_in_turns(layer, turns):
    load, ranks, redundant = layer
    slots = place_layer(load, ranks, redundant)
    taken = taken_slots(slots, len(load), turns)
    assert len(taken) == turns
    for expert in range(len(load)):
        column = [row[expert] for row in taken]
        assert all(slots[slot] == expert for slot in column)
        uses = [column.count(slot) for slot, other in enumerate(slots) if other == expert]
        assert max(uses) - min(uses) <= 1


@pytest.mark.parametrize(
    ("load", "ranks", "redundant", "most"),
    [
        ([8, 0, 0, 0], 2, 0, 8),  # one expert has everything
        ([8, 0, 0, 0], 2, 2, 4),
        ([8, 8, 0, 0], 2, 0, 8),
        ([5, 4, 3, 3], 2, 0, 8),
        ([90, 10, 10, 10, 10, 10, 10, 10], 4, 4, Fraction(45)),
        ([3, 3, 0, 2, 2, 2], 2, 0, 6),  # the largest first would give 7
        ([7], 1, 0, 7),
        ([7], 3, 2, Fraction(7, 3)),
        ([0, 0], 2, 4, 0),
    ],
)
def test_the_largest_load(load, ranks, redundant, most):
    assert max(rank_loads(place_layer(load, ranks, redundant), load, ranks)) <= most


def test_the_most_loaded_expert_gets_the_copies():
    slots = place_layer([100, 1, 1, 30], 4, 4)
    assert [slots.count(expert) for expert in range(4)] == [4, 1, 1, 2]  # no more than ranks


def test_two_experts_change_places():
    """The largest first alone leaves 7 and 5, as do the experts in their order."""
    load = [3, 2, 0, 3, 2, 2]
    assert max(rank_loads(place_layer(load, 2, 0), load, 2)) == 6


LOAD = ExpertLoad("SomeMoE", {1: (8, 0, 4, 4), 3: (1, 1, 1, 1)})


def test_whole_models(tmp_path):
    placement = rebalance(LOAD, 2, 2)
    assert (placement.num_slots, placement.num_redundant_experts, list(placement.layers)) == (6, 2, [1, 3])
    placement.save(tmp_path / "placement.json")
    assert ExpertPlacement.read(tmp_path / "placement.json") == placement
    told = report(LOAD, placement)
    assert [(line.layer, line.before.most, line.after.most) for line in told] == [(1, 8, 8), (3, 2, 2)]
    assert overall([line.after for line in told]) == 1.0
    LOAD.save(tmp_path / "load.json")
    assert ExpertLoad.read(tmp_path / "load.json") == LOAD
    assert (LOAD + LOAD).layers == {1: (16, 0, 8, 8), 3: (2, 2, 2, 2)}
    with pytest.raises(ValueError, match="different models cannot be added up"):
        LOAD + ExpertLoad("SomeMoE", {1: (8, 0, 4, 4)})


def test_balancedness():
    assert balance_of((0, 1, 2, 3), (6, 2, 1, 3), 2).balancedness == 0.75
    assert balance_of((0, 1), (0, 0), 2).balancedness == 1.0
    unequal = report(ExpertLoad("M", {0: (1, 1, 1)}), rebalance(ExpertLoad("M", {0: (1, 1, 1)}), 2, 1))
    assert unequal[0].before is None  # three experts on two ranks


@pytest.mark.parametrize(
    ("load", "ranks", "redundant", "message"),
    [
        (LOAD, 3, 0, "num_redundant_experts=0: with 4 experts that is 4 slots.*=3 must divide; take 2, 5 or 8, say"),
        (LOAD, 0, 0, "tensor_parallel_size must be at least 1"),
        (LOAD, 2, -2, "num_redundant_experts at least 0"),
        (ExpertLoad("M", {0: (1, 2), 1: (1, 2, 3)}), 1, 0, r"layers must have equally many experts, got \[2, 3\]"),
    ],
)
def test_what_cannot_be_placed(load, ranks, redundant, message):
    with pytest.raises(ValueError, match=message):
        rebalance(load, ranks, redundant)


GOOD = rebalance(LOAD, 2, 2).as_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": {"1": [0, 1, 2, 3, 0]}}, "5 slots cannot be dealt out evenly to tensor_parallel_size=2"),
        ({"layers": {"1": [0, 1, 2, 0]}}, "layer 1 has no slot for expert 3"),
        ({"layers": {"1": [0, 1, 2, 3, 4, 0]}}, "layer 1 has a slot for expert 4: there are 4, from 0"),
        ({"layers": {"1": [0, 1, 2, 3], "3": [0, 1, 2, 3, 0, 1]}}, "layer 3 has 6 slots, and another layer 4"),
        ({"layers": {}}, "there are no layers"),
        ({"layers": {"one": [0]}}, "layers must be named by their numbers, got 'one'"),
        ({"layers": {"1": [0.5]}}, "layer 1 must be a list of integers of at least 0"),
        ({"num_experts": None}, "this is no placement"),
        ({"architecture": 3}, "this is no placement"),
    ],
)
def test_bad_placements(tmp_path, changes, message):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(ValueError, match=f"{path}: .*{message}"):
        ExpertPlacement.read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is no JSON file"),
        ("[]", "it must hold a JSON object, got list"),
        ("{}", "there must be an architecture and layers"),
        ('{"architecture": "M", "layers": {"x": [1]}}', "layers must be named by their numbers"),
        ('{"architecture": "M", "layers": {"0": [1, -1]}}', "layer 0 must be a list of integers of at least 0"),
    ],
)
def test_bad_loads(tmp_path, text, message):
    path = tmp_path / "load.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        ExpertLoad.read(path)
