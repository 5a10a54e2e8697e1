import math
from unittest.mock import patch

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import Problem, make_problem, options, shapes
from support.compare import FLOATS, assert_close, assert_logs_close, poisoned
from support.examples import examples

from tritonllm.kernels import paged_decode_attention, varlen_prefill_attention, varlen_prefill_attention_ref
from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.portable import prefill as portable
from tritonllm.kernels.attention.prefill import shared_config
from tritonllm.kernels.runtime import chip, tuning

# Small tiles, so that small problems have several: few queries and few keys, more queries, more keys; keys that are not
# shared out, and such that are, each tile of them by itself or not.
PORTABLE = {"kernel": "portable", "num_warps": 4, "num_stages": 2}
SIZES = ((16, 16, 0), (64, 16, 0), (16, 32, 0), (16, 16, 1), (64, 16, 4), (16, 32, 16))
TINY = [PORTABLE | {"BLOCK_M": m, "BLOCK_N": n, "SPLIT": split} for m, n, split in SIZES]


def check(p: Problem, *, causal: bool = True, padding: int = 0) -> None:
    tokens = len(p.q) - padding
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=p.q.device)
    longest = max([1, *p.cu_seqlens_q.diff().tolist()])
    keywords = {"max_seqlen_q": longest, "causal": causal, "return_lse": True, **p.options}
    got, lse = varlen_prefill_attention(*p.prefill, **keywords, out=out)
    assert got is out
    want, want_lse = varlen_prefill_attention_ref(*p.exact().prefill, **keywords)
    assert_close(out[:tokens], want[:tokens], p.q.dtype)
    assert_logs_close(lse[:tokens], want_lse[:tokens], p.q.dtype)
    assert out[tokens:].isnan().all(), "padding tokens were written"


@settings(max_examples=examples(50))
@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), max_size=3),
    shape=shapes(),
    options=options(),
    dtype=st.sampled_from(FLOATS),
    causal=st.booleans(),
    padding=st.integers(0, 3),
    config=st.sampled_from(TINY),
)
def test_matches_reference(device, lens, shape, options, dtype, causal, padding, config):
    """Chunks of new tokens over cached ones, decodes and absent sequences in one batch."""
    new = [n for n, _ in lens]
    p = make_problem(device, new, [n + cached for n, cached in lens], dtype=dtype, padding=padding, **shape, **options)
    with tuning.override("varlen_prefill_attention", config), patch.object(chip, "processors", return_value=4):
        check(p, causal=causal, padding=padding)


SHARED = {  # new tokens, and keys
    "one turn": ([3], [300]),
    "several": ([5, 0, 1, 9], [200, 70, 301, 9]),
    "more queries than keys": ([12, 8], [5, 90]),
    "nobody": ([0, 0], [30, 0]),
    "more tiles than programs": ([3] * 9, [50 + 20 * i for i in range(9)]),
}


