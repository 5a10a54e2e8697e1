"""On Hopper, all of a layer's products of few rows have one kind of kernel, or none (`kernels/dense/sm90/few.py`)."""

from unittest.mock import patch

import pytest
import torch
from support.tiny_models import PagedRunner, PagedSequence, tiny_config

from tritonllm.kernels.dense.arguments import HEAVY
from tritonllm.layers import moe
from tritonllm.layers.linear import Linear
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights

CPU = torch.device("cpu")


def build(family, **changes):
    spec = spec_from_config(tiny_config(family, **changes))
    return Decoder(spec, dtype=torch.float32, device=CPU, max_model_len=32)


def products(layer):
    return [module for module in layer.modules() if isinstance(module, Linear)]


def test_a_dense_layer_counts_all_its_weights():
    for layer in build("qwen3").layers:
        assert len(products(layer)) == 4
        weights = sum(product.weight.numel() for product in products(layer))
        assert {product.together for product in products(layer)} == {layer.together}
        assert weights <= layer.together < 1.1 * weights  # norms


def test_experts_have_kernels_of_their_own_between():
    """However small, and however many experts a rank has: the router's bits are the same on all."""
    for layer in build("qwen3_moe").layers:
        assert {product.together for product in products(layer)} == {HEAVY}


def test_a_router_says_so():
    model = build("qwen3_moe")
    dummy_weights(model, 0)
    with patch.object(moe, "linear_float32", wraps=moe.linear_float32) as product:
        PagedRunner(model).step([(PagedSequence(), [1, 2, 3])])
    assert product.call_count == len(model.layers)
    assert all(call.kwargs["together"] == HEAVY for call in product.call_args_list)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_follows_the_layers_unless_it_is_large(tied):
    small, large = (build("qwen3", tie_word_embeddings=tied, vocab_size=n) for n in (16, 4096))
    assert 4 * small.lm_head.weight.numel() < small.lm_head.together == small.layers[0].together
    assert large.lm_head.together == 4 * large.lm_head.weight.numel() > large.layers[0].together
    assert build("qwen3_moe").lm_head.together == HEAVY
