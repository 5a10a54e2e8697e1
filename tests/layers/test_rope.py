import dataclasses

import torch

from tritonllm.layers.rope import RopeSpec

ROPE = RopeSpec(base=10000.0, rotary_dim=16, trained_length=64)


def test_table():
    table = ROPE.table(5)
    assert table.shape == (5, 16) and table.dtype == torch.float32
    assert torch.equal(table[0], torch.cat((torch.ones(8), torch.zeros(8))))
    torch.testing.assert_close(table[3, 0], torch.tensor(3.0).cos())


def test_scaling_reaches_the_table():
    linear = dataclasses.replace(ROPE, scaling={"rope_type": "linear", "factor": 2.0})
    torch.testing.assert_close(linear.table(9)[8], ROPE.table(9)[4])


def test_dynamic_starts_beyond_the_trained_length():
    dynamic = dataclasses.replace(ROPE, scaling={"rope_type": "dynamic", "factor": 2.0})
    assert torch.equal(dynamic.table(64), ROPE.table(64))
    assert not torch.equal(dynamic.table(65)[:64], ROPE.table(64))


def test_backwards_is_the_angle_with_the_other_sign():
    cos, sin = ROPE.table(7).chunk(2, dim=-1)
    assert torch.equal(dataclasses.replace(ROPE, backwards=True).table(7), torch.cat((cos, -sin), dim=-1))
