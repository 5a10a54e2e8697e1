"""The CPU's attention against the references."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import LAYOUTS, make_problem, tree_masks
from support.compare import FLOATS, assert_close, poisoned
from support.cpu_path import on_cpu
from support.examples import examples

from tritonllm.kernels import (
    fused_decode_attention,
    fused_decode_attention_ref,
    paged_decode_attention,
    paged_decode_attention_ref,
    paged_verify_attention,
    paged_verify_attention_ref,
    qk_norm_rope_store,
    qk_norm_rope_store_ref,
    varlen_prefill_attention,
    varlen_prefill_attention_ref,
)

CPU = torch.device("cpu")
SHAPES = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 3, 8]),
        "head_size": st.sampled_from([16, 40, 64, 128]),
        "block_size": st.sampled_from([1, 5, 16]),
        "layout": st.sampled_from(LAYOUTS),
        "dtype": st.sampled_from(FLOATS),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([None, 0.3]),
        "window": st.none() | st.integers(1, 70),
        "k_scale": st.sampled_from([None, 0.75]),
        "v_scale": st.sampled_from([None, 1.5]),
    }
)
LEFT = [{"softcap": 4.0}, {"sinks": True}, {"alibi_slopes": True}, {"k_scale": "heads"}, {"v_scale": "heads"}]


# lengths apart and close together: padded batches, and sequences one by one
@settings(max_examples=examples(100))
@given(
    seq_lens=st.lists(st.integers(0, 100), max_size=4) | st.lists(st.integers(60, 70), min_size=2, max_size=4),
    shape=SHAPES,
    options=OPTIONS,
)
def test_decode(seq_lens, shape, options):
    p = make_problem(CPU, [1] * len(seq_lens), seq_lens, **shape, **options)
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=CPU)
    got = on_cpu(paged_decode_attention, *p.decode, **p.options, out=out)
    assert got is out
    assert_close(out, paged_decode_attention_ref(*p.exact().decode, **p.options), p.q.dtype)


@settings(max_examples=examples(100))
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=3),
    shape=SHAPES,
    options=OPTIONS,
    causal=st.booleans(),
    mask_elements=st.sampled_from([2**24, 100]),
)
def test_prefill(lens, shape, options, causal, mask_elements):
    q_lens, seq_lens = [new for new, _ in lens], [new + cached for new, cached in lens]
    p = make_problem(CPU, q_lens, seq_lens, padding=2, **shape, **options)
    limits = {"max_seqlen_q": max([1, *q_lens]), "causal": causal}
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=CPU)
    from tritonllm.kernels.attention import cpu

    before, cpu.MASK_ELEMENTS = cpu.MASK_ELEMENTS, mask_elements
    try:
        on_cpu(varlen_prefill_attention, *p.prefill, **limits, **p.options, out=out)
    finally:
        cpu.MASK_ELEMENTS = before
    want = varlen_prefill_attention_ref(*p.exact().prefill, **limits, **p.options)
    tokens = sum(q_lens)
    assert_close(out[:tokens], want[:tokens], p.q.dtype)
    assert out[tokens:].isnan().all()  # padding stays as it is


@settings(max_examples=examples(100))
@given(
    lens=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=3),
    shape=SHAPES,
    options=OPTIONS,
    tree=st.booleans(),
)
def test_verify(lens, shape, options, tree):
    q_lens, seq_lens = [new for new, _ in lens], [new + cached for new, cached in lens]
    if tree:
        options |= {"window": None}
    p = make_problem(CPU, q_lens, seq_lens, padding=2, **shape, **options)
    of_drafts = {"max_seqlen_q": max([1, *q_lens]), "tree_mask": tree_masks([*q_lens, 2], CPU) if tree else None}
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=CPU)
    on_cpu(paged_verify_attention, *p.prefill, **of_drafts, **p.options, out=out)
    want = paged_verify_attention_ref(*p.exact().prefill, **of_drafts, **p.options)
    tokens = sum(q_lens)
    assert_close(out[:tokens], want[:tokens], p.q.dtype)
    assert out[tokens:].isnan().all()


def test_what_it_leaves_to_the_reference():
    for option in LEFT:
        p = make_problem(CPU, [1, 1], [20, 3], **option)
        got = on_cpu(paged_decode_attention, *p.decode, **p.options, takes=False)
        assert torch.equal(got, paged_decode_attention_ref(*p.decode, **p.options))
    p = make_problem(CPU, [1, 1], [20, 3])
    on_cpu(paged_decode_attention, *p.decode, return_lse=True, takes=False)
    p = make_problem(CPU, [4], [3])  # a query that sees no key
    on_cpu(varlen_prefill_attention, *p.prefill, max_seqlen_q=4, takes=False)
    p = make_problem(CPU, [4], [20], window=9)
    of_drafts = {"max_seqlen_q": 4, "tree_mask": tree_masks([4], CPU)}
    on_cpu(paged_verify_attention, *p.prefill, **of_drafts, **p.options, takes=False)
    p = make_problem(CPU, [1, 1], [20, 3], float8=True)
    on_cpu(paged_decode_attention, *p.decode, takes=False)


HEADS = {
    "rotary": st.sampled_from([None, 16, 40]),
    "interleaved": st.booleans(),
    "norm": st.booleans(),
    "weight_offset": st.sampled_from([0.0, 1.0]),
    "dtype": st.sampled_from(FLOATS),
    "weight_dtype": st.sampled_from(FLOATS),
}


def make_heads(tokens, head_size, *, rotary, interleaved, norm, weight_offset, weight_dtype, **_):
    rope = (torch.arange(tokens) * 7 % 50, torch.randn(50, rotary)) if rotary else (None, None)
    weights = {f"{x}_weight": torch.randn(head_size).to(weight_dtype) for x in "qk"} if norm else {}
    return rope, {**weights, "weight_offset": weight_offset, "interleaved": interleaved}


@settings(max_examples=examples(60))
@given(tokens=st.integers(0, 5), kv_heads=st.integers(1, 2), group=st.sampled_from([1, 3]), **HEADS)
def test_qk_norm_rope_store(tokens, kv_heads, group, dtype, **heads):
    rope, keywords = make_heads(tokens, 40, **heads)
    qkv = torch.randn(tokens, (group + 2) * kv_heads * 40).to(dtype)
    caches = [torch.full((4, 3, kv_heads, 40), float("nan"), dtype=dtype) for _ in range(4)]
    slots = torch.randperm(12)[:tokens]
    mine, theirs = qkv.clone(), qkv.clone()
    q = on_cpu(qk_norm_rope_store, mine, *caches[:2], slots, *rope, **keywords)
    want = qk_norm_rope_store_ref(theirs, *caches[2:], slots, *rope, **keywords)
    assert q.data_ptr() == mine.data_ptr() or not tokens
    for got, ref in ((q, want), (mine, theirs), (caches[0], caches[2]), (caches[1], caches[3])):
        assert torch.equal(got.isnan(), ref.isnan())
        assert_close(got.nan_to_num(), ref.nan_to_num(), dtype)


def test_tokens_that_are_not_stored_are_left_to_the_reference():
    caches = torch.zeros(2, 4, 3, 1, 40).unbind()
    on_cpu(qk_norm_rope_store, torch.randn(2, 120), *caches, torch.tensor([5, -1]), takes=False)


@settings(max_examples=examples(40))
@given(lens=st.lists(st.integers(1, 40), min_size=1, max_size=3), dtype=st.sampled_from(FLOATS), rotary=st.booleans())
def test_fused_decode(lens, dtype, rotary):
    p = make_problem(CPU, [1] * len(lens), lens, dtype=dtype)
    last = torch.tensor([n - 1 for n in lens])
    slots = p.block_tables.gather(1, last[:, None] // 16)[:, 0] * 16 + last % 16
    qkv = torch.randn(len(lens), 8 * 64).to(dtype)
    rope = (last, torch.randn(50, 64)) if rotary else (None, None)
    copies = [[t.clone() for t in (qkv, p.k_cache, p.v_cache)] for _ in range(2)]
    rest = slots, p.block_tables, p.seq_lens, *rope
    got = on_cpu(fused_decode_attention, *copies[0], *rest)
    want = fused_decode_attention_ref(*copies[1], *rest)
    assert_close(got, want, dtype)
    for mine, theirs in zip(copies[0][1:], copies[1][1:], strict=True):
        assert_close(mine.nan_to_num(), theirs.nan_to_num(), dtype)
