import dataclasses

import pytest
import torch

from tritonllm.models.spec import ModelSpec, RopeSpec

ROPE = RopeSpec(base=10000.0, rotary_dim=16, trained_length=64)
SPEC = ModelSpec(
    architecture="X",
    vocab_size=8,
    hidden_size=32,
    intermediate_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_position_embeddings=64,
    norm_eps=1e-6,
    rope=ROPE,
    sliding_window=(None, 4),
)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPEC.num_layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ({"head_size": 20}, "head_size must be a multiple of 8"),
        ({"head_size": 8}, "from 16 to 512"),
        ({"activation": "relu"}, "activation must be one of silu"),
        ({"sliding_window": (None,)}, "sliding_window must have one entry for each of 2 layers"),
    ],
)
def test_bad_values(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPEC, **change)


def test_rope_table():
    table = ROPE.table(5)
    assert table.shape == (5, 16) and table.dtype == torch.float32
    assert torch.equal(table[0], torch.cat((torch.ones(8), torch.zeros(8))))
    torch.testing.assert_close(table[3, 0], torch.tensor(3.0).cos())


def test_rope_scaling_reaches_the_table():
    linear = dataclasses.replace(ROPE, scaling={"rope_type": "linear", "factor": 2.0})
    torch.testing.assert_close(linear.table(9)[8], ROPE.table(9)[4])


def test_dynamic_rope_starts_beyond_the_trained_length():
    dynamic = dataclasses.replace(ROPE, scaling={"rope_type": "dynamic", "factor": 2.0})
    assert torch.equal(dynamic.table(64), ROPE.table(64))
    assert not torch.equal(dynamic.table(65)[:64], ROPE.table(64))
