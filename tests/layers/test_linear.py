import pytest
import torch
from support.compare import assert_close, poisoned
from torch.nn import functional as F

from tritonllm.layers.linear import Embedding, Linear
from tritonllm.layers.norm import Norm, NormSpec


@pytest.mark.parametrize("bias", [False, True])
def test_linear(device, bias):
    layer = Linear(6, 4, bias=bias, dtype=torch.float32, device=device)
    for p in layer.parameters():
        assert not p.requires_grad
        p.normal_()
    x = torch.randn(3, 6, device=device)
    want = x @ layer.weight.T
    assert_close(layer(x), want + layer.bias if layer.bias is not None else want)
    assert (layer.bias is not None) == bias


@pytest.mark.parametrize("rows", [3, 100])
def test_what_surrounds_the_product(device, rows):
    """Norm before, activation, scale and addition after, for few rows and for many."""
    layer = Linear(6, 8, bias=True, dtype=torch.float32, device=device)
    norm = Norm((6,), NormSpec(kind="rms", eps=1e-5), dtype=torch.float32, device=device)
    for p in (*layer.parameters(), *norm.parameters()):
        p.normal_()
    x, residual = torch.randn(rows, 6, device=device), torch.randn(rows, 4, device=device)
    normed = F.rms_norm(x, (6,), norm.weight, eps=1e-5)
    gate, up = F.linear(normed, layer.weight, layer.bias).chunk(2, dim=-1)
    want = residual + 0.5 * F.silu(gate) * up
    before = x.clone()
    assert layer(x, norm, activation="silu", gated=True, residual=residual, scale=0.5) is residual
    assert_close(residual, want)
    assert torch.equal(x, before)


@pytest.mark.parametrize("bias", [False, True])
def test_a_norm_between_two_products(device, bias):
    """The first adds to the stream and begins the norm, the second ends it."""
    first, second = (Linear(*shape, bias=bias, dtype=torch.float32, device=device) for shape in ((6, 8), (8, 4)))
    norm = Norm((8,), NormSpec(kind="rms", eps=1e-2, weight_offset=1.0), dtype=torch.float32, device=device)
    for p in (*first.parameters(), *second.parameters(), *norm.parameters()):
        p.normal_()
    x, stream = torch.randn(5, 6, device=device), torch.randn(5, 8, device=device)
    total = stream + 0.5 * F.linear(x, first.weight, first.bias)
    begun = first.add_and_normalize(stream, x, norm, 0.5)
    assert_close(stream, total)
    gate, up = F.linear(norm.normalize(total), second.weight, second.bias).chunk(2, dim=-1)
    assert_close(second(*begun, activation="silu", gated=True), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_embedding(device, dtype):
    table = Embedding(5, 3, dtype=torch.float32, device=device)
    table.weight.normal_()
    ids = torch.tensor([4, 0, 4], dtype=dtype, device=device)
    assert torch.equal(table(ids), table.weight[[4, 0, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_are_float32(device, dtype):
    table = Embedding(40, 16, dtype=dtype, device=device)
    table.weight.normal_()
    hidden = torch.randn(7, 16, device=device).to(dtype)
    logits = table.logits(hidden)
    assert logits.dtype == torch.float32
    assert_close(logits, hidden.float() @ table.weight.float().T, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 256])
def test_logits_are_not_rounded(device, dtype, rows):
    """On a GPU the product is stored in float32: its error is that of summing, far below one rounding."""
    table = Embedding(151936, 1024, dtype=dtype, device=device)
    table.weight.normal_(0, 0.02)
    hidden = torch.randn(rows, 1024, device=device).to(dtype)
    out = poisoned(rows, 151936, dtype=torch.float32, device=device)
    out.copy_(table.logits(hidden))
    assert_close(out, hidden.double() @ table.weight.double().T, torch.float32)
