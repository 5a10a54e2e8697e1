import dataclasses

import pytest

from tritonllm.layers.attention import AttentionSpec
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.norm import NormSpec
from tritonllm.layers.rope import RopeSpec
from tritonllm.models.spec import LayerSpec, ModelSpec

ATTENTION = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, rope=RopeSpec(base=10000.0, rotary_dim=16, trained_length=64)
)
LAYER = LayerSpec(attention=ATTENTION, mlp=MLPSpec(intermediate_size=8, activation="silu"))
SPEC = ModelSpec(
    architecture="X",
    vocab_size=8,
    hidden_size=32,
    max_position_embeddings=64,
    layers=(LAYER, LAYER),
    norm=NormSpec(kind="rms", eps=1e-6),
)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.vocab_size = 3  # type: ignore[misc]


def test_what_the_engine_asks_for():
    assert (SPEC.num_layers, SPEC.caches) == (2, ((2, 16),) * 2)


WIDE = dataclasses.replace(LAYER, attention=dataclasses.replace(ATTENTION, num_kv_heads=1, head_size=32))
SHARED = dataclasses.replace(LAYER, attention=dataclasses.replace(ATTENTION, own_keys=False), keys_from=1)


APART = MoESpec(num_experts=2, top_k=1, intermediate_size=8, shared=LAYER.mlp, apart=NormSpec(kind="rms", eps=1e-6))


def test_residual_weights_are_for_blocks_one_after_the_other():
    for wrong in ({"parallel": "one norm"}, {"norm_position": "post"}):
        with pytest.raises(ValueError, match="residual_weights need norm_position='pre'"):
            dataclasses.replace(SPEC, residual_weights=True, **wrong)


def test_heads_differ_between_layers():
    """Each layer has a cache of its own shape."""
    spec = dataclasses.replace(SPEC, layers=(LAYER, WIDE, LAYER))
    assert spec.caches == ((2, 16), (1, 32), (2, 16)) and list(spec.cache_of_layer) == [0, 1, 2]
    assert [shape.elements for shape in spec.caches] == [64, 64, 64] and spec.distinct_layers() == [0, 1, 2]


def test_layers_that_read_others_have_no_cache():
    """Those are of one kind, wherever the layer is that they read."""
    behind = dataclasses.replace(SHARED, keys_from=3)
    spec = dataclasses.replace(SPEC, layers=(LAYER, WIDE, LAYER, SHARED, dataclasses.replace(SHARED, keys_from=4)))
    assert spec.caches == ((2, 16), (1, 32), (2, 16)) and list(spec.cache_of_layer) == [0, 1, 2, 2, 0]
    assert spec.distinct_layers() == [0, 1, 2, 3] and behind == SHARED
    layers = (LAYER, LAYER, WIDE, WIDE, dataclasses.replace(SHARED, keys_from=4))
    small = dataclasses.replace(SPEC, layers=layers).without_repeats()
    assert small.layers == (LAYER, LAYER, WIDE, SHARED) and list(small.cache_of_layer) == [0, 1, 2, 1]
    with pytest.raises(ValueError, match="own_keys=True does not go with keys_from=2"):
        dataclasses.replace(LAYER, keys_from=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"head_size": 20}, "head_size must be a multiple of 8"),
        ({"head_size": 8}, "from 16 to 512"),
        ({"rope": RopeSpec(base=1e4, rotary_dim=24, trained_length=8)}, "rotary_dim must be at most head_size=16"),
        ({"v_norm": NormSpec(kind="rms", eps=1e-6)}, "v_norm must be an RMS norm without a weight"),
        ({"alibi_slopes": (0.5, 0.25)}, "alibi_slopes must have one entry for each of 4 heads"),
    ],
)
def test_bad_attention(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ATTENTION, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "layers must not be empty"),
        ({"layers": (SHARED, LAYER)}, "keys_from: the layer 1 before layer 0 must have keys of its own"),
        ({"layers": (LAYER, SHARED, SHARED)}, "keys_from: the layer 1 before layer 2 must have keys of its own"),
        ({"layers": (WIDE, SHARED)}, r"keys_from: the layer 1 before layer 1 must .*, of the shape \(2, 16\)"),
        (
            {"layers": (LAYER, dataclasses.replace(LAYER, mlp=APART))},
            "layer 1: experts apart need norm_position='sandwich'",
        ),
        ({"parallel": "one norm", "norm_position": "post"}, "parallel='one norm' needs norm_position='pre'"),
    ],
)
def test_bad_models(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, **change)
