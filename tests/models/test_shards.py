"""The shard spec: the ranks' parts together are the whole, whatever the sizes, and what does not divide is refused."""

import dataclasses

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
from tritonllm.models.shards import (
    Once,
    Section,
    Split,
    by_expert,
    check_context,
    cuts,
    expert_splits,
    local_experts,
    local_shape,
    local_spec,
    splits,
)
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


@given(rows=st.integers(1, 400), size=sizes)
def test_vocabulary(rows, size):
    """Each row is on one rank, in order, and the first ranks have what a gather expects of all."""
    held = [Section(rows, uneven=True).of(rank, size) for rank in range(size)]
    assert [row for mine in held for row in mine] == list(range(rows))
    each = share_of(rows, size)
    assert each % 8 == 0 and each * size >= rows
    assert all(len(mine) == min(each, max(0, rows - rank * each)) for rank, mine in enumerate(held))


@given(
    family=st.sampled_from(["mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "ernie4_5_moe", "hunyuan_v1_moe"]),
    each=st.integers(1, 3),
    size=st.sampled_from([2, 4]),
)
def test_parts_of_whole_experts(family, each, size):
    """Also of experts that are one tensor, transposed, whose gate and up alternate, with biases."""
    names = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "glm4_moe": "n_routed_experts"}
    count = names.get(family, "moe_num_experts" if family == "ernie4_5_moe" else "num_experts")
    changes = {count: 4 * each * size}  # one family has four groups of them
    whole = spec_of(family, **changes, num_attention_heads=4, num_key_value_heads=2)
    spec = by_expert(whole)
    check_parts(spec, size)
    held = [[mlp.held for mlp in mixtures(local_spec(spec, rank, size))] for rank in range(size)]
    for of_layer in zip(*held, strict=True):
        assert [expert for mine in of_layer for expert in mine] == list(range(changes[count]))


@given(
    family=st.sampled_from(["mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "ernie4_5_moe"]),
    size=st.sampled_from([2, 4]),
    redundant=st.sampled_from([0, 4, 8]),
    load=st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_parts_of_placed_experts(family, size, redundant, load):
    """Some of them on several ranks, and no layer as the next one."""
    names = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "glm4_moe": "n_routed_experts"}
    count = names.get(family, "moe_num_experts" if family == "ernie4_5_moe" else "num_experts")
    whole = spec_of(family, **{count: 8}, num_attention_heads=4, num_key_value_heads=2)
    loads = {place: (*load[place:], *load[:place]) for place in whole.experts}
    spec = by_expert(whole, rebalance(ExpertLoad(whole.architecture, loads), size, redundant))
    check_parts(spec, size)
    assert spec.distinct_layers() == whole.distinct_layers()
    for mlp in mixtures(local_spec(spec, size - 1, size)):
        assert (mlp.num_slots, mlp.held) == (8 + redundant, range((8 + redundant) // size * (size - 1), 8 + redundant))


@given(
    family=st.sampled_from(["mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "ernie4_5_moe", "hunyuan_v1_moe"]),
    each=st.integers(1, 3),
    size=st.sampled_from([2, 3, 4]),
)
def test_parts_of_shared_experts(family, each, size):
    """Each expert is on one rank, and all else on all of them."""
    names = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "glm4_moe": "n_routed_experts"}
    count = names.get(family, "moe_num_experts" if family == "ernie4_5_moe" else "num_experts")
    spec = spec_of(family, **{count: 4 * each * size})
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


def test_experts_that_engines_cannot_share_evenly():
    with pytest.raises(
        ValueError,
        match="data_parallel_size=4 with enable_expert_parallel: data_parallel_size must divide the number of experts, "
        "which is 6 in layer 0; this model can have 1, 2, 3, 6",
    ):
        local_experts(spec_of("qwen3_moe", num_experts=6), 0, 4)
    assert local_experts(spec_of("llama"), 0, 1) == spec_of("llama")


def mixtures(spec):
    return [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]


def test_whole_experts_are_refused_where_there_are_none():
    with pytest.raises(ValueError, match="enable_expert_parallel: LlamaForCausalLM has no experts"):
        by_expert(spec_of("llama"))


def test_experts_that_cannot_be_dealt_out_evenly():
    spec = by_expert(spec_of("qwen3_moe", num_experts=6, moe_intermediate_size=25))
    assert local_spec(spec, 1, 2).layers[0].mlp.held == range(3, 6)  # their size need not divide
    with pytest.raises(
        ValueError, match="tensor_parallel_size=4 must divide the number of experts, which is 6 in layer 0"
    ):
        local_spec(spec, 0, 4)


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
    assert local_spec(spec, 0, size).num_kv_heads == max(1, spec.num_kv_heads // size)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        (
            {},
            3,
            "tensor_parallel_size=3 must divide the number of attention heads, which is 4 in layer 0.*can have 1, 2",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 192},
            4,
            "tensor_parallel_size=4 must divide the number of key/value heads .or be a multiple of it., which is 6",
        ),
        ({"intermediate_size": 90}, 4, "tensor_parallel_size=4 must divide the intermediate size, which is 90"),
    ],
)
def test_uneven_sizes_are_refused(changes, size, message):
    with pytest.raises(ValueError, match=message):
        local_spec(spec_of("llama", **changes), 0, size)


@pytest.mark.parametrize(
    ("family", "changes", "size", "context", "message"),
    [
        (
            "llama",
            {},
            2,
            2,
            "ranks that share a key head, which is 1 in layer 0 .tensor_parallel_size=2, 2 key/value heads",
        ),
        ("llama", {}, 8, 3, "share a key head, which is 4 in layer 0"),
        ("mistral", {"sliding_window": 8, "num_key_value_heads": 1}, 2, 2, "layer 0 has a sliding window"),
        ("bloom", {"num_key_value_heads": 1}, 8, 2, "layer 0 has ALiBi"),
    ],
)
def test_keys_that_cannot_be_split_are_refused(family, changes, size, context, message):
    with pytest.raises(ValueError, match=f"decode_context_parallel_size={context}.*{message}"):
        check_context(spec_of(family, **changes), size, context)


def test_keys_of_an_encoder_are_not_split():
    spec = spec_of("llama")
    (first, *others) = spec.layers
    last = dataclasses.replace(first, attention=dataclasses.replace(first.attention, causal=False))
    spec = dataclasses.replace(spec, layers=(first, *others[:-1], last))
    with pytest.raises(ValueError, match=f"layer {len(spec.layers) - 1} has tokens that see those behind them"):
        check_context(spec, 4, 2)


@pytest.mark.parametrize(("size", "context"), [(1, 1), (2, 1), (4, 2), (8, 2), (8, 4)])
def test_ranks_with_the_same_key_head_split_its_keys(size, context):
    check_context(spec_of("llama"), size, context)


def test_other_layers_and_experts_are_checked():
    spec = spec_of("qwen2_moe")
    first, *others = spec.layers
    narrow = dataclasses.replace(first.mlp, intermediate_size=30)
    spec = dataclasses.replace(
        spec, layers=(dataclasses.replace(first), *others[:-1], dataclasses.replace(others[-1], mlp=narrow))
    )
    with pytest.raises(ValueError, match=f"which is 30 in layer {len(spec.layers) - 1}"):
        local_spec(spec, 0, 4)


def test_slopes_are_those_of_the_rank():
    spec = spec_of("bloom")
    slopes = spec.layers[0].attention.alibi_slopes
    found = [local_spec(spec, rank, 2).layers[0].attention.alibi_slopes for rank in range(2)]
    assert found == [slopes[:2], slopes[2:]]
