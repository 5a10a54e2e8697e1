"""Two models have the same fingerprint if, and only if, their keys and values are the same."""

import pytest
import torch
from torch import nn

from tritonllm.engine.transfer.fingerprint import model_fingerprint

CONFIG = {"hidden_size": 4, "rope_theta": 1e4, "_name_or_path": "a", "transformers_version": "1"}


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    made.register_buffer("scale", torch.tensor(2.0))
    return made.to(dtype)


def of(*models, config=CONFIG, length=100, layout=("float32", 16)):
    return model_fingerprint(models or [model()], config, length, layout)()


def test_the_same_model_is_the_same():
    assert of(model(0)) == of(model(0)) and len(of()) == 16
    assert of(config=CONFIG | {"_name_or_path": "b", "transformers_version": "2"}) == of()
    assert of(length=200) == of()  # no key depends on it


@pytest.mark.parametrize(
    "other",
    [
        lambda: of(model(1)),
        lambda: of(model(dtype=torch.bfloat16)),
        lambda: of(model(), model()),
        lambda: of(config=CONFIG | {"rope_theta": 1e5}),
        lambda: of(layout=("float32", 32)),
        lambda: of(config=CONFIG | {"rope_scaling": {"rope_type": "longrope"}}),
    ],
)
def test_another_is_another(other):
    assert other() != of()


def test_lengths_count_where_positions_depend_on_them():
    scaled = CONFIG | {"rope_scaling": {"rope_type": "longrope"}}
    assert of(config=scaled, length=100) != of(config=scaled, length=200)


def test_every_bit_of_the_weights_counts_now():
    changed = model()
    fingerprint = model_fingerprint([changed], CONFIG, 100, "")
    whole = fingerprint()
    for tensor in (*changed.parameters(), *changed.buffers()):
        bits = tensor.data.view(-1).view(torch.int32)
        bits[-1] ^= 1
        assert fingerprint() != whole
        bits[-1] ^= 1
    assert fingerprint() == whole


def test_weights_under_each_others_names_are_another_model():
    one, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    assert of(nn.Sequential(one, other)) != of(nn.Sequential(other, one))
