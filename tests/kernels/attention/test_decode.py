import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import LAYOUTS, Problem, make_problem, options, shapes
from support.compare import FLOATS, assert_close, assert_logs_close, poisoned
from support.examples import examples

from tritonllm.kernels import paged_decode_attention, paged_decode_attention_ref
from tritonllm.kernels.attention.arguments import Hints
from tritonllm.kernels.attention.decode import DECODE, WORKSPACE_SIZE, decode_short_keys
from tritonllm.kernels.runtime import tuning

# Small tiles, many parts, and batches that take several steps to look through, so that small problems have all of it.
TINY = {
    "kernel": "balanced",
    "BLOCK_M": 16,
    "BLOCK_N": 16,
    "BLOCK_B": 2,
    "PROGRAMS": 12,
    "MIN_TILES": 1,
    "num_warps": 4,
    "num_stages": 2,
}


SPLIT = {"kernel": "split", "BLOCK_M": 16, "BLOCK_N": 16, "SPLIT_TO": 8, "num_warps": 4, "num_stages": 2}

FEW = {"kernel": "few", "BLOCK_M": 8, "BLOCK_N": 16, "PROGRAMS": 12, "MIN_TILES": 1, "MERGE": 4}
FEW |= {"num_warps": 4, "num_stages": 2}


def check(p: Problem) -> None:
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=p.q.device)
    got, lse = paged_decode_attention(*p.decode, **p.options, out=out, return_lse=True)
    assert got is out
    want, want_lse = paged_decode_attention_ref(*p.exact().decode, **p.options, return_lse=True)
    assert_close(out, want, p.q.dtype)
    assert_logs_close(lse, want_lse, p.q.dtype)


@settings(max_examples=examples(50))
@given(
    seq_lens=st.lists(st.integers(0, 100), max_size=3),
    shape=shapes(),
    options=options(),
    dtype=st.sampled_from(FLOATS),
    programs=st.sampled_from([1, 5, 12]),
    min_tiles=st.sampled_from([1, 2, 4]),
)
def test_matches_reference(device, seq_lens, shape, options, dtype, programs, min_tiles):
    p = make_problem(device, [1] * len(seq_lens), seq_lens, dtype=dtype, **shape, **options)
    with tuning.override("paged_decode_attention", {**TINY, "PROGRAMS": programs, "MIN_TILES": min_tiles}):
        check(p)


@settings(max_examples=examples(40))
@given(
    seq_lens=st.lists(st.integers(0, 100), max_size=3),
    shape=shapes(),
    options=options(),
    dtype=st.sampled_from(FLOATS),
    split_to=st.sampled_from([1, 4, 30]),
)
def test_split_kernel_matches_reference(device, seq_lens, shape, options, dtype, split_to):
    p = make_problem(device, [1] * len(seq_lens), seq_lens, dtype=dtype, **shape, **options)
    with tuning.override("paged_decode_attention", {**SPLIT, "SPLIT_TO": split_to}):
        check(p)


@settings(max_examples=examples(40))
@given(
    seq_lens=st.lists(st.integers(0, 100), max_size=3),
    shape=shapes(),
    options=options(),
    dtype=st.sampled_from(FLOATS),
    programs=st.sampled_from([1, 5, 30]),
    tile=st.sampled_from([{"MIN_TILES": 1}, {"MIN_TILES": 2, "BLOCK_M": 2}, {"MIN_TILES": 4, "BLOCK_M": 4}]),
    settled=st.booleans(),
    expected=st.sampled_from([None, 1, 20, 10**6]),
)
def test_few_kernel_matches_reference(device, seq_lens, shape, options, dtype, programs, tile, settled, expected):
    """Whatever the host expects of the lengths."""
    p = make_problem(device, [1] * len(seq_lens), seq_lens, dtype=dtype, **shape, **options)
    p.options.update(settled=settled, max_seqlen_k=expected)
    with tuning.override("paged_decode_attention", FEW | {"PROGRAMS": programs} | tile):
        check(p)


def test_which_kernel_by_default():
    """The few one for short sequences, Hopper's up to 32 rows, balanced, else split."""
    for programs, split in ((8, True), (132, True), (133, False), (1056, False), (1057, True), (2113, True)):
        for arch, group, lengths in product(("any", "sm90"), (4, 17, 33), ("short", "long")):
            key = {"head_size": 128, "lengths": lengths, "dtype": "bfloat16", "programs": programs}
            config = DECODE.default_config(**key, arch=arch, group=group, cache_dtype="bfloat16")
            sm90 = arch == "sm90" and group <= 32
            expected = "split" if split and not (sm90 and programs <= 2112) else "sm90" if sm90 else "balanced"
            if lengths == "short":
                expected = "few"
            assert config["kernel"] == expected
            float8 = DECODE.default_config(**key, arch=arch, group=group, cache_dtype="float8_e4m3fn")
            assert float8["kernel"] == ("few" if lengths == "short" else "sm90" if sm90 else "balanced")


