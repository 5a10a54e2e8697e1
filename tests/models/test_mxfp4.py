import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tritonllm.models import mxfp4
from tritonllm.models.mxfp4 import dequantize_mxfp4


def element(nibble: int) -> Fraction:
    """E2M1 from its bits: an exponent of 0 has no leading one."""
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    magnitude = Fraction(2 + mantissa, 2) * 2 ** (exponent - 1) if exponent else Fraction(mantissa, 2)
    return -magnitude if nibble & 8 else magnitude


def exact(nibble: int, scale: int) -> float:
    """As a Python float, which holds every product exactly."""
    if scale == 255:
        return math.nan
    value = float(element(nibble) * Fraction(2) ** (scale - 127))
    return -0.0 if nibble == 8 else value


def random_blocks(*shape, low=0, high=256):
    return (
        torch.randint(256, (*shape, 16), dtype=torch.uint8),
        torch.randint(low, high, shape, dtype=torch.uint8),
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_element_with_every_scale(dtype):
    """All 16 x 256 products; bit for bit, the sign of zero included (a NaN has many forms)."""
    packed = torch.tensor([(2 * pair + 1) << 4 | 2 * pair for pair in range(8)] * 2, dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)
    out = dequantize_mxfp4(packed.expand(256, 1, 16), scales[:, None], dtype)
    assert out.shape == (256, 32)
    assert out.dtype == dtype
    expected = [[exact(nibble, scale) for nibble in range(16)] * 2 for scale in range(256)]
    expected = torch.tensor(expected, dtype=torch.float64).to(dtype)
    same = (out == expected) & (out.signbit() == expected.signbit())
    assert (same | (out.isnan() & expected.isnan())).all()
    assert (out.isnan().sum(1) == 32).tolist() == [False] * 255 + [True]


@given(
    leading=st.lists(st.integers(0, 4), max_size=3),
    groups=st.integers(0, 3),
    dtype=st.sampled_from(FLOATS),
    piece=st.sampled_from([16, 100, 1 << 20]),
)
def test_shapes_and_pieces(leading, groups, dtype, piece):
    """Whatever the shape and the number of pieces, element j of a row is nibble j."""
    blocks, scales = random_blocks(*leading, groups, low=100, high=140)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mxfp4, "_PIECE", piece)
        out = dequantize_mxfp4(blocks, scales, dtype)
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).flatten().tolist()
    factors = scales.unsqueeze(-1).expand(*scales.shape, 32).flatten().tolist()
    expected = [exact(nibble, scale) for nibble, scale in zip(nibbles, factors, strict=True)]
    assert out.shape == (*leading, groups * 32)
    assert torch.equal(out.flatten(), torch.tensor(expected, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_transformers(dtype):
    """Whose converter also turns the rows and columns of each expert."""
    blocks, scales = random_blocks(3, 10, 4, low=100, high=135)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(dequantize_mxfp4(blocks, scales, dtype), expected)


def test_slices_of_a_checkpoint_tensor():
    """Some rows of each expert, as for one rank of several."""
    blocks, scales = random_blocks(3, 8, 2, low=100, high=140)
    whole = dequantize_mxfp4(blocks, scales, torch.bfloat16)
    assert torch.equal(dequantize_mxfp4(blocks[:, 2:5], scales[:, 2:5], torch.bfloat16), whole[:, 2:5])


@pytest.mark.parametrize("dtype", FLOATS)
def test_memory_beyond_the_result_is_that_of_a_piece(monkeypatch, dtype):
    """Counted by the allocator: 16 pieces of 64 KiB of blocks."""
    monkeypatch.setattr(mxfp4, "_PIECE", 1 << 16)
    blocks, scales = random_blocks(16, 64, 64, low=100, high=140)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = dequantize_mxfp4(blocks, scales, dtype)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    times = 17 if dtype is torch.float16 else 4
    assert out.nbytes <= peak <= out.nbytes + (times + 0.5) * (1 << 16)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"blocks": torch.zeros(2, 3, 15, dtype=torch.uint8)}, r"blocks must have shape \[\*, \*, 16\]"),
        ({"blocks": torch.zeros(16, dtype=torch.uint8)}, r"blocks must have shape \[..., G, 16\], got \[16\]"),
        ({"blocks": torch.zeros(2, 3, 16, dtype=torch.int8)}, "blocks must be torch.uint8, got torch.int8"),
        ({"scales": torch.zeros(2, 4, dtype=torch.uint8)}, r"scales must have shape \[2, 3\], got \[2, 4\]"),
        ({"scales": torch.zeros(2, 3)}, "scales must be torch.uint8, got torch.float32"),
        ({"scales": torch.zeros(2, 3, dtype=torch.uint8, device="meta")}, "scales must be on cpu"),
        ({"dtype": torch.int32}, "dtype must be float16, bfloat16 or float32, got torch.int32"),
    ],
)
def test_bad_arguments(changes, names):
    good = {
        "blocks": torch.zeros(2, 3, 16, dtype=torch.uint8),
        "scales": torch.zeros(2, 3, dtype=torch.uint8),
        "dtype": torch.bfloat16,
    }
    with pytest.raises(ValueError, match=names):
        dequantize_mxfp4(**{**good, **changes})


@pytest.mark.gpu
def test_gpu_equals_cpu(device):
    """An expert of gpt-oss-20b."""
    blocks, scales = random_blocks(2, 5760, 90, low=100, high=140)
    for dtype in FLOATS:
        out = dequantize_mxfp4(blocks.to(device), scales.to(device), dtype)
        assert torch.equal(out.cpu(), dequantize_mxfp4(blocks, scales, dtype))
