import pytest
import torch
from support.compare import assert_close
from torch.nn import functional as F

from tritonllm.layers.norm import Norm, NormSpec

KINDS = {
    "rms": NormSpec(kind="rms", eps=1e-5),
    "rms-offset": NormSpec(kind="rms", eps=1e-5, weight_offset=1.0),
    "layer": NormSpec(kind="layer", eps=1e-5, bias=True),
    "layer-no-bias": NormSpec(kind="layer", eps=1e-5),
    "layer-bare": NormSpec(kind="layer", eps=1e-5, weight=False),
}


@pytest.fixture(params=sorted(KINDS))
def spec(request: pytest.FixtureRequest) -> NormSpec:
    return KINDS[request.param]


def make(shape: tuple[int, ...], spec: NormSpec, device: torch.device) -> Norm:
    norm = Norm(shape, spec, dtype=torch.float32, device=device)
    for p in norm.parameters():
        p.normal_(1.0, 0.3)
    return norm


def want(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    """By torch, without a weight and a bias, which may belong to heads."""
    size = (x.shape[-1],)
    if norm.spec.kind == "rms":
        return F.rms_norm(x, size, None, norm.spec.eps) * (norm.weight + norm.spec.weight_offset)
    out = F.layer_norm(x, size, None, None, norm.spec.eps)
    out = out if norm.weight is None else out * norm.weight
    return out if norm.bias is None else out + norm.bias


def test_has_what_its_spec_says(device, spec):
    norm = make((12,), spec, device)
    assert (norm.weight is not None) == spec.weight and (norm.bias is not None) == spec.bias


def test_starts_the_stream(device, spec):
    norm, x = make((12,), spec, device), torch.randn(3, 12, device=device)
    before = x.clone()
    out, residual = norm(x, None, 0.5)  # what starts a stream is not scaled
    assert_close(out, want(norm, before))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("x_scale", [1.0, 0.3])
def test_adds_to_the_stream(device, spec, x_scale):
    norm = make((12,), spec, device)
    x, residual = torch.randn(2, 3, 12, device=device)
    total = x_scale * x + residual
    out, stream = norm(x, residual, x_scale)
    assert_close(out, want(norm, total))
    assert_close(stream, total)
    assert stream.data_ptr() == residual.data_ptr()


@pytest.mark.parametrize("shape", [(8,), (2, 8)], ids=["one weight", "a weight for each head"])
def test_in_place_on_a_slice(device, spec, shape):
    """The heads of a fused projection, where they lie; what is beside them stays."""
    norm, qkv = make(shape, spec, device), torch.randn(3, 5, 8, device=device)
    before = qkv.clone()
    heads = qkv[:, 1:3]
    assert norm.normalize(heads, out=heads) is heads
    assert_close(qkv[:, 1:3], want(norm, before[:, 1:3]))
    assert torch.equal(qkv[:, [0, 3, 4]], before[:, [0, 3, 4]])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"kind": "rms", "bias": True}, "an RMS norm has no bias"),
        ({"kind": "layer", "weight_offset": 1.0}, "a layer norm has no weight_offset"),
    ],
)
def test_bad_specs(axes, message):
    with pytest.raises(ValueError, match=message):
        NormSpec(eps=1e-5, **axes)