def test_which_lengths_are_short():
    """Fewer keys for more sequences and heads; none for what the few kernel does not take."""
    keys = [decode_short_keys(16, 8, 128, torch.bfloat16, n) for n in (1, 2, 4, 8, 9, 256)]
    assert keys == sorted(keys, reverse=True) and keys[0] > 2000 and 300 < keys[3] < 500 and keys[4] == 0
    assert decode_short_keys(32, 4, 128, torch.float16, 8) > 0
    assert decode_short_keys(68, 4, 128, torch.float16, 1) == decode_short_keys(8, 8, 512, torch.float16, 1) == 0
    assert decode_short_keys(16, 8, 128, torch.float32, 1) == 0


@pytest.mark.parametrize("keys", [0, -1])
def test_expected_keys_are_checked(device, keys):
    p = make_problem(device, [1], [20], head_size=16)
    with pytest.raises(ValueError, match="max_seqlen_k must be at least 1 or None"):
        paged_decode_attention(*p.decode, max_seqlen_k=keys)


def test_few_refuses_what_the_assembler_gets_wrong(device):
    with tuning.override("paged_decode_attention", FEW | {"BLOCK_M": 16}), pytest.raises(ValueError, match="num_warps"):
        check(make_problem(device, [1], [20], group=16, head_size=16))


@pytest.mark.parametrize("group", [1, 17, 40])
def test_group_larger_than_a_tile(device, group):
    for config in (TINY, SPLIT, FEW, FEW | {"BLOCK_M": 1}):
        with tuning.override("paged_decode_attention", config):
            check(make_problem(device, [1, 1], [20, 3], group=group, head_size=16))


@pytest.mark.parametrize("size", [1, 7, WORKSPACE_SIZE])
def test_workspace_is_zero_again(device, size):
    """Whatever its size, and used for one launch after the other; the counts of tiles must not be left in it."""
    workspace = torch.zeros(size, dtype=torch.int32, device=device)
    for config in (TINY, FEW | {"PROGRAMS": 30}):
        with tuning.override("paged_decode_attention", config):
            for seq_lens in ([90, 1, 0, 33], [5, 64, 64, 130]):
                p = make_problem(device, [1] * 4, seq_lens, head_size=16)
                out = paged_decode_attention(*p.decode, workspace=workspace)
                assert_close(out, paged_decode_attention_ref(*p.decode))
                assert (workspace == 0).all()


def test_default_config(device):
    for layout in LAYOUTS:
        check(make_problem(device, [1, 1, 1], [130, 0, 64], head_size=72, block_size=7, layout=layout))


