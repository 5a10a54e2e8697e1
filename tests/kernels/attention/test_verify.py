import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import make_problem, options, shapes, tree_masks
from support.compare import FLOATS, assert_close, assert_logs_close, poisoned
from support.examples import examples

from tritonllm.kernels import paged_verify_attention, paged_verify_attention_ref, varlen_prefill_attention_ref
from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.runtime import tuning

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


def check(p, max_seqlen_q, **more):
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=p.q.device)
    sizes = {"max_seqlen_q": max_seqlen_q, **more}
    got, lse = paged_verify_attention(*p.prefill, **sizes, **p.options, out=out, return_lse=True)
    assert got is out
    want, want_lse = paged_verify_attention_ref(*p.exact().prefill, **sizes, **p.options, return_lse=True)
    assert_close(out, want, p.q.dtype)
    assert_logs_close(lse, want_lse, p.q.dtype)


@settings(max_examples=examples(40))
@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=3),
    shape=shapes(),
    options=options(),
    dtype=st.sampled_from(FLOATS),
    tree=st.booleans(),
    programs=st.sampled_from([1, 12]),
)
def test_matches_reference(device, lens, shape, options, dtype, tree, programs):
    q_lens = [new for new, _ in lens]
    longest = max(1, *q_lens)
    if tree:
        options |= {"alibi_slopes": None, "window": options["window"] and options["window"] + longest}
    p = make_problem(device, q_lens, [new + old for new, old in lens], dtype=dtype, **shape, **options)
    with tuning.override("paged_verify_attention", {**TINY, "PROGRAMS": programs}):
        check(p, longest, tree_mask=tree_masks(q_lens, device) if tree else None)


@pytest.mark.parametrize("size", [31, 32])
def test_largest_tree(device, size):
    """Bit 31 is the sign of the mask."""
    p = make_problem(device, [size], [size + 5], group=1, head_size=16)
    with tuning.override("paged_verify_attention", TINY):
        check(p, size, tree_mask=tree_masks([size], device))


def test_default_config(device):
    check(make_problem(device, [4, 1, 0, 3], [130, 1, 0, 64], head_size=72, block_size=7), 4)


@pytest.mark.parametrize("window", [None, 12])
def test_reference_of_a_chain(device, window):
    """A chain is a tree, and what prefill computes."""
    q_lens, seq_lens = [5, 1, 0, 3], [40, 1, 9, 3]
    p = make_problem(device, q_lens, seq_lens, head_size=16, sinks=True, window=window)
    chain = torch.tensor([(2 << i) - 1 for n in q_lens for i in range(n)], dtype=torch.int32, device=device)
    want = varlen_prefill_attention_ref(*p.prefill, max_seqlen_q=5, **p.options)
    assert_close(paged_verify_attention_ref(*p.prefill, max_seqlen_q=5, **p.options), want)
    assert_close(paged_verify_attention_ref(*p.prefill, max_seqlen_q=5, tree_mask=chain, **p.options), want)


@pytest.mark.parametrize("window", [None, 6])
def test_reference_of_a_tree(device, window):
    """Each path of a tree gives what the path alone gives, as a chain."""
    parents, cached = [-1, 0, 0, 2, 1, 2], 7
    p = make_problem(device, [6], [cached + 6], head_size=16, block_size=1, window=None)
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4], [0, 2, 5]]
    assert all(path[-2:-1] == ([parents[i]] if i else []) for i, path in enumerate(paths))
    masks = torch.tensor([sum(1 << i for i in path) for path in paths], dtype=torch.int32, device=device)
    out = paged_verify_attention_ref(*p.prefill, max_seqlen_q=6, tree_mask=masks, window=window)
    for token, path in enumerate(paths):
        table = torch.cat([p.block_tables[:, :cached], p.block_tables[:, [cached + i for i in path]]], dim=1)
        cu = torch.tensor([0, 1], dtype=torch.int32, device=device)
        lens = torch.tensor([cached + len(path)], dtype=torch.int32, device=device)
        args = (p.q[token : token + 1], p.k_cache, p.v_cache, table, cu, lens)
        assert_close(out[token], varlen_prefill_attention_ref(*args, max_seqlen_q=1, window=window)[0])


CHAIN = torch.tensor([1, 3, 1], dtype=torch.int32)
BAD = [
    ({"q": torch.zeros(3, 4, 20)}, "q must have a head size"),
    ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int64)}, "cu_seqlens_q must be torch.int32"),
    ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, "cu_seqlens_q must begin with 0"),
    ({"cu_seqlens_q": torch.zeros(4, dtype=torch.int32)}, r"seq_lens must have shape \[3\]"),
    ({"max_seqlen_q": 0}, "max_seqlen_q must be at least 1"),
    ({"tree_mask": torch.zeros(3, dtype=torch.int64)}, "tree_mask must be torch.int32"),
    ({"tree_mask": CHAIN[:2]}, r"tree_mask must have shape \[3\]"),
    ({"tree_mask": CHAIN, "max_seqlen_q": 33}, "max_seqlen_q must be at most 32 with tree_mask"),
    ({"tree_mask": CHAIN, "alibi_slopes": torch.zeros(4)}, "alibi_slopes must be None with tree_mask"),
    ({"tree_mask": CHAIN, "window": 1}, "window must be at least max_seqlen_q=2"),
    ({"workspace": torch.zeros(9)}, "workspace must be torch.int32"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments(change, message):
    cache = torch.zeros(4, 16, 2, 64)
    args = {"q": torch.zeros(3, 4, 64), "k_cache": cache, "v_cache": cache, "max_seqlen_q": 2}
    args |= {"block_tables": torch.zeros(2, 2, dtype=torch.int32), "seq_lens": torch.zeros(2, dtype=torch.int32)}
    args |= {"cu_seqlens_q": torch.tensor([0, 2, 3], dtype=torch.int32)}
    for fn in (paged_verify_attention, paged_verify_attention_ref):
        with pytest.raises(ValueError, match=message):
            fn(**{**args, **change})


def test_operator(device):
    p = make_problem(device, [2, 1], [20, 3], head_size=16)
    for tree in (None, CHAIN.to(device)):
        q, k_cache, v_cache, tables, begins, lens = p.prefill
        given = (*Queries(q, begins, 2, tree_mask=tree), *Pages(k_cache, v_cache, tables, lens), *Hints(None))
        output = AttentionArgs(torch.empty(3, 4, 16, device=device), None, None, None, None, None, 0.25, 1.0, 0, 0.0)
        torch.library.opcheck(torch.ops.tritonllm.paged_verify_attention.default, (*given, *output))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 2, 5, 8, 16, 31])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(32, 8, 128), (14, 2, 64), (71, 1, 64), (8, 4, 256)])
def test_real_shapes(device, heads, kv_heads, head_size, new, dtype):
    lens = [4096, new, 777, 2048, 4095]
    q_lens = [new] * 4 + [1]
    shape = {"kv_heads": kv_heads, "group": heads // kv_heads, "head_size": head_size, "dtype": dtype}
    check(make_problem(device, q_lens, lens, **shape), new)
    check(make_problem(device, q_lens, lens, **shape), new, tree_mask=tree_masks(q_lens, device))
    check(make_problem(device, q_lens, lens, **shape, window=400, sinks=True, softcap=30.0), new)
    check(make_problem(device, q_lens, lens, **shape, alibi_slopes=True, float8=True, k_scale="heads"), new)
