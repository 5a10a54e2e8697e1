import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tritonllm.kernels import fused_add_rms_norm, fused_add_rms_norm_ref, rms_norm, rms_norm_ref
from tritonllm.kernels.runtime import tuning

dtypes = st.sampled_from(FLOATS)
scales = st.sampled_from([1e-3, 1.0, 1e4])  # 1e-3: eps counts; 1e4: squares beyond float16
offsets = st.sampled_from([0.0, 1.0, -0.3])
x_scales = st.sampled_from([1.0, 0.22, -3.0])
SMALL_BLOCKS = {"BLOCK": 32, "ROWS": 2, "num_warps": 1}  # rows of more than one block


@given(
    rows=st.integers(0, 5),
    n=st.integers(1, 300),
    dtype=dtypes,
    weight_dtype=dtypes,
    scale=scales,
    offset=offsets,
    padding=st.integers(0, 3),
)
def test_matches_reference(device, rows, n, dtype, weight_dtype, scale, offset, padding):
    x = with_row_padding((torch.randn(rows, n) * scale).to(device, dtype), padding)
    weight = torch.randn(n).to(device, weight_dtype)
    out = poisoned(rows, n, dtype=dtype, device=device)
    assert rms_norm(x, weight, 1e-5, weight_offset=offset, out=out) is out
    assert_close(out, rms_norm_ref(x.float(), weight.float(), 1e-5, weight_offset=offset))


@given(
    tokens=st.integers(0, 3), heads=st.integers(1, 5), n=st.integers(1, 40), dtype=dtypes, weight_per_head=st.booleans()
)
def test_heads_of_a_fused_projection_in_place(device, tokens, heads, n, dtype, weight_per_head):
    """Rows with two strides, normalised where they are; what lies around them stays."""
    qkv = torch.randn(tokens, (heads + 2) * n).to(device, dtype)
    before = qkv.clone()
    weight = torch.randn((heads, n) if weight_per_head else (n,), device=device)
    q = qkv[:, n : (heads + 1) * n].view(tokens, heads, n)
    assert rms_norm(q, weight, out=q) is q
    assert_close(q, rms_norm_ref(before[:, n : (heads + 1) * n].reshape(tokens, heads, n).float(), weight))
    assert torch.equal(qkv[:, :n], before[:, :n])
    assert torch.equal(qkv[:, (heads + 1) * n :], before[:, (heads + 1) * n :])


@given(
    rows=st.integers(0, 5),
    n=st.integers(1, 300),
    dtype=dtypes,
    residual_dtype=dtypes,
    scale=scales,
    offset=offsets,
    x_scale=x_scales,
    padding=st.integers(0, 3),
)
def test_fused_add_matches_reference(device, rows, n, dtype, residual_dtype, scale, offset, x_scale, padding):
    x = with_row_padding((torch.randn(rows, n) * scale).to(device, dtype), padding)
    residual = with_row_padding((torch.randn(rows, n) * scale).to(device, residual_dtype), padding + 1)
    weight = torch.randn(n, device=device)
    total = (x.double() * x_scale + residual.double()).to(residual_dtype)
    normed, added = fused_add_rms_norm(x, residual, weight, weight_offset=offset, x_scale=x_scale)
    assert normed is x
    assert added is residual
    if x_scale == 1:
        assert torch.equal(residual, total)
    assert_close(residual, total)
    assert_close(x, rms_norm_ref(residual.float(), weight, weight_offset=offset))


@given(rows=st.integers(1, 5), n=st.integers(1, 100), dtype=dtypes, offset=offsets)
def test_rows_of_several_blocks(device, rows, n, dtype, offset):
    x = torch.randn(rows, n).to(device, dtype)
    residual = torch.randn(rows, n).to(device, dtype)
    weight = torch.randn(n, device=device)
    out = poisoned(rows, n, dtype=dtype, device=device)
    expected = (x.clone(), residual.clone())
    fused_add_rms_norm_ref(*expected, weight, weight_offset=offset)
    with tuning.override("rms_norm", SMALL_BLOCKS), tuning.override("fused_add_rms_norm", SMALL_BLOCKS):
        rms_norm(x, weight, weight_offset=offset, out=out)
        assert_close(out, rms_norm_ref(x.float(), weight, weight_offset=offset))
        fused_add_rms_norm(x, residual, weight, weight_offset=offset)
    assert_close(x, expected[0])
    assert torch.equal(residual, expected[1])


