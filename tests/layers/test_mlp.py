import pytest
import torch
from support.compare import assert_close
from torch.nn import functional as F

from tritonllm.layers.mlp import GatedMLP

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_matches_torch(device, activation, bias):
    mlp = GatedMLP(6, 10, activation=activation, bias=bias, dtype=torch.float32, device=device)
    for p in mlp.parameters():
        p.normal_()
    x = torch.randn(4, 6, device=device)
    gate, up = F.linear(x, mlp.gate_up.weight, mlp.gate_up.bias).chunk(2, dim=-1)
    assert_close(mlp(x), F.linear(ACTIVATIONS[activation](gate) * up, mlp.down.weight, mlp.down.bias))