@pytest.mark.parametrize("window", [None, 5])
def test_reference_matches_torch(device, window):
    """The reference itself, against scaled_dot_product_attention; sinks are a key with logit `sink` and value 0."""
    seq_lens, heads, head_size = [9, 1, 30], 6, 16
    p = make_problem(
        device, [1, 1, 1], seq_lens, group=3, head_size=head_size, window=window, sinks=True, alibi_slopes=True
    )
    out, lse = paged_decode_attention_ref(*p.decode, **p.options, return_lse=True)
    for b, n in enumerate(seq_lens):
        at = torch.arange(max(0, n - (window or n)), n, device=device)
        block, slot = p.block_tables[b][at // 16].long(), at % 16
        k, v = (torch.cat([c[block, slot], torch.zeros_like(c[:1, 0])]) for c in (p.k_cache, p.v_cache))
        k, v = (x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (k, v))
        bias = p.options["alibi_slopes"][:, None] * (at - (n - 1))
        bias = torch.cat([bias, p.options["sinks"][:, None]], dim=1)[:, None]
        want = torch.nn.functional.scaled_dot_product_attention(p.q[b][:, None], k, v, attn_mask=bias)
        assert_close(out[b], want[:, 0])
        logits = (k * p.q[b][:, None]).sum(-1) * head_size**-0.5 + bias[:, 0]
        assert_close(lse[b], logits.logsumexp(-1))
    assert out.shape == (3, heads, head_size)


def test_reference_softcap(device):
    p = make_problem(device, [1], [12], kv_heads=1, group=1, softcap=0.5)
    k, v = (c[p.block_tables[0, 0].long(), :12, 0] for c in (p.k_cache, p.v_cache))
    weights = (0.5 * torch.tanh(k @ p.q[0, 0] / 8 / 0.5)).softmax(0)
    assert_close(paged_decode_attention_ref(*p.decode, softcap=0.5)[0, 0], weights @ v)


def test_sequence_without_keys(device):
    p = make_problem(device, [1], [0])
    out, lse = paged_decode_attention(*p.decode, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    sinks = torch.randn(4, device=device)
    out, lse = paged_decode_attention(*p.decode, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    assert_close(lse[0], sinks)


BAD = [
    ({"q": torch.zeros(2, 4, 20)}, "q must have a head size that is a multiple of 8"),
    ({"q": torch.zeros(2, 4, 8)}, "q must have a head size"),
    ({"q": torch.zeros(2, 4, 64, dtype=torch.float64)}, "q must be torch.float16"),
    ({"q": torch.zeros(2, 3, 64)}, "q must have a multiple of k_cache's 2 heads, got 3"),
    ({"q": torch.zeros(2, 64, 4).transpose(1, 2)}, "q must be contiguous in its last dimension"),
    ({"q": torch.zeros(3, 4, 64)}, r"seq_lens must have shape \[3\]"),
    ({"k_cache": torch.zeros(4, 16, 2, 32)}, r"k_cache must have shape \[P, S, K, 64\]"),
    (dict.fromkeys(("k_cache", "v_cache"), torch.zeros(4, 16, 2, 64).half()), "k_cache .*must have the dtype of q"),
    ({"k_cache": torch.zeros(4, 16, 2, 64, dtype=torch.int8)}, "k_cache must be torch.float16 or"),
    ({"k_cache": torch.zeros(4, 257, 2, 64), "v_cache": torch.zeros(4, 257, 2, 64)}, "blocks of 1 to 256 slots"),
    (dict.fromkeys(("k_cache", "v_cache"), torch.zeros(4, 2, 16, 64)), r"the cache is \[blocks, block_size, kv_heads"),
    (dict.fromkeys(("k_cache", "v_cache"), torch.zeros(4, 257, 2, 64)), r"the cache is \[blocks, block_size, kv_heads"),
    ({"v_cache": torch.zeros(4, 8, 2, 64)}, "v_cache must have shape"),
    ({"v_cache": torch.zeros(4, 16, 2, 64).half()}, "v_cache must be torch.float32"),
    ({"block_tables": torch.zeros(2, 2, dtype=torch.int64)}, "block_tables must be .* use block_tables.to.torch.int32"),
    ({"block_tables": torch.zeros(1, 2, dtype=torch.int32)}, "block_tables must have shape"),
    ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be torch.int32"),
    ({"scale": 0.0}, "scale must be positive"),
    ({"scale": math.inf}, "scale must be positive and finite"),
    ({"window": 0}, "window must be None or at least 1"),
    ({"softcap": -1.0}, "softcap must be 0"),
    ({"sinks": torch.zeros(3)}, r"sinks must have shape \[4\]"),
    ({"alibi_slopes": torch.zeros(4, dtype=torch.int32)}, "alibi_slopes must be"),
    ({"k_scale": 0.0}, "k_scale must be positive"),
    ({"v_scale": torch.ones(4)}, r"v_scale must have shape \[2\]"),
    ({"v_scale": torch.ones(2, dtype=torch.float16)}, "v_scale must be torch.float32"),
    ({"out": torch.zeros(2, 4, 32)}, "out must have shape"),
    ({"out": torch.zeros(2, 4, 64).half()}, "out must be torch.float32"),
    ({"workspace": torch.zeros(9)}, "workspace must be torch.int32"),
    ({"order": torch.zeros(2, dtype=torch.int64)}, "order must be torch.int32"),
    ({"order": torch.zeros(3, dtype=torch.int32)}, r"order must have shape \[2\]"),
    ({"workspace": torch.zeros(0, dtype=torch.int32)}, "workspace must have at least 1 element"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments(change, message):
    cache = torch.zeros(4, 16, 2, 64)
    tensors = {"q": torch.zeros(2, 4, 64), "k_cache": cache, "v_cache": cache}
    tensors |= {"block_tables": torch.zeros(2, 2, dtype=torch.int32), "seq_lens": torch.zeros(2, dtype=torch.int32)}
    for fn in (paged_decode_attention, paged_decode_attention_ref):
        with pytest.raises(ValueError, match=message):
            fn(**{**tensors, **change})


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    p = make_problem(device, [1, 1], [20, 3], head_size=16)
    nothing = (None, None, None, None)
    for lse in (None, torch.empty(2, 4, device=device)):
        args = (*p.decode, *Hints(None), torch.empty(2, 4, 16, device=device), lse, *nothing, 0.25, 1.0, 0, 0.0)
        torch.library.opcheck(torch.ops.tritonllm.paged_decode_attention.default, args)


REAL = [
    # heads, kv heads, head size, block size, lengths
    (32, 8, 128, 16, [32768]),
    (32, 8, 128, 16, [4096, 1, 0, 777, 2048, 4095]),
    (16, 8, 128, 128, [2048] * 16),
    (32, 4, 128, 256, [1000, 131072, 17]),
    (32, 4, 128, 16, [30_000]),  # more parts than one program reads at once: several merge them
    (64, 4, 128, 16, [20_000, 3]),
    (14, 2, 64, 16, [60_000]),
    (16, 8, 128, 16, [30_000, 40_000]),
    (32, 32, 128, 16, [3000, 1, 9000]),  # one query head for each of keys
    (12, 12, 64, 16, [5000] * 6),
    (14, 2, 64, 16, [1024, 333]),
    (71, 1, 64, 32, [513] * 4),
    (8, 4, 256, 16, [3000, 5]),
    (8, 2, 512, 64, [700, 70]),
    (12, 12, 80, 48, [1025] * 3),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size", "lens"), REAL)
def test_real_shapes(device, heads, kv_heads, head_size, block_size, lens, dtype):
    shape = {"kv_heads": kv_heads, "group": heads // kv_heads, "head_size": head_size, "block_size": block_size}
    q_lens = [1] * len(lens)
    check(make_problem(device, q_lens, lens, dtype=dtype, **shape))
    check(make_problem(device, q_lens, lens, dtype=dtype, **shape, window=400, sinks=True, softcap=30.0))
    check(make_problem(device, q_lens, lens, dtype=dtype, **shape, alibi_slopes=True, float8=True, k_scale="heads"))
    check(make_problem(device, q_lens, lens, dtype=dtype, **shape, float8="e5m2"))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [2, 8, 16])
def test_same_bits_every_time(device, group):
    """Which program ends last differs from run to run; the order in which it merges does not."""
    p = make_problem(device, [1] * 3, [30_000, 70, 4001], group=group, head_size=128, dtype=torch.bfloat16)
    workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32, device=device)
    first = paged_decode_attention(*p.decode, workspace=workspace).clone()
    for _ in range(200):
        assert torch.equal(paged_decode_attention(*p.decode, workspace=workspace), first)
    assert (workspace == 0).all()


@pytest.mark.gpu
def test_long_context(device):
    check(make_problem(device, [1, 1], [200_000, 140_001], kv_heads=1, group=4, head_size=128, dtype=torch.bfloat16))


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """The last blocks of a pool of more than 2^31 elements."""
    small = make_problem(device, [1], [100], head_size=128, dtype=torch.bfloat16)
    blocks, size = small.k_cache.shape[0], small.k_cache[0].numel()
    big = 2**31 // size + blocks
    pool = torch.zeros(big, 2, *small.k_cache.shape[1:], dtype=torch.bfloat16, device=device)
    pool[-blocks:, 0], pool[-blocks:, 1] = small.k_cache, small.v_cache
    tables = small.block_tables + (big - blocks)
    out = paged_decode_attention(small.q, pool[:, 0], pool[:, 1], tables, small.seq_lens)
    assert_close(out, paged_decode_attention_ref(*small.exact().decode), torch.bfloat16)


@pytest.mark.gpu
def test_fullgraph_compile(device):
    p = make_problem(device, [1, 1], [300, 20], dtype=torch.bfloat16)
    compiled = torch.compile(lambda *args: paged_decode_attention(*args, softcap=5.0) + 1, fullgraph=True)
    assert_close(compiled(*p.decode), paged_decode_attention(*p.decode, softcap=5.0) + 1)


@pytest.mark.gpu
def test_cuda_graph(device):
    """A captured launch follows the lengths and tables that its tensors hold at replay."""
    lens = [[500, 3, 0], [1, 1000, 512]]
    problems = [make_problem(device, [1] * 3, n, dtype=torch.bfloat16, head_size=128) for n in lens]
    width = max(p.block_tables.shape[1] for p in problems)
    blocks = max(p.k_cache.shape[0] for p in problems)
    q = torch.empty_like(problems[0].q)
    k_cache, v_cache = torch.zeros(2, blocks, *problems[0].k_cache.shape[1:], dtype=q.dtype, device=device)
    tables = torch.zeros(3, width, dtype=torch.int32, device=device)
    seq_lens = torch.zeros(3, dtype=torch.int32, device=device)
    args = (q, k_cache, v_cache, tables, seq_lens)
    paged_decode_attention(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode_attention(*args)
    for p in problems:
        for mine, new in zip(args, p.decode, strict=True):
            mine[tuple(slice(n) for n in new.shape)] = new
        out.fill_(math.nan)
        graph.replay()
        assert_close(out, paged_decode_attention_ref(*p.exact().decode), torch.bfloat16)