@pytest.mark.parametrize("shape", [(6,), (0, 4), (2, 3, 8), (2, 0, 8), (2, 3, 2, 8)])
def test_leading_dimensions(device, shape):
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    x, residual, weight = x.to(device), residual.to(device), weight.to(device)
    out = rms_norm(x, weight)
    assert out.shape == shape
    assert_close(out, rms_norm_ref(x, weight))
    expected = rms_norm_ref(x + residual, weight)
    fused_add_rms_norm(x, residual, weight)
    assert_close(x, expected)


def test_four_dimensions_of_any_strides(device):
    x = torch.randn(3, 2, 4, 8, device=device).transpose(0, 1)
    weight = torch.randn(8, device=device)
    assert_close(rms_norm(x, weight), rms_norm_ref(x, weight))
    weight = torch.randn(4, 8, device=device)
    assert_close(rms_norm(x, weight), torch.stack([rms_norm_ref(x[:, :, h], weight[h]) for h in range(4)], dim=2))


def test_offset_is_added_before_the_weight_is_rounded(device):
    """1 + 0.001 is 1 in bfloat16: the offset must be added in float32, in the kernel and in the reference."""
    x, weight = torch.ones(2, 8, device=device), torch.full((8,), 1e-3, dtype=torch.bfloat16, device=device)
    expected = torch.full((2, 8), 1 + float(weight[0]), device=device)
    assert_close(rms_norm(x, weight, 1e-9, weight_offset=1.0), expected)
    assert_close(rms_norm_ref(x, weight, 1e-9, weight_offset=1.0), expected)


def test_scaled_addition_is_rounded_once(device):
    """256 + 1 * 1.001 is 258 in bfloat16; with the product or the multiplier rounded to 1 it is the even 256."""
    expected = torch.full((1, 8), 258.0, dtype=torch.bfloat16, device=device)
    for function in (fused_add_rms_norm, fused_add_rms_norm_ref):
        x = torch.full((1, 8), 1.0, dtype=torch.bfloat16, device=device)
        residual = torch.full((1, 8), 256.0, dtype=torch.bfloat16, device=device)
        function(x, residual, torch.ones(8, device=device), x_scale=1.001)
        assert torch.equal(residual, expected)


def test_rows_are_independent(device):
    x = torch.randn(6, 16, device=device)
    x[2] = float("nan")
    x[3] = 0.0
    weight = torch.randn(16, device=device)
    out = rms_norm(x, weight)
    assert out[2].isnan().all()
    assert (out[3] == 0).all()
    clean = [0, 1, 4, 5]
    assert_close(out[clean], rms_norm_ref(x[clean], weight))


def test_reference_matches_torch_and_transformers(device):
    x, weight = torch.randn(3, 64, device=device), torch.randn(64, device=device)
    theirs = LlamaRMSNorm(64, eps=1e-5).to(device)
    theirs.weight.data.copy_(weight)
    assert_close(rms_norm_ref(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (64,), weight, 1e-5))
    assert_close(rms_norm_ref(x, weight, 1e-5), theirs(x).detach())
    gemma = Gemma2RMSNorm(64, eps=1e-5).to(device)
    gemma.weight.data.copy_(weight)
    assert_close(rms_norm_ref(x, weight, 1e-5, weight_offset=1.0), gemma(x).detach())


@given(rows=st.integers(1, 4), n=st.integers(1, 200))
def test_fused_is_two_steps(device, rows, n):
    """Bit for bit: the norm is of the sum as it is stored, not of the one before it was rounded."""
    x, residual = (torch.randn(rows, n).to(device, torch.bfloat16) for _ in range(2))
    weight = torch.randn(n, device=device)
    total = x + residual
    config = {"BLOCK": 256, "ROWS": 1, "num_warps": 1}
    with tuning.override("rms_norm", config), tuning.override("fused_add_rms_norm", config):
        expected = rms_norm(total, weight)
        fused_add_rms_norm(x, residual, weight)
    assert torch.equal(x, expected)


def test_fused_reference_is_two_steps(device):
    x, residual = torch.randn(3, 64, device=device).bfloat16(), torch.randn(3, 64, device=device).bfloat16()
    weight = torch.randn(64, device=device)
    total = x + residual
    fused_add_rms_norm_ref(x, residual, weight)
    assert torch.equal(residual, total)
    assert torch.equal(x, rms_norm_ref(total, weight))


