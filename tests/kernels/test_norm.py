import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tritonllm.kernels import fused_add_rms_norm, fused_add_rms_norm_ref, rms_norm, rms_norm_ref, tuning

dtypes = st.sampled_from(FLOATS)
scales = st.sampled_from([1e-3, 1.0, 1e4])  # 1e-3: eps counts; 1e4: squares beyond float16
SMALL_BLOCKS = {"BLOCK": 32, "ROWS": 2, "num_warps": 1}  # rows of more than one block


@given(
    rows=st.integers(0, 5),
    n=st.integers(1, 300),
    dtype=dtypes,
    weight_dtype=dtypes,
    scale=scales,
    padding=st.integers(0, 3),
)
def test_matches_reference(device, rows, n, dtype, weight_dtype, scale, padding):
    x = with_row_padding((torch.randn(rows, n) * scale).to(device, dtype), padding)
    weight = torch.randn(n).to(device, weight_dtype)
    out = poisoned(rows, n, dtype=dtype, device=device)
    assert rms_norm(x, weight, 1e-5, out=out) is out
    assert_close(out, rms_norm_ref(x.float(), weight.float(), 1e-5))


@given(tokens=st.integers(0, 3), heads=st.integers(1, 5), n=st.integers(1, 40), dtype=dtypes)
def test_heads_of_a_fused_projection_in_place(device, tokens, heads, n, dtype):
    """Rows with two strides, normalised where they are; what lies around them stays."""
    qkv = torch.randn(tokens, (heads + 2) * n).to(device, dtype)
    before = qkv.clone()
    weight = torch.randn(n, device=device)
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
    padding=st.integers(0, 3),
)
def test_fused_add_matches_reference(device, rows, n, dtype, residual_dtype, scale, padding):
    x = with_row_padding((torch.randn(rows, n) * scale).to(device, dtype), padding)
    residual = with_row_padding((torch.randn(rows, n) * scale).to(device, residual_dtype), padding + 1)
    weight = torch.randn(n, device=device)
    total = (x.float() + residual.float()).to(residual_dtype)
    normed, added = fused_add_rms_norm(x, residual, weight)
    assert normed is x
    assert added is residual
    assert torch.equal(residual, total)
    assert_close(x, rms_norm_ref(total.float(), weight))


@given(rows=st.integers(1, 5), n=st.integers(1, 100), dtype=dtypes)
def test_rows_of_several_blocks(device, rows, n, dtype):
    x = torch.randn(rows, n).to(device, dtype)
    residual = torch.randn(rows, n).to(device, dtype)
    weight = torch.randn(n, device=device)
    out = poisoned(rows, n, dtype=dtype, device=device)
    expected = (x.clone(), residual.clone())
    fused_add_rms_norm_ref(*expected, weight)
    with tuning.override("rms_norm", SMALL_BLOCKS), tuning.override("fused_add_rms_norm", SMALL_BLOCKS):
        rms_norm(x, weight, out=out)
        assert_close(out, rms_norm_ref(x.float(), weight))
        fused_add_rms_norm(x, residual, weight)
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


def test_operators(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    x, y, weight = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device), torch.randn(8, device=device)
    torch.library.opcheck(torch.ops.tritonllm.rms_norm.default, (x, weight, y, 1e-6))
    torch.library.opcheck(torch.ops.tritonllm.fused_add_rms_norm.default, (x, y, weight, 1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n"), [(1, 4096), (64, 1024), (4096, 4096), (1000, 8192), (16, 16384), (4, 20000)])
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
