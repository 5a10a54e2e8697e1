import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import assert_close, with_row_padding

from tritonllm.kernels import cap_logits, cap_logits_ref
from tritonllm.kernels.runtime import tuning


def in_double(logits: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    logits = logits.double() * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


@given(
    rows=st.integers(0, 4),
    vocab=st.integers(1, 300),
    spread=st.sampled_from([1e-6, 1e-2, 1.0, 30.0, 1e4]),
    scale=st.sampled_from([1.0, 0.0625, -2.0, 0.0]),
    softcap=st.sampled_from([0.0, 1e-2, 5.0, 30.0]),
    padding=st.integers(0, 3),
)
def test_matches_reference(device, rows, vocab, spread, scale, softcap, padding):
    values = (torch.randn(rows, vocab) * spread).to(device)
    logits = with_row_padding(values, padding)
    assert cap_logits(logits, scale=scale, softcap=softcap) is logits
    expected = in_double(values, scale, softcap)
    assert_close(logits, expected)
    assert_close(cap_logits_ref(values, scale=scale, softcap=softcap), expected)


def test_every_logit_is_close(device):
    """Also the small ones, which the norm over a row hides: a tanh of 1 - 2 / (1 + e^2x) loses them."""
    magnitude = torch.logspace(-30, 3, 500, device=device)
    logits = torch.stack([magnitude, -magnitude])
    expected = 30 * torch.tanh(logits.double() / 30)
    torch.testing.assert_close(cap_logits(logits, softcap=30.0).double(), expected, rtol=1e-6, atol=0)


def test_order_is_kept(device):
    """Of logits that differ by a thousandth, also where the formula of tanh changes (0.4 * 30)."""
    logits = torch.linspace(-40, 40, 80001, device=device)[None]
    assert (cap_logits(logits, softcap=30.0).diff() > 0).all()


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_special_values(device, softcap):
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1e30, -1e30, inf, -inf, nan, 0.0, 3e38, -3e38, 1e-30]], device=device)
    expected = [softcap, -softcap, softcap, -softcap, nan, 0.0, softcap, -softcap, 1e-30]
    torch.testing.assert_close(
        cap_logits(logits, softcap=softcap), torch.tensor([expected], device=device), rtol=1e-6, atol=0, equal_nan=True
    )


def test_scale_alone_keeps_special_values(device):
    logits = torch.tensor([[float("inf"), -float("inf"), float("nan"), 2.0]], device=device)
    expected = logits * 0.25
    assert torch.equal(cap_logits(logits, scale=0.25).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_rows_of_a_wider_tensor(device):
    """Some rows, some columns: what lies around them stays. Rows of several blocks."""
    wide = torch.randn(4, 300, device=device) * 50
    before = wide.clone()
    with tuning.override("cap_logits", {"BLOCK": 64, "num_warps": 1}):
        cap_logits(wide[::2, 10:270], scale=0.5, softcap=30.0)
    expected = before.clone()
    expected[::2, 10:270] = 30 * torch.tanh(before[::2, 10:270] * 0.5 / 30)
    assert_close(wide, expected)
    assert torch.equal(wide[1::2], before[1::2])
    assert torch.equal(wide[:, 270:], before[:, 270:])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty(device, shape):
    logits = torch.empty(shape, device=device)
    assert cap_logits(logits, scale=2.0, softcap=30.0) is logits


@pytest.mark.parametrize(
    ("logits", "kwargs", "names"),
    [
        (torch.zeros(4), {}, r"logits must have shape \[N, V\]"),
        (torch.zeros(2, 4).half(), {}, "logits must be torch.float32"),
        (torch.zeros(4, 2).t(), {}, "logits must be contiguous"),
        (torch.zeros(2, 4), {"softcap": -1.0}, "softcap must be finite and at least 0, got -1"),
        (torch.zeros(2, 4), {"softcap": math.inf}, "softcap must be finite"),
        (torch.zeros(2, 4), {"softcap": math.nan}, "softcap must be finite"),
        (torch.zeros(2, 4), {"scale": math.nan}, "scale must be finite, got nan"),
        (torch.zeros(2, 4), {"scale": -math.inf}, "scale must be finite"),
    ],
)
def test_bad_arguments(logits, kwargs, names):
    with pytest.raises(ValueError, match=names):
        cap_logits(logits, **kwargs)


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    logits = torch.randn(3, 8, device=device)
    torch.library.opcheck(torch.ops.tritonllm.cap_logits.default, (logits, 0.5, 30.0))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(1, 256000), (64, 262144), (7, 50257)])
def test_real_shapes(device, rows, vocab):
    """Gemma 2 and 3, and GPT-2, whose rows are not aligned."""
    logits = torch.randn(rows, vocab, device=device) * 20
    expected = in_double(logits, scale=0.5, softcap=30.0)
    assert_close(cap_logits(logits, scale=0.5, softcap=30.0), expected)


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """2^31 elements and more: the last row is right."""
    logits = torch.zeros(2**31 // 262144 + 3, 262144, device=device)
    logits[-1].normal_(std=20)
    expected = cap_logits_ref(logits[-1:].clone(), softcap=30.0)
    assert_close(cap_logits(logits, softcap=30.0)[-1:], expected)


@pytest.mark.gpu
def test_fullgraph_compile(device):
    logits = torch.randn(8, 64, device=device) * 20
    compiled = torch.compile(lambda x: cap_logits(x.clone(), softcap=30.0) + 1, fullgraph=True)
    assert_close(compiled(logits), cap_logits_ref(logits.clone(), softcap=30.0) + 1)
