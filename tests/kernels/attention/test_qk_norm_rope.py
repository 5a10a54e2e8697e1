import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention import E5M2, FLOAT8, FP8, LAYOUTS, nan_caches
from support.compare import FLOATS, assert_close, with_row_padding

from tritonllm.kernels import (
    apply_rope,
    build_cos_sin_cache,
    qk_norm_rope_store,
    qk_norm_rope_store_ref,
    rms_norm,
    store_kv,
)
from tritonllm.kernels.runtime import tuning

POSITIONS = 40


def case(tokens, heads, kv_heads, head_size, *, dtype, device, block_size=16, float8=False, layout="apart"):
    """Rows, caches full of NaN, and a slot for each token."""
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_size).to(device, dtype)
    shape = (tokens // block_size + 2, block_size, kv_heads, head_size)
    slots = torch.randperm(shape[0] * block_size)[:tokens].to(device)
    return qkv, nan_caches(shape, layout, FLOAT8[float8] or dtype, device), slots


def check(qkv, caches, slots, *rope, **options) -> None:
    """Against the reference in float32; keys and values in the rows, and all other slots, stay as they are."""
    before = qkv.clone()
    # A float8 cache: in the dtype of the rows, whose roundings decide on which side of a float8 step a number falls.
    dtype = qkv.dtype if caches[0].dtype in (FP8, E5M2) else torch.float32
    want = [cache.clone() if cache.dtype in (FP8, E5M2) else cache.float() for cache in caches]
    want_q = qk_norm_rope_store_ref(qkv.to(dtype, copy=True), *want, slots, *rope, **options)
    q = qk_norm_rope_store(qkv, *caches, slots, *rope, **options)
    assert q.data_ptr() == qkv.data_ptr()
    assert_close(q, want_q, qkv.dtype)
    kept = q.shape[1] * q.shape[2]
    assert torch.equal(qkv[:, kept:], before[:, kept:])
    for got, expected in zip(caches, want, strict=True):
        got, expected = got.float(), expected.float()
        assert torch.equal(got.isnan(), expected.isnan())
        assert_close(got.nan_to_num(), expected.nan_to_num(), qkv.dtype)


@given(
    tokens=st.integers(0, 4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_size=st.sampled_from([16, 24, 40, 64]),
    rotary=st.sampled_from([0, 2, 10, 16, "all"]),
    interleaved=st.booleans(),
    norm=st.sampled_from([None, "head", "heads"]),
    offset=st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(LAYOUTS),
    block_size=st.sampled_from([1, 3, 16]),
    positions_dtype=st.sampled_from([torch.int32, torch.int64]),
    skip=st.integers(0, 2),
    padding=st.sampled_from([0, 3]),
    config=st.sampled_from([{"BLOCK_H": 1, "num_warps": 1}, {"BLOCK_H": 4, "num_warps": 1}]),
)
def test_matches_reference(
    device,
    tokens,
    kv_heads,
    group,
    head_size,
    rotary,
    interleaved,
    norm,
    offset,
    dtype,
    layout,
    block_size,
    positions_dtype,
    skip,
    padding,
    config,
):
    heads, rotary = group * kv_heads, head_size if rotary == "all" else rotary
    qkv, caches, slots = case(
        tokens, heads, kv_heads, head_size, dtype=dtype, device=device, block_size=block_size, layout=layout
    )
    slots[:skip] = -1
    rope = ()
    if rotary:
        positions = torch.randint(0, POSITIONS, (tokens,)).to(device, positions_dtype)
        rope = (positions, build_cos_sin_cache(rotary, POSITIONS, device=device))
    options = {"interleaved": interleaved, "weight_offset": offset, "eps": 1e-5, "constant_weight": group == 1}
    for name, count in (("q_weight", heads), ("k_weight", kv_heads)):
        shape = {"head": (head_size,), "heads": (count, head_size), None: ()}[norm]
        options[name] = torch.randn(shape).to(device, dtype) if norm else None
    with tuning.override("qk_norm_rope_store", config):
        check(with_row_padding(qkv, padding), caches, slots, *rope, **options)


@given(
    tokens=st.integers(0, 4),
    float8=st.sampled_from(list(FLOAT8)),
    k_scale=st.sampled_from([None, 0.3, "heads"]),
    v_scale=st.sampled_from([None, 0.01, "heads"]),  # 0.01: beyond float8's range
)
def test_scales(device, tokens, float8, k_scale, v_scale):
    """Equal to the store alone, bit for bit: what was rounded for the queries' dtype is divided and rounded again."""
    qkv, caches, slots = case(tokens, 2, 2, 16, dtype=torch.bfloat16, device=device, float8=float8)
    want = [cache.clone() for cache in caches]
    factors = torch.rand(2, device=device) + 0.1
    scales = {
        "k_scale": factors if k_scale == "heads" else k_scale,
        "v_scale": factors if v_scale == "heads" else v_scale,
    }
    rope = torch.arange(tokens, device=device), build_cos_sin_cache(16, 8, device=device)
    q, k, v = qkv.clone().unflatten(1, (6, 16)).split(2, dim=1)
    apply_rope(q, k, *rope)
    store_kv(k, v, *want, slots, **scales)
    assert torch.equal(qk_norm_rope_store(qkv, *caches, slots, *rope, **scales), q)
    for got, expected in zip(caches, want, strict=True):
        assert torch.equal(got.float().nan_to_num(), expected.float().nan_to_num())


@pytest.mark.parametrize("interleaved", [False, True])
def test_rounds_like_the_kernels_apart(device, interleaved):
    """The normed row is rounded before it turns: in almost every element the same bits."""
    qkv, caches, slots = case(5, 4, 2, 64, dtype=torch.bfloat16, device=device)
    want = [cache.clone() for cache in caches]
    weight = torch.randn(64, device=device).bfloat16()
    rope = torch.arange(5, device=device), build_cos_sin_cache(64, 8, device=device)
    q, k, v = qkv.clone().unflatten(1, (8, 64)).split((4, 2, 2), dim=1)
    rms_norm(q, weight, out=q)
    rms_norm(k, weight, out=k)
    apply_rope(q, k, *rope, interleaved=interleaved)
    store_kv(k, v, *want, slots)
    got = qk_norm_rope_store(qkv, *caches, slots, *rope, q_weight=weight, k_weight=weight, interleaved=interleaved)
    assert (got == q).float().mean() > 0.99
    assert (caches[0].nan_to_num() == want[0].nan_to_num()).float().mean() > 0.99
    assert torch.equal(caches[1].nan_to_num(), want[1].nan_to_num())


def test_rows_are_independent(device):
    qkv, caches, slots = case(4, 2, 1, 16, dtype=torch.float32, device=device)
    qkv[1] = float("nan")
    weight = torch.ones(16, device=device)
    q = qk_norm_rope_store(qkv, *caches, slots, q_weight=weight, k_weight=weight)
    assert q[1].isnan().all() and q[[0, 2, 3]].isfinite().all()
    assert int(caches[0].isfinite().all(-1).sum()) == 3


GOOD = {
    "qkv": torch.zeros(3, 4 * 16),
    "k_cache": torch.zeros(2, 4, 1, 16),
    "v_cache": torch.zeros(2, 4, 1, 16),
    "slot_mapping": torch.zeros(3, dtype=torch.int64),
    "positions": torch.zeros(3, dtype=torch.int64),
    "cos_sin_cache": torch.zeros(8, 16),
    "q_weight": torch.zeros(16),
    "k_weight": torch.zeros(16),
}
BAD = [
    ({"qkv": torch.zeros(3, 4, 16)}, "qkv must have shape"),
    ({"qkv": torch.zeros(3, 60)}, r"qkv must have \(H \+ 2 \* 1\) \* 16 columns"),
    ({"qkv": torch.zeros(3, 32)}, r"qkv must have \(H \+ 2 \* 1\) \* 16 columns"),
    ({"qkv": torch.zeros(64, 3).t()}, "qkv must be contiguous"),
    ({"qkv": torch.zeros(3, 64, dtype=torch.int32)}, "qkv must be torch.float16"),
    ({"k_cache": torch.zeros(2, 4, 1, 12), "v_cache": torch.zeros(2, 4, 1, 12)}, "k_cache must have a head size"),
    ({"k_cache": torch.zeros(2, 4, 1, 16).half(), "v_cache": torch.zeros(2, 4, 1, 16).half()}, "the dtype of qkv"),
    ({"v_cache": torch.zeros(2, 4, 2, 16)}, "v_cache must have shape"),
    ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "slot_mapping must have shape"),
    ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping must be torch.int64"),
    ({"positions": None}, "positions and cos_sin_cache must both"),
    ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions must have shape"),
    ({"cos_sin_cache": torch.zeros(8, 18)}, "at most the head size 16, got 18"),
    ({"q_weight": None}, "q_weight and k_weight must both"),
    ({"q_weight": torch.zeros(2, 16)}, r"k_weight must have shape \[1, 16\]"),
    ({"k_weight": torch.zeros(8)}, r"k_weight must have shape \[16\]"),
    ({"k_scale": 0.0}, "k_scale must be positive"),
    ({"v_scale": torch.ones(2)}, "v_scale must have shape"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments(change, message):
    for function in (qk_norm_rope_store, qk_norm_rope_store_ref):
        with pytest.raises(ValueError, match=message):
            function(**{**GOOD, **change})


@pytest.mark.parametrize("all_parts", [False, True])
def test_operator(device, all_parts):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    qkv, caches, slots = case(3, 2, 1, 16, dtype=torch.float32, device=device)
    optional = (None,) * 4
    if all_parts:
        rope = torch.arange(3, device=device), build_cos_sin_cache(16, 8, device=device)
        optional = (*rope, *torch.randn(2, 16, device=device))
    arguments = (qkv, True, *caches, slots, *optional, 1e-6, 0.0, False, False, None, None, 1.0, 1.0)
    torch.library.opcheck(torch.ops.tritonllm.qk_norm_rope_store.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotary", "norm", "interleaved"),
    [
        (16, 8, 128, 128, True, False),  # Qwen3-0.6B
        (32, 8, 128, 128, False, False),  # Llama-3.1-8B
        (8, 4, 256, 256, True, False),  # Gemma 3
        (32, 2, 128, 64, False, True),  # GLM-4
        (32, 32, 80, 32, True, False),  # Phi-2's sizes
        (4, 2, 512, 512, True, True),
    ],
)
def test_real_shapes(device, dtype, tokens, heads, kv_heads, head_size, rotary, norm, interleaved):
    for float8 in FLOAT8:
        qkv, caches, slots = case(
            tokens, heads, kv_heads, head_size, dtype=dtype, device=device, float8=float8, layout="pool"
        )
        rope = torch.randint(0, 4096, (tokens,), device=device), build_cos_sin_cache(rotary, 4096, device=device)
        options = {"interleaved": interleaved}
        if norm:
            options |= {name: torch.randn(head_size, device=device).to(dtype) for name in ("q_weight", "k_weight")}
        check(qkv, caches, slots, *rope, **options)


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """2^31 elements of rows and more, and a slot as far out: the last token is right."""
    tokens = 2**31 // (40 * 128) + 3
    qkv = torch.zeros(tokens, 40 * 128, device=device, dtype=torch.bfloat16)
    qkv[-1].normal_()
    blocks = 2**31 // (16 * 4 * 128) + 2
    caches = [torch.zeros(blocks, 16, 4, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.full((tokens,), -1, device=device)
    slots[-1] = blocks * 16 - 1
    positions, table = torch.full((tokens,), 63, device=device), build_cos_sin_cache(128, 64, device=device)
    last = qkv[-1:].clone()
    want = [torch.zeros(1, 1, 4, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    want_q = qk_norm_rope_store_ref(last, *want, torch.zeros(1, dtype=torch.int64, device=device), positions[:1], table)
    q = qk_norm_rope_store(qkv, *caches, slots, positions, table)
    assert_close(q[-1:], want_q)
    for cache, expected in zip(caches, want, strict=True):
        assert_close(cache[-1, -1], expected[0, 0])


@pytest.mark.gpu
def test_fullgraph_compile(device):
    qkv, caches, slots = case(5, 4, 2, 64, dtype=torch.float32, device=device)
    for cache in caches:
        cache.zero_()
    want = [cache.clone() for cache in caches]
    rope = torch.arange(5, device=device), build_cos_sin_cache(64, 8, device=device)
    expected = qk_norm_rope_store_ref(qkv.clone(), *want, slots, *rope)
    got = torch.compile(lambda x: qk_norm_rope_store(x.clone(), *caches, slots, *rope) + 0, fullgraph=True)(qkv)
    assert_close(got, expected)
    for cache, stored in zip(caches, want, strict=True):
        assert_close(cache, stored)
