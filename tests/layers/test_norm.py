import torch
from support.compare import assert_close

from tritonllm.layers.norm import RMSNorm


def make(size: int, device: torch.device) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, dtype=torch.float32, device=device)
    norm.weight.normal_(1.0, 0.3)
    return norm


def want(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)


def test_starts_the_stream(device):
    norm, x = make(12, device), torch.randn(3, 12, device=device)
    before = x.clone()
    out, residual = norm(x, None)
    assert_close(out, want(norm, before))
    assert torch.equal(residual, before)


def test_adds_to_the_stream(device):
    norm = make(12, device)
    x, residual = torch.randn(2, 3, 12, device=device)
    total = x + residual
    out, stream = norm(x, residual)
    assert_close(out, want(norm, total))
    assert_close(stream, total)
    assert stream.data_ptr() == residual.data_ptr()


def test_in_place_on_a_slice(device):
    """The heads of a fused projection, where they lie; what is beside them stays."""
    norm, qkv = make(8, device), torch.randn(3, 5, 8, device=device)
    before = qkv.clone()
    norm.normalize_(qkv[:, 1:3])
    assert_close(qkv[:, 1:3], want(norm, before[:, 1:3]))
    assert torch.equal(qkv[:, [0, 3, 4]], before[:, [0, 3, 4]])
