"""The model of one rank, and what cannot be cut."""

import dataclasses

import pytest
from support.tiny_configs import tiny_config

from tritonllm.models.families import spec_from_config
from tritonllm.models.local_spec import by_expert, check_context, local_experts, local_spec


def spec_of(family: str, **changes):
    return spec_from_config(tiny_config(family, **changes))


def test_experts_that_engines_cannot_share_evenly():
    with pytest.raises(
        ValueError,
        match="data_parallel_size=4 with enable_expert_parallel: data_parallel_size must divide the number of experts, "
        "which is 6 in layer 0; this model can have 1, 2, 3, 6",
    ):
        local_experts(spec_of("qwen3_moe", num_experts=6), 0, 4)
    assert local_experts(spec_of("llama"), 0, 1) == spec_of("llama")


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
