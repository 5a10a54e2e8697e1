import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import E5M2, FP8, make_problem, options, shapes
from support.compare import FLOATS, assert_close, assert_logs_close, poisoned
from support.examples import examples

from tritonllm.kernels import (
    WORKSPACE_SIZE,
    build_cos_sin_cache,
    fused_decode_attention,
    fused_decode_attention_ref,
    paged_decode_attention,
    qk_norm_rope_store,
)
from tritonllm.kernels.attention.arguments import AttentionArgs, Heads, Hints, Pages
from tritonllm.kernels.runtime import tuning

FEW = {
    "kernel": "few",
    "BLOCK_M": 8,
    "BLOCK_N": 16,
    "PROGRAMS": 12,
    "MIN_TILES": 1,
    "MERGE": 4,
    "num_warps": 4,
    "num_stages": 2,
}
BALANCED = {"kernel": "balanced", "BLOCK_M": 16, "BLOCK_N": 16, "PROGRAMS": 12, "num_warps": 4, "num_stages": 2}
CONFIGS = [
    FEW,
    FEW | {"PROGRAMS": 1},
    FEW | {"BLOCK_M": 2},
    FEW | {"PROGRAMS": 30, "MIN_TILES": 2, "BLOCK_M": 4},
    BALANCED,
]
POSITIONS = 4096


def make_case(device, seq_lens, *, rotary, norm, dtype, interleaved=False, weight_offset=0.0, **rest):
    """Arguments and keywords of one call; the newest key and value are not in the cache yet, there is NaN."""
    p = make_problem(device, [1] * len(seq_lens), seq_lens, dtype=dtype, **rest)
    size, kv_heads, head_size = p.k_cache.shape[1:]
    heads = p.q.shape[1]
    slots = []
    for b, n in enumerate(seq_lens):
        block = int(p.block_tables[b, (n - 1) // size]) if n else -1
        slots.append(block * size + (n - 1) % size if n else -1)
        if n:
            for cache in (p.k_cache, p.v_cache):
                cache[block, (n - 1) % size] = torch.full((kv_heads, head_size), float("nan")).to(cache)
    qkv = torch.randn(len(seq_lens), (heads + 2 * kv_heads) * head_size).to(device, dtype)
    rope = ()
    if rotary:
        positions = torch.randint(0, POSITIONS, (len(seq_lens),)).to(device)
        rope = (positions, build_cos_sin_cache(rotary, POSITIONS, device=device))
    keywords = p.options | {"interleaved": interleaved, "weight_offset": weight_offset, "eps": 1e-5}
    if norm:
        for name, count in (("q_weight", heads), ("k_weight", kv_heads)):
            shape = (head_size,) if norm == "head" else (count, head_size)
            keywords[name] = torch.randn(shape).to(device, dtype)
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device)
    return [qkv, p.k_cache, p.v_cache, slot_mapping, p.block_tables, p.seq_lens, *rope], keywords


def check(arguments, keywords, settled) -> None:
    """Against the reference in float32; all slots but the newest stay as they are."""
    qkv, *caches = arguments[:3]
    # A float8 cache: in the dtype of the rows, whose roundings decide on which side of a float8 step a number falls.
    dtype = qkv.dtype if caches[0].dtype in (FP8, E5M2) else torch.float32
    exact = [cache.clone() if cache.dtype in (FP8, E5M2) else cache.float() for cache in caches]
    want, want_lse = fused_decode_attention_ref(
        qkv.to(dtype, copy=True), *exact, *arguments[3:], **keywords, return_lse=True
    )
    out = poisoned(*want.shape, dtype=qkv.dtype, device=qkv.device)
    got, lse = fused_decode_attention(*arguments, **keywords, settled=settled, out=out, return_lse=True)
    assert got is out
    assert_close(out, want, qkv.dtype)
    assert_logs_close(lse, want_lse, qkv.dtype)
    for cache, expected in zip(caches, exact, strict=True):
        assert torch.equal(cache.float().isnan(), expected.float().isnan())
        assert_close(cache.float().nan_to_num(), expected.float().nan_to_num(), qkv.dtype)


@settings(max_examples=examples(60))
@given(
    seq_lens=st.lists(st.integers(0, 100), max_size=3),
    shape=shapes(),
    options=options(),
    rotary=st.sampled_from([0, 2, 10, 16, "all"]),
    interleaved=st.booleans(),
    norm=st.sampled_from([None, "head", "heads"]),
    offset=st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from(FLOATS),
    config=st.sampled_from(CONFIGS),
    settled=st.booleans(),
)
def test_matches_reference(device, seq_lens, shape, options, rotary, interleaved, norm, offset, dtype, config, settled):
    rotary = shape["head_size"] if rotary == "all" else rotary
    rows = {"rotary": rotary, "norm": norm, "interleaved": interleaved, "weight_offset": offset}
    arguments, keywords = make_case(device, seq_lens, dtype=dtype, **rows, **shape, **options)
    with tuning.override("paged_decode_attention", config):
        check(arguments, keywords, settled)


@pytest.mark.parametrize("group", [1, 7, 8, 9, 17])
@pytest.mark.parametrize("heads", [1, 4, 8])
def test_heads_of_a_program(device, group, heads):
    """Fewer than a group has, as many, and more; one of a group's programs stores the newest key."""
    with tuning.override("paged_decode_attention", FEW | {"BLOCK_M": heads}):
        arguments, keywords = make_case(
            device, [20, 3], rotary=16, norm="head", dtype=torch.float32, group=group, head_size=16
        )
        check(arguments, keywords, True)


def test_default_config(device):
    arguments, keywords = make_case(
        device, [130, 0, 64], rotary=72, norm="head", dtype=torch.float32, head_size=72, block_size=7
    )
    check(arguments, keywords, False)


def test_workspace_is_zero_again(device):
    workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32, device=device)
    with tuning.override("paged_decode_attention", FEW):
        arguments, keywords = make_case(device, [90, 1, 0, 33], rotary=16, norm=None, dtype=torch.float32, head_size=16)
        check(arguments, {**keywords, "workspace": workspace}, True)
    assert (workspace == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(2, 500)}, "qkv must have"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, "slot_mapping must have shape"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, "seq_lens must have shape"),
        ({"block_tables": torch.zeros(2, 2, dtype=torch.int64)}, "block_tables must be torch.int32"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions and cos_sin_cache must both be given"),
        ({"q_weight": torch.zeros(64)}, "q_weight and k_weight must both be given"),
        ({"softcap": -1.0}, "softcap must be 0"),
        ({"workspace": torch.zeros(9)}, "workspace must be torch.int32"),
        ({"order": torch.zeros(1, dtype=torch.int32)}, r"order must have shape \[2\]"),
    ],
    ids=str,
)
def test_bad_arguments(change, message):
    cache = torch.zeros(4, 16, 2, 64)
    tensors = {"qkv": torch.zeros(2, 8 * 64), "k_cache": cache, "v_cache": cache}
    tensors |= {"slot_mapping": torch.zeros(2, dtype=torch.int64)}
    tensors |= {"block_tables": torch.zeros(2, 2, dtype=torch.int32), "seq_lens": torch.zeros(2, dtype=torch.int32)}
    for fn in (fused_decode_attention, fused_decode_attention_ref):
        with pytest.raises(ValueError, match=message):
            fn(**{**tensors, **change})


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    (qkv, *rest, slots, tables, lens), _ = make_case(
        device, [20, 3], rotary=0, norm=None, dtype=torch.float32, head_size=16
    )
    out = torch.empty(2, 4, 16, device=device)
    heads, hints = Heads(None, None, None, None, 1e-6, 0.0, False), Hints(None, settled=True)
    output = AttentionArgs(out, None, None, None, None, None, 0.25, 1.0, 0, 0.0)
    args = (qkv, slots, 1.0, *Pages(*rest, tables, lens), *heads, *hints, *output)
    torch.library.opcheck(torch.ops.tritonllm.fused_decode_attention.default, args)


