import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.kernels import pack_blocks, pack_blocks_ref, unpack_blocks, unpack_blocks_ref
from tritonllm.kernels.runtime import tuning

FP8 = torch.float8_e4m3fn


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@given(
    rows=st.integers(1, 5),
    blocks=st.integers(1, 6),
    elements=st.sampled_from([1, 8, 24, 130]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, FP8, torch.float8_e5m2]),
    count=st.integers(0, 6),
    skip=st.integers(0, 2),
)
def test_matches_reference(device, rows, blocks, elements, dtype, count, skip):
    pool = torch.randn(rows, blocks, elements, device=device).to(dtype)
    ids = torch.randperm(blocks)[:count].to(device)
    ids[:skip] = -1
    packed = torch.full((len(ids), rows, elements), float("nan"), device=device).to(dtype)
    want = packed.clone()
    with tuning.override("pack_blocks", {"BLOCK": 64, "num_warps": 4}):
        assert pack_blocks(pool, ids, packed) is None
        pack_blocks_ref(pool, ids, want)
        assert torch.equal(bits(packed), bits(want))
        target, expected = torch.zeros_like(pool), torch.zeros_like(pool)
        assert unpack_blocks(packed, ids, target) is None
        unpack_blocks_ref(want, ids, expected)
    assert torch.equal(bits(target), bits(expected))


@given(
    rows=st.integers(1, 5),
    elements=st.sampled_from([1, 24, 130]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, FP8, torch.float8_e5m2]),
    count=st.integers(0, 6),
    skip=st.integers(0, 2),
)
def test_places_match_reference(device, rows, elements, dtype, count, skip):
    """Rows of a longer tensor, in any order; the others stay as they are."""
    pool = torch.randn(rows, 6, elements, device=device).to(dtype)
    ids, places = torch.randperm(6)[:count].to(device), torch.randperm(9)[:count].to(device)
    ids[:skip] = -1
    packed = torch.full((9, rows, elements), float("nan"), device=device).to(dtype)
    want = packed.clone()
    with tuning.override("pack_blocks", {"BLOCK": 64, "num_warps": 4}):
        pack_blocks(pool, ids, packed, places=places)
        pack_blocks_ref(pool, ids, want, places=places)
        assert torch.equal(bits(packed), bits(want))
        target, expected = torch.zeros_like(pool), torch.zeros_like(pool)
        unpack_blocks(packed, ids, target, places=places)
        unpack_blocks_ref(want, ids, expected, places=places)
    assert torch.equal(bits(target), bits(expected))
    for block in ids[ids >= 0].tolist():
        assert torch.equal(bits(target[:, block]), bits(pool[:, block]))


def test_reference(device):
    """Piece r of block i lies at [i, r], and goes back to where it was; the other blocks stay."""
    pool = torch.arange(2 * 4 * 3, dtype=torch.float32, device=device).view(2, 4, 3)
    ids = torch.tensor([3, -1, 0], device=device)
    packed = torch.full((3, 2, 3), -1.0, device=device)
    pack_blocks_ref(pool, ids, packed)
    assert packed.tolist() == [pool[:, 3].tolist(), [[-1.0] * 3] * 2, pool[:, 0].tolist()]
    target = torch.zeros_like(pool)
    unpack_blocks_ref(packed, ids, target)
    assert torch.equal(target[:, [0, 3]], pool[:, [0, 3]]) and not target[:, [1, 2]].any()


POOL, IDS, PACKED = torch.zeros(2, 4, 8), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": torch.zeros(2, 8)}, r"pool must have shape \[R, P, E\]"),
        ({"pool": POOL.int()}, "pool must be torch.float16"),
        ({"pool": torch.zeros(4, 2, 8).transpose(0, 1)}, "pool must be contiguous: pass"),
        ({"blocks": IDS.int()}, r"blocks must be torch.int64.*: use blocks.to"),
        ({"packed": PACKED[:2]}, "packed must have shape"),
        ({"packed": PACKED.half()}, "packed must be torch.float32"),
        ({"packed": torch.zeros(3, 8, 2).transpose(1, 2)}, "packed must be contiguous in its last dimension"),
        ({"packed": torch.zeros(2, 3, 8).transpose(0, 1)}, "packed must be contiguous: pass"),
        ({"places": IDS[:2]}, "places must have shape"),
        ({"places": IDS.int()}, "places must be torch.int64"),
        ({"places": IDS, "packed": torch.zeros(9, 3, 8)}, "packed must have shape"),
    ],
)
def test_bad_arguments(change, message):
    good = {"pool": POOL, "blocks": IDS, "packed": PACKED}
    for fn in (pack_blocks, pack_blocks_ref, unpack_blocks, unpack_blocks_ref):
        with pytest.raises(ValueError, match=message):
            fn(**{**good, **change})


def test_opcheck(device):
    pool, ids, packed = POOL.to(device), IDS.to(device), PACKED.to(device)
    torch.library.opcheck(torch.ops.tritonllm.pack_blocks.default, (pool, ids, packed, None))
    torch.library.opcheck(torch.ops.tritonllm.unpack_blocks.default, (packed, ids, pool, ids))


@pytest.mark.gpu
def test_real_shapes(device):
    """A pool beyond 2^31 elements, whose last block goes out and comes back."""
    rows, elements = 64, 16 * 8 * 128
    blocks = 2**31 // (rows * elements) + 2
    pool = torch.zeros(rows, blocks, elements, dtype=torch.bfloat16, device=device)
    pool[:, -1] = torch.randn(rows, elements, device=device)
    want = pool[:, -1].clone()
    ids = torch.tensor([blocks - 1, 0], device=device)
    packed = torch.empty(2, rows, elements, dtype=torch.bfloat16, device=device)
    pack_blocks(pool, ids, packed)
    assert torch.equal(packed[0], want) and not packed[1].any()
    pool[:, -1] = 0
    unpack_blocks(packed, ids, pool)
    assert torch.equal(pool[:, -1], want) and not pool[:, -2].any()
