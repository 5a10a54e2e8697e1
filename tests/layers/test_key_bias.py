"""The numbers behind keys: scaled products with them are those without, plus the bias."""

import pytest
import torch
from torch.nn.functional import softplus

from tritonllm.layers.attention import AttentionSpec
from tritonllm.layers.key_bias import ROOM, KeyBias
from tritonllm.layers.norm import NormSpec
from tritonllm.layers.rope import RopeSpec

HEADS, KEYS, HEAD = 4, 2, 24


def make(dtype: torch.dtype, *, shift: bool) -> KeyBias:
    sizes = {"of": KEYS, "head_size": HEAD, "scale": HEAD**-0.5}
    layer = KeyBias(HEADS, KEYS, **sizes, shift=shift, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        p.normal_(0, 0.2, generator=generator)
    layer.strength.add_(1.0)  # so that numbers are as large as the products, and larger
    return layer


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-14)])
def test_scores(dtype, limit, shift):
    """In 16 bits the product with the values is rounded, and the number that is made of it is not."""
    layer = make(dtype, shift=shift)
    heads = torch.randn(7, HEADS + 2 * KEYS, HEAD, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = heads.clone()
    wide = layer.append(heads)
    assert torch.equal(heads, before) and wide.shape == (7, HEADS + 2 * KEYS, HEAD + ROOM) and wide.dtype == dtype
    assert torch.equal(wide[..., :HEAD], heads) and not wide[:, HEADS + KEYS :, HEAD:].any()
    values = heads[:, HEADS + KEYS :].flatten(1).double()
    sums = layer.of_values(values.to(dtype)).double()
    assert float((sums - values @ layer.of_values.weight.double().T).abs().max()) < 0.02
    bias = (layer.strength.double() * softplus(sums + (layer.shift.double() if shift else 0.0))).exp()
    q, k = wide[:, :HEADS].double(), wide[:, HEADS : HEADS + KEYS].double().repeat_interleave(HEADS // KEYS, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) * HEAD**-0.5
    plain = torch.einsum("thd,shd->hts", q[..., :HEAD], k[..., :HEAD]) * HEAD**-0.5
    want = bias.T.repeat_interleave(HEADS // KEYS, dim=0)[:, None]
    assert float(bias.max()) > 3.0
    assert float(((scores - plain - want) / want).abs().max()) < limit


def test_what_it_does_not_go_with():
    sizes = {"num_heads": HEADS, "num_kv_heads": KEYS, "head_size": HEAD, "key_bias": KEYS, "scale": 0.2}
    spec = AttentionSpec(**sizes)
    assert spec.cache == (KEYS, HEAD + ROOM) and spec.projections[1] == (KEYS, HEAD) and spec.output_size == HEAD
    rope = RopeSpec(base=1e4, rotary_dim=HEAD, trained_length=8)
    after = {"qk_norm": NormSpec(kind="rms", eps=0.0), "rope": rope, "qk_norm_after_rope": True}
    for wrong in ({"scale": None}, {"values_are_keys": True}, {"value_size": 8}, {"clip_qkv": 1.0}, after):
        with pytest.raises(ValueError, match="key_bias is supported with a scale"):
            AttentionSpec(**{**sizes, **wrong})
    with pytest.raises(ValueError, match="head_size must be a multiple of 8 from 16 to 512, got 528"):
        AttentionSpec(**{**sizes, "head_size": 512})
