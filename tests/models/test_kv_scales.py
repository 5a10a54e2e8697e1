"""The scales of a cache, by the names that checkpoints have for them."""

import pytest
import torch
from support.tiny_models import tiny_config

from tritonllm.layers.metadata import KVScales
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.kv_scales import is_kv_scale, kv_scales_of, without_kv_scales
from tritonllm.models.tensor_files import describe
from tritonllm.models.weights import copy_tensors, dummy_weights, hf_tensors

ATTENTION = "model.layers.3.self_attn"


def scales_of(**numbers):
    """Of tensors by names in which ``__`` is a dot."""
    tensors = {name.replace("__", "."): torch.as_tensor(number) for name, number in numbers.items()}
    names = without_kv_scales({name: describe(tensor) for name, tensor in tensors.items()})[1]
    return kv_scales_of(names, tensors.__getitem__, 4)


@pytest.mark.parametrize(
    "names",
    [
        (f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale"),
        (f"{ATTENTION}.attn.k_scale", f"{ATTENTION}.attn.v_scale"),
        (f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale"),
        (f"{ATTENTION}.qkv_proj.k_scale", f"{ATTENTION}.qkv_proj.v_scale"),
        (f"{ATTENTION}.k_proj.output_scale", f"{ATTENTION}.v_proj.output_scale"),
        ("transformer.h.3.attn.k_scale", "transformer.h.3.attn.v_scale"),
        ("layers.3.self_attn.k_scale", "model.language_model.layers.3.self_attn.v_scale"),
    ],
)
def test_every_name_is_known(names):
    numbers = dict(zip((name.replace(".", "__") for name in names), (0.5, 0.25), strict=True))
    assert scales_of(**numbers) == {3: KVScales(0.5, 0.25)}


def test_of_a_scale_for_each_head_the_largest_is_taken():
    assert scales_of(layers__1__attn__k_scale=[[0.5], [0.75]], layers__1__attn__v_scale=[0.25]) == {
        1: KVScales(0.75, 0.25)
    }


def test_one_scale_of_both():
    assert scales_of(layers__1__self_attn__kv_scale=[0.5]) == {1: KVScales(0.5, 0.5)}


def test_what_is_not_rounded_here_has_scales_that_nobody_reads():
    assert scales_of(layers__1__self_attn__q_scale=2.0, layers__1__attn__prob_scale=3.0) == {}
    assert scales_of(layers__1__self_attn__k_zero_point=0, layers__1__attn__v_zero_point=0) == {}
    assert scales_of(layers__4__self_attn__k_scale=2.0) == {}  # of a layer that drafts


@pytest.mark.parametrize(
    "name",
    [f"{ATTENTION}.k_proj.weight", f"{ATTENTION}.k_proj.weight_scale", f"{ATTENTION}.o_proj.output_scale", "k_scale"],
)
def test_others_are_weights(name):
    assert not is_kv_scale(name)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"layers__1__attn__k_scale": 0.0}, r"tensor layers.1.attn.k_scale must be positive and finite, got 0.0"),
        ({"layers__1__attn__k_scale": float("nan")}, r"layers.1.attn.k_scale must be positive and finite, got nan"),
        ({"layers__1__attn__k_scale": [1.0, -2.0]}, r"layers.1.attn.k_scale must be positive and finite, got -2.0"),
        ({"layers__1__attn__k_scale": 3}, r"layers.1.attn.k_scale must be a scale in floating point, got torch.int64"),
        ({"layers__1__attn__k_scale": 1.0}, r"tensor layers.1.attn.k_scale: layer 1 has no scale of its values"),
        ({"layers__1__attn__v_scale": 1.0}, r"tensor layers.1.attn.v_scale: layer 1 has no scale of its keys"),
        (
            {"layers__1__attn__kv_scale": 1.0, "layers__1__attn__v_scale": 1.0},
            r"tensors layers.1.attn.kv_scale and layers.1.attn.v_scale are two names of one",
        ),
    ],
)
def test_bad_scales_are_refused_by_name(numbers, message):
    with pytest.raises(ValueError, match=message):
        scales_of(**numbers)


def test_a_model_takes_them_beside_its_weights():
    spec = spec_from_config(tiny_config("qwen3"))
    sizes = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 8}
    model = Decoder(spec, **sizes)
    dummy_weights(model, 0)
    assert model.kv_scales == [KVScales()] * 3
    other = Decoder(spec, **sizes)
    name = "model.layers.1.self_attn.{}_scale"
    copy_tensors(other, {**hf_tensors(model), name.format("k"): torch.tensor(2.0), name.format("v"): torch.tensor(3.0)})
    assert other.kv_scales == [KVScales(), KVScales(2.0, 3.0), KVScales()]
    with pytest.raises(ValueError, match=r"no scale of its values"):
        copy_tensors(other, {**hf_tensors(model), name.format("k"): torch.tensor(2.0)})