@pytest.mark.parametrize(
    ("x", "weight", "kwargs", "names"),
    [
        (torch.zeros(()), torch.zeros(1), {}, "x must have shape"),
        (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4), {}, "x must be torch.float16"),
        (torch.zeros(4, 2).t(), torch.zeros(4), {}, "x must be contiguous"),
        (torch.zeros(2, 4), torch.zeros(5), {}, r"weight must have shape \[4\]"),
        (torch.zeros(2, 4), None, {}, "weight must be a torch.Tensor"),
        (torch.zeros(2, 4), torch.zeros(2, 4), {}, r"weight must have shape \[4\]"),
        (torch.zeros(1, 2, 4), torch.zeros(3, 4), {}, r"weight must have shape \[2, 4\]"),
        (torch.zeros(1, 2, 4), torch.zeros(2, 8)[:, :4], {}, "weight must be contiguous if it has a row for each head"),
        (torch.zeros(2, 4), torch.zeros(4, dtype=torch.int64), {}, "weight must be torch.float16"),
        (torch.zeros(2, 4), torch.zeros(4, device="meta"), {}, "weight must be on cpu"),
        (torch.zeros(2, 4), torch.zeros(4), {"out": torch.zeros(2, 5)}, r"out must have shape \[2, 4\]"),
        (torch.zeros(2, 2, 2, 4), torch.zeros(4), {"out": torch.zeros(2, 2, 2, 5)[..., :4]}, "out must be contiguous"),
    ],
)
def test_bad_arguments(x, weight, kwargs, names):
    with pytest.raises(ValueError, match=names):
        rms_norm(x, weight, **kwargs)


@pytest.mark.parametrize("residual", [torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.int32), None])
def test_bad_residual(residual):
    with pytest.raises(ValueError, match="residual must"):
        fused_add_rms_norm(torch.zeros(2, 4), residual, torch.zeros(4))


@pytest.mark.parametrize("in_place", [False, True])
def test_operator(device, in_place):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    x, residual, weight, out = torch.randn(4, 3, 8, device=device).unbind()
    if in_place:
        arguments = (x, residual, x, None, 1.0, weight[0], weight[1], 1e-6, 0.0, True, False)
    else:
        arguments = (x, None, out, None, 1.0, None, None, 1e-6, 1.0, False, True)
    torch.library.opcheck(torch.ops.tritonllm.norm.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "n"), [(1, 4096), (64, 1024), (4096, 4096), (1000, 8192), (2000, 8192), (16, 16384), (4, 20000)]
)
def test_real_shapes(device, dtype, rows, n):
    x = torch.randn(rows, n, device=device, dtype=dtype)
    residual, weight = torch.randn_like(x), torch.randn(n, device=device, dtype=dtype)
    out = poisoned(rows, n, dtype=dtype, device=device)
    assert_close(rms_norm(x, weight, out=out), rms_norm_ref(x.float(), weight.float()))
    total = x + residual
    fused_add_rms_norm(x, residual, weight)
    assert torch.equal(residual, total)
    assert_close(x, rms_norm_ref(total.float(), weight.float()))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_head_norm_at_real_shapes(device, tokens):
    """Qwen3: 16 query and 8 key heads of 128 in one projection."""
    qkv = torch.randn(tokens, 32 * 128, device=device, dtype=torch.bfloat16)
    weight = torch.randn(128, device=device, dtype=torch.bfloat16)
    q = qkv[:, : 16 * 128].view(tokens, 16, 128)
    expected = rms_norm_ref(q.float(), weight.float())
    rms_norm(q, weight, out=q)
    assert_close(q, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4096])
def test_gemma_at_real_shapes(device, tokens):
    """Gemma 2 9B: 3584 channels, weights less 1."""
    x, residual = torch.randn(2, tokens, 3584, device=device, dtype=torch.bfloat16).unbind()
    weight = torch.randn(3584, device=device, dtype=torch.bfloat16)
    total = (x.double() * 0.25 + residual.double()).bfloat16()
    fused_add_rms_norm(x, residual, weight, weight_offset=1.0, x_scale=0.25)
    assert torch.equal(residual, total)  # a power of two: the product is exact
    assert_close(x, rms_norm_ref(total.float(), weight, weight_offset=1.0))


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """2^31 elements and more: the last row is right."""
    n = 8192
    x = torch.zeros(2**31 // n + 3, n, device=device, dtype=torch.bfloat16)
    x[-1].normal_()
    weight = torch.randn(n, device=device)
    expected = rms_norm_ref(x[-1].float(), weight)
    rms_norm(x, weight, out=x)
    assert_close(x[-1], expected)


@pytest.mark.gpu
def test_fullgraph_compile(device):
    x, residual, weight = (torch.randn(8, 64, device=device) for _ in range(3))
    weight = weight[0]

    def block(x, residual):
        normed, residual = fused_add_rms_norm(x.clone(), residual.clone(), weight)
        return rms_norm(normed, weight, out=normed) + residual

    assert_close(torch.compile(block, fullgraph=True)(x, residual), block(x, residual))