REAL = [
    # heads, kv heads, head size, block size, norm, lengths
    (16, 8, 128, 16, "head", [170]),
    (16, 8, 128, 16, "head", [4096, 1, 0, 777]),
    (32, 8, 128, 16, None, [600]),
    (32, 4, 128, 32, "head", [300, 17]),
    (14, 2, 64, 16, None, [1024, 333]),
    (8, 4, 256, 16, "heads", [3000, 5]),
    (71, 1, 64, 32, None, [513] * 4),  # two kernels
]


@pytest.mark.gpu
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size", "norm", "lens"), REAL)
def test_real_shapes(device, heads, kv_heads, head_size, block_size, norm, lens, dtype, settled):
    shape = {"kv_heads": kv_heads, "group": heads // kv_heads, "head_size": head_size, "block_size": block_size}
    float8 = {"float8": True, "k_scale": "heads"}, {"float8": "e5m2"}
    for more in ({}, {"window": 100, "sinks": True, "softcap": 30.0}, *float8):
        arguments, keywords = make_case(device, lens, rotary=head_size, norm=norm, dtype=dtype, **shape, **more)
        check(arguments, keywords, settled)


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [[300], [29 * i % 700 for i in range(100)]], ids=["one sequence", "many"])
def test_chain_of_layers(device, lens):
    """Each kernel starts before the one before it has ended; the result is that of kernels that wait."""
    shape = {"kv_heads": 8, "group": 2, "head_size": 128, "layout": "apart"}
    cases = [make_case(device, lens, rotary=128, norm="head", dtype=torch.bfloat16, **shape) for _ in range(12)]
    order = torch.tensor(lens).argsort(descending=True).to(device, torch.int32)
    workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32, device=device)
    first = cases[0][0][0].clone()

    def run(settled):
        x = first.clone()
        for (_, *rest), keywords in cases:
            out = fused_decode_attention(x, *rest, **keywords, workspace=workspace, settled=settled, order=order)
            x = torch.cat([out.flatten(1), out.flatten(1)], dim=1)
            x = x + first  # two ordinary kernels between: they neither wait early nor let the next one start
        return out

    def apart():
        x = first.clone()
        for (_, k, v, slots, tables, seq_lens, *rope), keywords in cases:
            named = {name: keywords[name] for name in ("q_weight", "k_weight", "eps")}
            q = qk_norm_rope_store(x, k, v, slots, *rope, **named)
            out = paged_decode_attention(q, k, v, tables, seq_lens)
            x = torch.cat([out.flatten(1), out.flatten(1)], dim=1) + first
        return out

    want = apart()
    run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(True)
    for _ in range(20):
        graph.replay()
        assert_close(out, want, torch.bfloat16)
