import pytest
import torch
from support.compare import assert_close
from torch.nn import functional as F

from tritonllm.kernels import xielu_ref
from tritonllm.layers.mlp import ACTIVATIONS, GATED_ACTIVATIONS, MLP, MLPSpec
from tritonllm.layers.norm import BlockInput, Norm, NormSpec

FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def make(spec: MLPSpec, device: torch.device) -> MLP:
    mlp = MLP(6, spec, dtype=torch.float32, device=device)
    for p in mlp.parameters():
        p.normal_()
    return mlp


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_gated(device, activation, bias):
    mlp = make(MLPSpec(intermediate_size=10, activation=activation, bias=bias), device)
    x = torch.randn(4, 6, device=device)
    gate, up = F.linear(x, mlp.up.weight, mlp.up.bias).chunk(2, dim=-1)
    assert_close(mlp(BlockInput(x)).alone(), F.linear(FUNCTIONS[activation](gate) * up, mlp.down.weight, mlp.down.bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_plain(device, activation, bias):
    mlp = make(MLPSpec(intermediate_size=10, activation=activation, gated=False, bias=bias), device)
    x = torch.randn(4, 6, device=device)
    function = FUNCTIONS.get(activation) or (lambda x: xielu_ref(x, mlp.act.weight))
    inner = function(F.linear(x, mlp.up.weight, mlp.up.bias))
    assert_close(mlp(BlockInput(x)).alone(), F.linear(inner, mlp.down.weight, mlp.down.bias))


@pytest.mark.parametrize("gated", [True, False])
def test_with_its_norm_and_the_stream(device, gated):
    mlp = make(MLPSpec(intermediate_size=10, activation="silu", gated=gated), device)
    norm = Norm((6,), NormSpec(kind="rms", eps=1e-5), dtype=torch.float32, device=device)
    norm.weight.normal_()
    stream = torch.randn(4, 6, device=device)
    want = stream + 0.3 * mlp(BlockInput(norm.normalize(stream))).alone()
    product, inner, _ = mlp(BlockInput(stream, norm))
    product.add_to(stream, inner, 0.3)
    assert_close(stream, want)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"activation": "tanh", "gated": False}, "activation must be one of silu, .*xielu, got 'tanh'"),
        ({"activation": "relu"}, "activation of a gated MLP must be one of silu, gelu, gelu_tanh, got 'relu'"),
    ],
)
def test_bad_specs(axes, message):
    with pytest.raises(ValueError, match=message):
        MLPSpec(intermediate_size=8, **axes)