@pytest.mark.parametrize(
    "options", [{}, {"window": 70, "sinks": True}, {"alibi_slopes": True, "softcap": 4.0, "k_scale": "heads"}], ids=str
)
@pytest.mark.parametrize("batch", SHARED)
def test_keys_shared_out(device, batch, options):
    """The parts are merged in one order, and the workspace is zero again, also if it is too short and a new one is."""
    p = make_problem(device, *SHARED[batch], head_size=24, dtype=torch.bfloat16, **options)
    config = PORTABLE | {"BLOCK_M": 16, "BLOCK_N": 16, "SPLIT": 8}
    keywords = {"max_seqlen_q": max(1, *SHARED[batch][0]), "return_lse": True, **p.options}
    want, want_lse = varlen_prefill_attention_ref(*p.exact().prefill, **keywords)
    outs = []
    for programs, size in ((4, 3), (16, 4096), (16, 4096)):
        workspace = torch.zeros(size, dtype=torch.int32, device=device)
        with (
            tuning.override("varlen_prefill_attention", config),
            patch.object(chip, "processors", return_value=programs // 2),
        ):
            outs.append(varlen_prefill_attention(*p.prefill, **keywords, workspace=workspace))
        assert (workspace == 0).all()
    for out, lse in outs:
        assert_close(out, want, torch.bfloat16)
        assert_logs_close(lse, want_lse, torch.bfloat16)
    assert torch.equal(outs[1][0], outs[2][0]), "the order of merging depends on time"


def test_keys_are_shared_out_where_programs_are_few(device):
    """A tile of rows behind 300 keys gets its part of the programs, but not so many that merging takes longer."""
    p = make_problem(device, [3], [300], kv_heads=1, group=2, head_size=16)
    for programs, split, shares in ((2, 1, 2), (6, 1, 6), (30, 1, 17), (30, 16, 4), (30, 300, 1)):
        part = poisoned(programs, 16, 16, dtype=torch.float32, device=device)
        parts = part, torch.empty(programs, 16, device=device), torch.zeros(programs, dtype=torch.int32, device=device)
        config = PORTABLE | {"BLOCK_M": 16, "BLOCK_N": 16, "SPLIT": split}
        with (
            tuning.override("varlen_prefill_attention", config),
            patch.object(chip, "processors", return_value=programs // 2),
            patch.object(portable, "_parts", return_value=parts),
        ):
            varlen_prefill_attention(*p.prefill, max_seqlen_q=3)
        kept = (~part[:, :6].isnan().flatten(1).any(1)).sum()
        assert kept == (shares if shares > 1 else 0)


def test_default_config(device):
    check(make_problem(device, [70, 1, 0, 3], [100, 65, 9, 3], group=3, head_size=72, block_size=7))


def test_many_sequences(device):
    """More sequences than one step of the search for a tile's sequence looks at."""
    check(make_problem(device, [i % 2 for i in range(140)], [i % 2 for i in range(140)], kv_heads=1, head_size=16))


@settings(max_examples=examples(15))
@given(
    seq_lens=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    options=options(),
    group=st.sampled_from([1, 3]),
)
def test_last_token_equals_decode(device, seq_lens, options, group):
    """The row of a sequence's last token in a prefill is what decode computes for it."""
    p = make_problem(device, seq_lens, seq_lens, group=group, head_size=16, block_size=5, **options)
    last = p.cu_seqlens_q[1:].long() - 1
    prefill = varlen_prefill_attention(*p.prefill, max_seqlen_q=max(seq_lens), **p.options, return_lse=True)
    config = {"kernel": "balanced", "BLOCK_M": 16, "BLOCK_N": 16, "PROGRAMS": 12, "MIN_TILES": 1, "num_warps": 4}
    with tuning.override("paged_decode_attention", config):
        decode = paged_decode_attention(p.q[last], *p.decode[1:], **p.options, return_lse=True)
    for of_prefill, of_decode in zip(prefill, decode, strict=True):
        assert_close(of_prefill[last], of_decode)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_reference_matches_torch(device, causal, window):
    """The reference itself, against scaled_dot_product_attention; sinks are a key with logit `sink` and value 0."""
    new, seq_lens, head_size = [9, 1, 4], [9, 20, 30], 16
    p = make_problem(device, new, seq_lens, group=3, head_size=head_size, sinks=True, alibi_slopes=True)
    out = varlen_prefill_attention_ref(*p.prefill, max_seqlen_q=9, causal=causal, window=window, **p.options)
    begins = p.cu_seqlens_q.tolist()
    for b, (m, n) in enumerate(zip(new, seq_lens, strict=True)):
        at = torch.arange(n, device=device)
        block, slot = p.block_tables[b][at // 16].long(), at % 16
        k, v = (torch.cat([c[block, slot], torch.zeros_like(c[:1, 0])]) for c in (p.k_cache, p.v_cache))
        k, v = (x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (k, v))
        distance = at - torch.arange(n - m, n, device=device)[:, None]
        hidden = (distance > 0) & causal | (distance <= -(window or math.inf)) | (distance >= (window or math.inf))
        bias = (p.options["alibi_slopes"][:, None, None] * distance).masked_fill(hidden, -math.inf)
        bias = torch.cat([bias, p.options["sinks"][:, None, None].expand(-1, m, 1)], dim=2)
        q = p.q[begins[b] : begins[b + 1]].transpose(0, 1)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        assert_close(out[begins[b] : begins[b + 1]], want.transpose(0, 1))


def test_more_queries_than_keys(device):
    """A query before its sequence's first key sees nothing: 0 and -inf."""
    p = make_problem(device, [2], [2], head_size=16)
    q = torch.randn(5, 4, 16, device=device)
    cu = torch.tensor([0, 5], dtype=torch.int32, device=device)
    args = (q, p.k_cache, p.v_cache, p.block_tables, cu, p.seq_lens)
    out, lse = varlen_prefill_attention(*args, max_seqlen_q=5, return_lse=True)
    assert (out[:3] == 0).all() and (lse[:3] == -math.inf).all()
    assert_close(out, varlen_prefill_attention_ref(*args, max_seqlen_q=5))


BAD = [
    ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int64)}, "cu_seqlens_q must be torch.int32"),
    ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, "cu_seqlens_q must begin with 0"),
    ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, r"seq_lens must have shape \[1\]"),
    ({"block_tables": torch.zeros(3, 2, dtype=torch.int32)}, "block_tables must have shape"),
    ({"max_seqlen_q": 0}, "max_seqlen_q must be at least 1"),
    ({"window": -1}, "window must be None or at least 1"),
    ({"sinks": torch.zeros(1)}, "sinks must have shape"),
    ({"out": torch.zeros(5, 4, 32)}, "out must have shape"),
    ({"workspace": torch.zeros(9)}, "workspace must be torch.int32"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments(change, message):
    cache = torch.zeros(4, 16, 2, 64)
    arguments = {"q": torch.zeros(5, 4, 64), "k_cache": cache, "v_cache": cache, "max_seqlen_q": 3}
    arguments |= {"block_tables": torch.zeros(2, 2, dtype=torch.int32), "seq_lens": torch.zeros(2, dtype=torch.int32)}
    arguments["cu_seqlens_q"] = torch.tensor([0, 3, 5], dtype=torch.int32)
    for fn in (varlen_prefill_attention, varlen_prefill_attention_ref):
        with pytest.raises(ValueError, match=message):
            fn(**{**arguments, **change})


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    p = make_problem(device, [3, 1], [20, 3], head_size=16)
    q, k_cache, v_cache, tables, begins, lens = p.prefill
    given = (*Queries(q, begins, 3), *Pages(k_cache, v_cache, tables, lens), *Hints(None))
    nothing = (None, None, None, None)
    for lse in (None, torch.empty(4, 4, device=device)):
        output = AttentionArgs(torch.zeros(4, 4, 16, device=device), lse, *nothing, 0.25, 1.0, 0, 0.0)
        torch.library.opcheck(torch.ops.tritonllm.varlen_prefill_attention.default, (*given, *output))


REAL = [
    # heads, kv heads, head size, block size, new tokens, cached tokens
    (32, 8, 128, 16, [4096], [0]),
    (32, 8, 128, 16, [1024, 1, 0, 77, 1], [7168, 4000, 9, 0, 0]),
    (16, 8, 128, 128, [1024] * 4, [0] * 4),
    (32, 4, 128, 256, [300], [32768]),
    (14, 2, 64, 16, [1000, 333], [0, 50]),
    (71, 1, 64, 32, [257, 3], [0, 100]),
    (8, 4, 256, 16, [600, 5], [0, 1000]),
    (8, 2, 512, 64, [300, 70], [10, 0]),
    (12, 12, 80, 48, [513] * 2, [0, 48]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size", "new", "cached"), REAL)
def test_real_shapes(device, heads, kv_heads, head_size, block_size, new, cached, dtype):
    lens = [n + c for n, c in zip(new, cached, strict=True)]
    shape = {"kv_heads": kv_heads, "group": heads // kv_heads, "head_size": head_size, "block_size": block_size}
    check(make_problem(device, new, lens, dtype=dtype, **shape))
    check(make_problem(device, new, lens, dtype=dtype, **shape, window=400, sinks=True, softcap=30.0))
    check(make_problem(device, new, lens, dtype=dtype, **shape, alibi_slopes=True, float8=True, k_scale="heads"))
    check(make_problem(device, new, lens, dtype=dtype, **shape), causal=False)
    check(make_problem(device, new, lens, dtype=dtype, **shape, window=65), causal=False)  # of ModernBERT


TURNS = [
    # heads, kv heads, head size, block size, new tokens, cached tokens
    (32, 8, 128, 16, [8], [32_760]),
    (32, 8, 128, 16, [128, 1, 0, 17], [9000, 4000, 9, 0]),
    (14, 2, 64, 16, [40] * 12, [500 * i for i in range(12)]),
    (8, 4, 256, 16, [60, 5], [3000, 1000]),
    (8, 2, 512, 64, [30, 70], [2000, 0]),
    (12, 12, 80, 48, [13] * 2, [5000, 48]),
]


@pytest.mark.gpu
@pytest.mark.parametrize("float8", [False, True, "e5m2"], ids=["", "e4m3", "e5m2"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size", "new", "cached"), TURNS)
def test_keys_shared_out_of_real_shapes(device, heads, kv_heads, head_size, block_size, new, cached, float8):
    lens = [n + c for n, c in zip(new, cached, strict=True)]
    shape = {"kv_heads": kv_heads, "group": heads // kv_heads, "head_size": head_size, "block_size": block_size}
    config = shared_config(head_size, triton.next_power_of_2(max(16, max(new) * heads // kv_heads)))
    with tuning.override("varlen_prefill_attention", config):
        check(make_problem(device, new, lens, dtype=torch.bfloat16, float8=float8, **shape))
        everything = {"window": 700, "sinks": True, "softcap": 30.0, "alibi_slopes": True}
        check(make_problem(device, new, lens, dtype=torch.bfloat16, float8=float8, **shape, **everything))
        check(make_problem(device, new, lens, dtype=torch.bfloat16, float8=float8, **shape), causal=False)


@pytest.mark.gpu
def test_long_context(device):
    check(make_problem(device, [130, 1], [200_000, 140_001], kv_heads=1, group=4, head_size=128, dtype=torch.bfloat16))


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """The last blocks of a pool, and the last tokens of q and out, of more than 2^31 elements."""
    small = make_problem(device, [40], [100], head_size=128, dtype=torch.bfloat16)
    blocks, size = small.k_cache.shape[0], small.k_cache[0].numel()
    big = 2**31 // size + blocks
    pool = torch.zeros(big, 2, *small.k_cache.shape[1:], dtype=torch.bfloat16, device=device)
    pool[-blocks:, 0], pool[-blocks:, 1] = small.k_cache, small.v_cache
    tokens = 2**31 // small.q[0].numel() + 40
    q = torch.zeros(tokens, *small.q.shape[1:], dtype=torch.bfloat16, device=device)
    q[-40:] = small.q
    # Two sequences: all tokens but the last 40 belong to one without keys.
    cu = torch.tensor([0, tokens - 40, tokens], dtype=torch.int32, device=device)
    tables = torch.cat([small.block_tables, small.block_tables + (big - blocks)])
    seq_lens = torch.tensor([0, 100], dtype=torch.int32, device=device)
    out = varlen_prefill_attention(q, pool[:, 0], pool[:, 1], tables, cu, seq_lens, max_seqlen_q=tokens)
    want = varlen_prefill_attention_ref(*small.exact().prefill, max_seqlen_q=40)
    assert_close(out[-40:], want, torch.bfloat16)


@pytest.mark.gpu
def test_fullgraph_compile(device):
    p = make_problem(device, [50, 1], [300, 20], dtype=torch.bfloat16)
    compiled = torch.compile(lambda *args: varlen_prefill_attention(*args, max_seqlen_q=50) + 1, fullgraph=True)
    assert_close(compiled(*p.prefill), varlen_prefill_attention(*p.prefill, max_seqlen_q=50) + 1)


@pytest.mark.gpu
def test_cuda_graph(device):
    """A captured launch follows the lengths, tables and token counts that its tensors hold at replay."""
    batches = [([100, 1, 7], [400, 30, 7]), ([2, 0, 80], [2, 9, 900])]
    problems = [make_problem(device, new, n, dtype=torch.bfloat16, head_size=128) for new, n in batches]
    width = max(p.block_tables.shape[1] for p in problems)
    blocks = max(p.k_cache.shape[0] for p in problems)
    q = torch.zeros(128, *problems[0].q.shape[1:], dtype=torch.bfloat16, device=device)
    k_cache, v_cache = torch.zeros(2, blocks, *problems[0].k_cache.shape[1:], dtype=q.dtype, device=device)
    tables = torch.zeros(3, width, dtype=torch.int32, device=device)
    cu, seq_lens = torch.zeros(4, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    args = (q, k_cache, v_cache, tables, cu, seq_lens)
    varlen_prefill_attention(*args, max_seqlen_q=128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen_prefill_attention(*args, max_seqlen_q=128)
    for p in problems:
        for mine, new in zip(args, p.prefill, strict=True):
            mine[tuple(slice(n) for n in new.shape)] = new
        out.fill_(math.nan)
        graph.replay()
        want = varlen_prefill_attention_ref(*p.exact().prefill, max_seqlen_q=128)
        assert_close(out[: len(want)], want, torch.bfloat16)
        assert out[len(want) :].isnan().all(), "padding tokens were written"
