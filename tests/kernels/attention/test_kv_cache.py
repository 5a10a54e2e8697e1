from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention import E5M2, FLOAT8, FP8, LAYOUTS, nan_caches
from support.compare import FLOATS

from tritonllm.kernels import copy_blocks, copy_blocks_ref, store_kv, store_kv_ref
from tritonllm.kernels.attention.common import check_float8
from tritonllm.kernels.runtime import float8, tuning
from tritonllm.kernels.runtime.chip import Chip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included: both operations only move numbers, or round them once."""
    a, b = a.float(), b.float()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def fused_kv(tokens: int, kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device):
    """k and v as slices of a fused q, k, v projection with one query head."""
    fused = (torch.randn(tokens, 1 + 2 * kv_heads, head_size) * 8).to(device, dtype)
    return fused[:, 1 : 1 + kv_heads], fused[:, 1 + kv_heads :]


def check_store(k, v, caches, slots, **scales) -> None:
    want = [cache.clone() for cache in caches]
    assert store_kv(k, v, *caches, slots, **scales) is None
    store_kv_ref(k, v, *want, slots, **scales)
    for got, expected in zip(caches, want, strict=True):
        assert same_bits(got, expected)


@given(
    tokens=st.integers(0, 9),
    kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([1, 8, 24, 64]),
    block_size=st.sampled_from([1, 3, 16, 256]),
    dtype=st.sampled_from(FLOATS),
    float8=st.sampled_from(list(FLOAT8)),
    layout=st.sampled_from(LAYOUTS),
    k_scale=st.sampled_from([None, 0.3, "heads"]),
    v_scale=st.sampled_from([None, 0.01, "heads"]),  # 0.01: beyond float8's range
    config=st.sampled_from([{"BLOCK_T": 1, "BLOCK": 64}, {"BLOCK_T": 4, "BLOCK": 32}]),
    skip=st.integers(0, 3),
)
def test_store_matches_reference(
    device, tokens, kv_heads, head_size, block_size, dtype, float8, layout, k_scale, v_scale, config, skip
):
    k, v = fused_kv(tokens, kv_heads, head_size, dtype, device)
    shape = (tokens // block_size + 2, block_size, kv_heads, head_size)
    slots = torch.randperm(shape[0] * block_size)[:tokens]
    slots[:skip] = -1
    heads = torch.rand(kv_heads, device=device) + 0.01
    scales = {"k_scale": heads if k_scale == "heads" else k_scale, "v_scale": heads if v_scale == "heads" else v_scale}
    with tuning.override("store_kv", {**config, "num_warps": 4}):
        check_store(k, v, nan_caches(shape, layout, FLOAT8[float8] or dtype, device), slots.to(device), **scales)


def test_store_then_read(device):
    """The reference itself: each token is found in its block and place; all other slots are as they were."""
    k, v = torch.randn(2, 3, 2, 8, device=device)
    k_cache, v_cache = torch.zeros(2, 4, 4, 2, 8, device=device)
    store_kv(k, v, k_cache, v_cache, torch.tensor([13, -1, 2], device=device))
    assert (k_cache[3, 1] == k[0]).all() and (k_cache[0, 2] == k[2]).all()
    assert (v_cache[3, 1] == v[0]).all() and (v_cache[0, 2] == v[2]).all()
    for cache in (k_cache, v_cache):
        cache[3, 1] = cache[0, 2] = 0
        assert (cache == 0).all()


@pytest.mark.parametrize(("dtype", "most"), [(FP8, 448.0), (E5M2, 57344.0)], ids=str)
def test_float8_saturates(device, dtype, most):
    inf = float("inf")
    k = torch.tensor([most, most * 1.002, 1e9, -1e9, inf, -inf, float("nan"), 1e-9], device=device)
    cache = torch.zeros(1, 1, 1, 8, device=device).to(dtype)
    store_kv(k.view(1, 1, 8), k.view(1, 1, 8), cache, cache.clone(), torch.zeros(1, dtype=torch.int64, device=device))
    want = torch.tensor([most, most, most, -most, most, -most, float("nan"), 0.0], device=device)
    assert same_bits(cache.view(8), want)


@given(
    blocks=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([1, 8, 24]),
    block_size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from([*FLOATS, FP8, E5M2]),
    layout=st.sampled_from(LAYOUTS),
    count=st.integers(0, 4),
    skip=st.integers(0, 2),
)
def test_copy_matches_reference(device, blocks, kv_heads, head_size, block_size, dtype, layout, count, skip):
    caches = nan_caches((blocks + count, block_size, kv_heads, head_size), layout, dtype, device)
    for cache in caches:
        cache[:blocks] = torch.randn(cache[:blocks].shape, device=device).to(dtype)
    want = [cache.clone() for cache in caches]
    pairs = torch.stack([torch.randint(blocks, (count,)), blocks + torch.randperm(count)], dim=1)
    pairs[:skip, 0] = -1
    with tuning.override("copy_blocks", {"BLOCK": 64, "num_warps": 4}):
        assert copy_blocks(*caches, pairs.to(device)) is None
    copy_blocks_ref(*want, pairs.to(device))
    for got, expected in zip(caches, want, strict=True):
        assert same_bits(got, expected)


def test_copy_reference(device):
    k_cache, v_cache = torch.randn(2, 4, 3, 2, 8, device=device)
    before = k_cache.clone(), v_cache.clone()
    copy_blocks(k_cache, v_cache, torch.tensor([[0, 2], [-1, 3], [0, -1]], device=device))
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        assert (cache[2] == old[0]).all() and (cache[[0, 1, 3]] == old[[0, 1, 3]]).all()


CACHE = torch.zeros(4, 16, 2, 64)
BAD_STORE = [
    ({"k": torch.zeros(3, 2, 64, dtype=torch.int32)}, "k must be torch.float16"),
    ({"k": torch.zeros(3, 2, 32)}, "v must have shape"),
    ({"v": torch.zeros(3, 2, 64).half()}, "v must be torch.float32"),
    ({"k": torch.zeros(3, 64, 2).transpose(1, 2)}, "k must be contiguous in its last dimension"),
    ({"k_cache": torch.zeros(4, 16, 1, 64)}, "k_cache must have shape"),
    ({"k_cache": torch.zeros(4, 2, 16, 64)}, r"heads before its slots: the cache is \[blocks, block_size, kv_heads"),
    ({"k_cache": CACHE.half(), "v_cache": CACHE.half()}, "k_cache .* must have the dtype of k"),
    ({"v_cache": torch.zeros(5, 16, 2, 64)}, "v_cache must have shape"),
    ({"k_cache": torch.zeros(1, 300, 2, 64), "v_cache": torch.zeros(1, 300, 2, 64)}, "blocks of 1 to 256 slots"),
    ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping must be torch.int64"),
    ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping must have shape"),
    ({"k_scale": -1.0}, "k_scale must be positive"),
    ({"v_scale": torch.ones(3)}, "v_scale must have shape"),
]
BAD_COPY = [
    ({"k_cache": torch.zeros(4, 16, 2, 64, dtype=torch.int32)}, "k_cache must be"),
    ({"v_cache": CACHE.half()}, "v_cache must be torch.float32"),
    ({"pairs": torch.zeros(3, 3, dtype=torch.int64)}, "pairs must have shape"),
    ({"pairs": torch.zeros(3, 2, dtype=torch.int32)}, "pairs must be torch.int64"),
]


@pytest.mark.parametrize(("change", "message"), BAD_STORE, ids=[message for _, message in BAD_STORE])
def test_bad_store_arguments(change, message):
    good = {"k": torch.zeros(3, 2, 64), "v": torch.zeros(3, 2, 64), "k_cache": CACHE, "v_cache": CACHE}
    good["slot_mapping"] = torch.zeros(3, dtype=torch.int64)
    for fn in (store_kv, store_kv_ref):
        with pytest.raises(ValueError, match=message):
            fn(**{**good, **change})


@pytest.mark.parametrize(("change", "message"), BAD_COPY, ids=[message for _, message in BAD_COPY])
def test_bad_copy_arguments(change, message):
    good = {"k_cache": CACHE, "v_cache": CACHE, "pairs": torch.zeros(1, 2, dtype=torch.int64)}
    for fn in (copy_blocks, copy_blocks_ref):
        with pytest.raises(ValueError, match=message):
            fn(**{**good, **change})


@pytest.mark.parametrize(("arch", "fits"), [(80, False), (89, True), (90, True), ("gfx942", False)])
def test_float8_needs_a_gpu_that_knows_it(monkeypatch, arch, fits):
    monkeypatch.setattr(float8, "chip_of", lambda device: Chip("cuda", arch, 132))
    cache, other = (SimpleNamespace(dtype=dtype, device=torch.device("cuda")) for dtype in (FP8, E5M2))
    with nullcontext() if fits else pytest.raises(ValueError, match=r"k_cache is .* use a cache of torch.float8_e5m2"):
        check_float8(cache)
    check_float8(other)


def test_operators(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    k, v = torch.randn(2, 3, 2, 8, device=device)
    caches = torch.zeros(2, 4, 4, 2, 8, device=device).unbind()
    slots, pairs = torch.tensor([1, 5, -1], device=device), torch.tensor([[0, 1]], device=device)
    torch.library.opcheck(torch.ops.tritonllm.store_kv.default, (k, v, *caches, slots, None, None, 1.0, 1.0))
    torch.library.opcheck(torch.ops.tritonllm.copy_blocks.default, (*caches, pairs))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("float8", FLOAT8)
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_real_shapes(device, dtype, float8, tokens):
    for kv_heads, head_size, block_size in ((8, 128, 16), (2, 64, 128), (4, 80, 7)):
        k, v = fused_kv(tokens, kv_heads, head_size, dtype, device)
        shape = (tokens // block_size + 2, block_size, kv_heads, head_size)
        slots = torch.randperm(shape[0] * block_size, device=device)[:tokens]
        check_store(k, v, nan_caches(shape, "pool", FLOAT8[float8] or dtype, device), slots)


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """The last block of a pool of more than 2^31 elements, stored to and then copied."""
    blocks = 2**31 // (2 * 16 * 8 * 128) + 3
    pool = torch.zeros(blocks, 2, 16, 8, 128, dtype=torch.bfloat16, device=device)
    k, v = torch.randn(2, 16, 8, 128, dtype=torch.bfloat16, device=device)
    store_kv(k, v, pool[:, 0], pool[:, 1], torch.arange(16, device=device) + (blocks - 1) * 16)
    assert (pool[-1, 0] == k).all() and (pool[-1, 1] == v).all()
    copy_blocks(pool[:, 0], pool[:, 1], torch.tensor([[blocks - 1, blocks - 2]], device=device))
    assert (pool[-2] == pool[-1]).all()


@pytest.mark.gpu
def test_fullgraph_compile(device):
    k, v = torch.randn(2, 3, 2, 8, device=device)
    caches = [torch.zeros(4, 4, 2, 8, device=device) for _ in range(2)]  # not of one tensor: see `store_kv`
    want = [cache.clone() for cache in caches]
    slots = torch.tensor([1, 5, -1], device=device)
    torch.compile(store_kv, fullgraph=True)(k, v, *caches, slots, k_scale=0.5)
    store_kv_ref(k, v, *want, slots, k_scale=0.5)
    assert all(same_bits(got, expected) for got, expected in zip(caches, want, strict=True))
