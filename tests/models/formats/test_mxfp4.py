"""MXFP4 tensors of gpt-oss: bit for bit what the specification says, in any part of the tensor."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.compare import FLOATS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tritonllm.models.formats.joining import join
from tritonllm.models.formats.mxfp4 import Mxfp4
from tritonllm.models.tensor_files import describe, open_tensors, stored_tensors


class InMemory:
    """A file of tensors that were made here."""

    def __init__(self, tensors):
        self.tensors = tensors

    def window(self, name, index):
        return self.tensors[name][index]


def widen(blocks, scales, dtype, *, device="cpu", part=None):
    """``[E, rows, columns]``: what the format makes of all experts, or of a part (axis, begin, end) of each."""
    tensors = {"x_blocks": blocks, "x_scales": scales}
    joined = join({name: describe(tensor) for name, tensor in tensors.items()}, Mxfp4())
    assert joined.keys() == {"x"} and joined["x"].shape == (len(blocks), 32 * blocks.shape[2], blocks.shape[1])
    turned = None if part is None else (1 - part[0], *part[1:])
    pieces = [joined["x"].piece(InMemory(tensors), e, turned, torch.device(device)) for e in range(len(blocks))]
    return torch.stack([piece.widen(dtype) for piece in pieces])


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
    (out,) = widen(packed.expand(1, 256, 1, 16), scales[None, :, None], dtype)
    assert out.shape == (256, 32)
    assert out.dtype == dtype
    expected = [[exact(nibble, scale) for nibble in range(16)] * 2 for scale in range(256)]
    expected = torch.tensor(expected, dtype=torch.float64).float().to(dtype)
    same = (out == expected) & (out.signbit() == expected.signbit())
    assert (same | (out.isnan() & expected.isnan())).all()
    assert (out.isnan().sum(1) == 32).tolist() == [False] * 255 + [True]


@given(
    experts=st.integers(1, 3),
    rows=st.integers(1, 4),
    groups=st.integers(1, 3),
    dtype=st.sampled_from(FLOATS),
    data=st.data(),
)
def test_any_part(experts, rows, groups, dtype, data):
    """Element j of a row is nibble j, in any rows and in any columns, which may cut through blocks and bytes."""
    blocks, scales = random_blocks(experts, rows, groups, low=100, high=140)
    axis = data.draw(st.sampled_from([0, 1]))
    begin = data.draw(st.integers(0, (rows, 32 * groups)[axis] - 1))
    end = data.draw(st.integers(begin + 1, (rows, 32 * groups)[axis]))
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten().tolist()
    factors = scales.unsqueeze(-1).expand(*scales.shape, 32).flatten().tolist()
    expected = [exact(nibble, scale) for nibble, scale in zip(nibbles, factors, strict=True)]
    whole = torch.tensor(expected, dtype=torch.float64).to(dtype).view(experts, rows, -1)
    got = widen(blocks, scales, dtype, part=(axis, begin, end))
    assert torch.equal(got, whole.narrow(axis + 1, begin, end - begin))


@pytest.mark.parametrize("dtype", FLOATS)
def test_matches_transformers(dtype):
    """Whose converter also turns the rows and columns of each expert."""
    blocks, scales = random_blocks(3, 10, 4, low=100, high=135)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    assert torch.equal(widen(blocks, scales, dtype), expected)


@pytest.mark.gpu
def test_gpu_equals_cpu(device):
    """An expert of gpt-oss-20b."""
    blocks, scales = random_blocks(1, 5760, 90, low=100, high=140)
    for dtype in FLOATS:
        assert torch.equal(widen(blocks, scales, dtype, device=device).cpu(), widen(blocks, scales, dtype))


def packed(experts: int = 2, rows: int = 3, groups: int = 2) -> dict[str, torch.Tensor]:
    return dict(zip(("x_blocks", "x_scales"), random_blocks(experts, rows, groups, low=120, high=130), strict=True))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_parts_of_one_tensor_in_two_files(tmp_path, kind):
    tensors = packed()
    for name, tensor in tensors.items():
        save = save_file if kind == "safetensors" else torch.save
        save({name: tensor}, tmp_path / f"{name}.{kind}")
    stored = {}
    for name in tensors:
        with open_tensors(tmp_path / f"{name}.{kind}") as file:
            stored |= file.headers()
    joined = join(stored, Mxfp4())["x"]
    assert (joined.dtype, joined.num_bytes) == ("MXFP4", 2 * 3 * 2 * 17)
    with open_tensors(joined.path) as file:
        got = [joined.piece(file, e, None, torch.device("cpu")).widen(torch.float32) for e in range(2)]
    assert torch.equal(torch.stack(got), widen(*tensors.values(), torch.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("x_scales"), "needs x_scales of type U8 and shape .2, 3, 2., which is missing"),
        (lambda t: t.update(x_scales=torch.zeros(2, 3, 2)), "x_scales of type U8 .* which is F32"),
        (lambda t: t.update(x_scales=t["x_scales"][:, :2].clone()), "x_scales .* which is U8 .2, 2, 2."),
        (lambda t: t.update(x_blocks=t["x_blocks"][..., :8].clone()), "is not MXFP4: that has 16 bytes in a block"),
        (lambda t: t.update(x=torch.zeros(2, 64, 3)), "^tensors x and x_blocks hold the same weights"),
    ],
)
def test_bad_tensors(tmp_path, change, message):
    tensors = packed()
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as error:
        join(stored_tensors(tmp_path), Mxfp4())
    assert "x_blocks" in str(error.value)


def test_names_that_only_look_like_it(tmp_path):
    save_file({"x_blocks": torch.zeros(2), "y_scales": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert join(stored_tensors(tmp_path), Mxfp4()).keys() == {"x_blocks", "y_scales"}
