"""The shard spec: the ranks' parts together are the whole, whatever the sizes."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.tiny_configs import tiny_config

from tritonllm.dist.group import share_of
from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.rebalance import rebalance
from tritonllm.layers.moe import MoESpec
from tritonllm.models.families import spec_from_config, weight_map
from tritonllm.models.local_spec import by_expert, local_experts, local_spec
from tritonllm.models.shards import Once, Section, Split, cuts, expert_splits, local_shape, splits
from tritonllm.models.slots import parameter_shape

sizes = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(units=st.integers(1, 48), unit=st.integers(1, 5), size=sizes)
def test_even_sections(units, unit, size):
    """Each element is somewhere, on equally many ranks."""
    assume(units % size == 0 or size % units == 0)
    held = [Section(units, unit).of(rank, size) for rank in range(size)]
    counts = torch.zeros(units * unit, dtype=torch.int64)
    for mine in held:
        counts[mine.start : mine.stop] += 1
    assert counts.unique().tolist() == [max(1, size // units)]
    assert len({len(mine) for mine in held}) == 1


@given(units=st.integers(1, 48), unit=st.integers(1, 5), size=sizes)
def test_even_sections_are_dealt_out_in_order(units, unit, size):
    """Rank 0 has the first; of fewer units than ranks, as many neighbours have each."""
    assume(units % size == 0 or size % units == 0)
    for rank in range(size):
        first, count = rank * units // size, max(1, units // size)
        assert Section(units, unit).of(rank, size) == range(first * unit, (first + count) * unit)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "held"),
    [
        (8, 4, 2, [([0, 1, 2, 3], [0, 1]), ([4, 5, 6, 7], [2, 3])]),
        (8, 4, 4, [([0, 1], [0]), ([2, 3], [1]), ([4, 5], [2]), ([6, 7], [3])]),
        (8, 2, 4, [([0, 1], [0]), ([2, 3], [0]), ([4, 5], [1]), ([6, 7], [1])]),
        (4, 1, 4, [([0], [0]), ([1], [0]), ([2], [0]), ([3], [0])]),
    ],
)
def test_which_rank_has_which_heads(heads, kv_heads, size, held):
    """Each query head with its key head, whose keys and values stand behind all of the rank's queries; and the
    projection back from the same heads."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 16}
    spec = spec_of("llama", **changes)
    head_size, parts = spec.layers[0].attention.head_size, splits(spec)
    stacked, back = parts["layers.0.attention.qkv.weight"], parts["layers.0.attention.o.weight"]

    def elements(first, numbers):
        return [(first + number) * head_size + i for number in numbers for i in range(head_size)]

    for rank, (queries, keys) in enumerate(held):
        rows = [element for mine in stacked.held(rank, size) for element in mine]
        wanted = elements(0, queries) + elements(heads, keys) + elements(heads + kv_heads, keys)
        assert rows == wanted
        assert [element for mine in back.held(rank, size) for element in mine] == elements(0, queries)
        assert {query * kv_heads // heads for query in queries} == set(keys)


@given(rows=st.integers(1, 400), size=sizes)
def test_vocabulary(rows, size):
    """Each row is on one rank, in order, and the first ranks have what a gather expects of all."""
    held = [Section(rows, uneven=True).of(rank, size) for rank in range(size)]
    assert [row for mine in held for row in mine] == list(range(rows))
    each = share_of(rows, size)
    assert each % 8 == 0 and each * size >= rows
    assert all(len(mine) == min(each, max(0, rows - rank * each)) for rank, mine in enumerate(held))


MIXTURES = ["mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoeshared", "dbrx"]


def of_count(family: str, count: int) -> dict[str, Any]:
    """What a configuration says of so many experts."""
    if family == "dbrx":
        return {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": count, "moe_top_k": 3}}
    others = {"glm4_moe": "n_routed_experts", "ernie4_5_moe": "moe_num_experts"}
    local = family in ("mixtral", "gpt_oss", "granitemoeshared")
    return {"num_local_experts" if local else others.get(family, "num_experts"): count}


@given(
    family=st.sampled_from(MIXTURES),
    each=st.integers(1, 3),
    size=st.sampled_from([2, 4]),
)
def test_parts_of_whole_experts(family, each, size):
    """Also of experts that are one tensor, transposed, whose gate and up alternate, with biases, or that lie one below
    the other."""
    count = 4 * each * size  # one family has four groups of them
    whole = spec_of(family, **of_count(family, count), num_attention_heads=4, num_key_value_heads=2)
    spec = by_expert(whole)
    check_parts(spec, size)
    held = [[mlp.held for mlp in mixtures(local_spec(spec, rank, size))] for rank in range(size)]
    for of_layer in zip(*held, strict=True):
        assert [expert for mine in of_layer for expert in mine] == list(range(count))


@given(
    family=st.sampled_from(["mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "ernie4_5_moe", "dbrx"]),
    size=st.sampled_from([2, 4]),
    redundant=st.sampled_from([0, 4, 8]),
    load=st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_parts_of_placed_experts(family, size, redundant, load):
    """Some of them on several ranks, and no layer as the next one."""
    whole = spec_of(family, **of_count(family, 8), num_attention_heads=4, num_key_value_heads=2)
    loads = {place: (*load[place:], *load[:place]) for place in whole.experts}
    spec = by_expert(whole, rebalance(ExpertLoad(whole.architecture, loads), size, redundant))
    check_parts(spec, size)
    assert spec.distinct_layers() == whole.distinct_layers()
    for mlp in mixtures(local_spec(spec, size - 1, size)):
        assert (mlp.num_slots, mlp.held) == (8 + redundant, range((8 + redundant) // size * (size - 1), 8 + redundant))


@given(
    family=st.sampled_from(MIXTURES),
    each=st.integers(1, 3),
    size=st.sampled_from([2, 3, 4]),
)
def test_parts_of_shared_experts(family, each, size):
    """Each expert is on one rank, and all else on all of them."""
    spec = spec_of(family, **of_count(family, 4 * each * size))
    shards, of_experts = expert_splits(spec), {"gate_up", "gate_up_bias", "down", "down_bias"}
    assert shards.keys() == {f"layers.{place}.mlp.{name}" for place in spec.experts for name in of_experts}
    check_parts(spec, size, shards)
    ranks = [local_experts(spec, rank, size) for rank in range(size)]
    for place, layer in enumerate(spec.layers):
        mine = [rank.layers[place] for rank in ranks]
        if isinstance(layer.mlp, MoESpec):
            assert [expert for one in mine for expert in one.mlp.held] == list(range(layer.mlp.num_experts))
            own = {"held": None, "exchanged": False}
            mine = [dataclasses.replace(one, mlp=dataclasses.replace(one.mlp, **own)) for one in mine]
        assert mine == [layer] * size


def mixtures(spec):
    return [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]


def spec_of(family: str, **changes):
    return spec_from_config(tiny_config(family, **changes))


def check_parts(spec, size: int, shards: dict[str, Split | Once] | None = None) -> None:
    """Write random checkpoint tensors into whole parameters and into the ranks' parts, and compare."""
    slots, shards = weight_map(spec), splits(spec) if shards is None else shards
    generator = torch.Generator().manual_seed(0)
    by_parameter = {}
    for slot in slots.values():
        by_parameter.setdefault(slot.parameter, []).append(slot)
    for parameter, spellings in by_parameter.items():
        split, shape = shards.get(parameter), parameter_shape(spellings)
        for slot in spellings:
            tensor = torch.randn(slot.shape, generator=generator)
            whole = torch.full(shape, float("nan"))
            slot.write(whole, tensor)
            for rank in range(size):
                mine = torch.full(local_shape(shape, split, rank, size), float("nan"))
                for cut in cuts(slot, split, rank, size):
                    cut.slot.write(mine, cut.of(tensor))
                if isinstance(split, Split):
                    pieces = [whole.narrow(split.axis, r.start, len(r)) for r in split.held(rank, size)]
                    expected = torch.cat(pieces, split.axis)
                else:
                    expected = whole if not isinstance(split, Once) or rank == 0 else torch.full(shape, float("nan"))
                assert torch.equal(mine.isnan(), expected.isnan())
                assert torch.equal(mine.nan_to_num(), expected.nan_to_num())


@given(
    family=st.sampled_from(
        ["llama", "qwen2_moe", "phi3", "gpt_neox", "bloom", "olmo2", "cohere", "gpt_oss", "internlm2"]
    ),
    kv_heads=st.sampled_from([1, 2, 4]),
    group=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([2, 4, 8]),
)
def test_parts_of_any_heads(family, kv_heads, group, size):
    """Also projections that keep query, key and value of a head together, norms of all heads, and experts whose gate
    and up alternate."""
    heads = kv_heads * group * (8 if group % 2 else 4)
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 16}
    spec = spec_of(family, **changes, intermediate_size=48)
    check_parts(spec, size)
    assert local_spec(spec, 0, size).caches[0].heads == max(1, spec.caches[0].heads // size)
