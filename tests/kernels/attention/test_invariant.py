from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import make_problem, options, shapes
from support.compare import FLOATS, assert_close, assert_logs_close, poisoned
from support.examples import examples

from tritonllm.kernels import (
    batch_invariant_attention,
    batch_invariant_attention_ref,
    varlen_prefill_attention_ref,
)
from tritonllm.kernels.attention.portable import segments


@settings(max_examples=examples(25))
@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), max_size=3),
    shape=shapes(),
    options=options(),
    dtype=st.sampled_from(FLOATS),
    padding=st.integers(0, 3),
)
def test_matches_reference(device, lens, shape, options, dtype, padding):
    new = [n for n, _ in lens]
    p = make_problem(device, new, [n + cached for n, cached in lens], dtype=dtype, padding=padding, **shape, **options)
    tokens = len(p.q) - padding
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=p.q.device)
    got, lse = batch_invariant_attention(*p.prefill, **p.options, return_lse=True, out=out)
    assert got is out
    want, want_lse = batch_invariant_attention_ref(*p.exact().prefill, **p.options, return_lse=True)
    assert_close(out[:tokens], want[:tokens], dtype)
    assert_logs_close(lse[:tokens], want_lse[:tokens], dtype)
    assert out[tokens:].isnan().all(), "padding tokens were written"


def test_the_reference_is_attention(device):
    p = make_problem(device, [9, 0, 1, 4], [9, 3, 20, 30], group=3, head_size=16, sinks=True, alibi_slopes=True)
    want = varlen_prefill_attention_ref(*p.prefill, max_seqlen_q=9, **p.options)
    assert_close(batch_invariant_attention_ref(*p.prefill, **p.options), want)


def cut(p, seq, first, end):
    """Of sequence ``seq`` its new tokens from ``first`` to ``end``, as a call of their own."""
    begin = int(p.cu_seqlens_q[seq])
    new = int(p.cu_seqlens_q[seq + 1]) - begin
    length = p.seq_lens[seq : seq + 1] - (new - end)
    cu = torch.tensor([0, end - first], dtype=torch.int32, device=p.q.device)
    q = p.q[begin + first : begin + end]
    return q, p.k_cache, p.v_cache, p.block_tables[seq : seq + 1], cu, length


@pytest.mark.gpu  # the interpreter multiplies with numpy, whose rows depend on their place
@settings(max_examples=examples(8))
@given(
    new=st.integers(2, 90),
    cached=st.integers(0, 40),
    options=options(),
    dtype=st.sampled_from(FLOATS),
    place=st.floats(0, 1),
)
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(device, new, cached, options, dtype, place):
    p = make_problem(device, [3, new, 1], [5, new + cached, 70], head_size=16, block_size=5, dtype=dtype, **options)
    whole = batch_invariant_attention(*p.prefill, **p.options)[3 : 3 + new]
    at = max(1, min(new - 1, round(place * new)))
    for first, end in ((0, at), (at, new), (at, at + 1), (new - 1, new)):
        part = batch_invariant_attention(*cut(p, 1, first, end), **p.options)
        assert torch.equal(part, whole[first:end]), (first, end)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "head_size", "more"),
    [
        ((8, 4), 128, {}),
        ((8, 4), 128, {"window": 300}),
        ((2, 7), 64, {"softcap": 30.0}),
        ((2, 8), 64, {"sinks": True, "window": 128}),
        ((4, 1), 256, {}),
        ((2, 2), 512, {}),
        ((8, 1), 80, {"alibi_slopes": True}),
    ],
)
def test_no_cut_changes_a_bit(device, heads, head_size, more, dtype):
    kv_heads, group = heads
    shape = {"kv_heads": kv_heads, "group": group, "head_size": head_size, "block_size": 16}
    p = make_problem(device, [1200, 5], [1500, 2000], dtype=dtype, **shape, **more)
    whole = batch_invariant_attention(*p.prefill, **p.options)[:1200]
    for first, end in ((0, 1), (0, 17), (1, 900), (63, 129), (900, 1200), (1199, 1200), (500, 505)):
        part = batch_invariant_attention(*cut(p, 0, first, end), **p.options)
        assert torch.equal(part, whole[first:end]), (first, end)


@settings(max_examples=examples(25))
@given(
    lens=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (2, 3), (1, 5)]),
    window=st.sampled_from([None, 3, 100]),
    more=st.sampled_from([{}, {"sinks": True}, {"softcap": 30.0, "alibi_slopes": True, "v_scale": "heads"}]),
    programs=st.sampled_from([1, 20, 8192]),
    dtype=st.sampled_from(FLOATS),
    ordered=st.booleans(),
)
def test_long_sequences_that_are_shared_out(device, lens, heads, window, more, programs, dtype, ordered):
    new = [n for n, _ in lens]
    kv_heads, group = heads
    shape = {"kv_heads": kv_heads, "group": group, "head_size": 16, "block_size": 32, "window": window}
    p = make_problem(device, new, [n + cached for n, cached in lens], padding=1, dtype=dtype, **shape, **more)
    limits = {"max_seqlen_q": max(1, *new), "max_seqlen_k": max(1, int(p.seq_lens.max()))}
    if ordered:
        limits["order"] = torch.randperm(len(lens)).to(device, torch.int32)
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=p.q.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_PROGRAMS", programs)
        patch.setattr(segments, "SEGMENT_KEYS", 64)
        _, lse = batch_invariant_attention(*p.prefill, **p.options, **limits, return_lse=True, out=out)
    want, want_lse = batch_invariant_attention_ref(*p.exact().prefill, **p.options, return_lse=True)
    tokens = sum(new)
    assert_close(out[:tokens], want[:tokens], dtype)
    assert_logs_close(lse[:tokens], want_lse[:tokens], dtype)
    assert out[tokens:].isnan().all(), "padding tokens were written"


@pytest.mark.parametrize("new", [1, 3])
def test_a_wrong_bound_harms_its_own_sequence_alone(device, new):
    """Sums of segments beyond the bound have no place, and must not take a neighbour's."""
    lens = [200, 64, 150, 190]  # the last one would write behind the sums of all
    shape = {"kv_heads": 1, "group": 2, "head_size": 16, "block_size": 32}
    p = make_problem(device, [new] * 4, lens, dtype=torch.float32, **shape)
    want = batch_invariant_attention_ref(*p.exact().prefill, **p.options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "SEGMENT_KEYS", 64)
        got = batch_invariant_attention(*p.prefill, **p.options, max_seqlen_q=new, max_seqlen_k=150)
    assert_close(got[new : 3 * new], want[new : 3 * new], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "head_size", "more"),
    [
        ((8, 4), 128, {}),
        ((8, 2), 128, {"window": 900}),
        ((2, 7), 64, {"softcap": 30.0}),
        ((2, 8), 64, {"sinks": True, "window": 1500}),
        ((1, 32), 128, {}),
        ((4, 1), 256, {}),
        ((2, 2), 512, {}),
        ((8, 1), 80, {"alibi_slopes": True}),
    ],
)
@pytest.mark.parametrize("new", [1, 5])
def test_the_same_bits_however_sequences_are_shared_out(device, heads, head_size, more, dtype, new):
    kv_heads, group = heads
    shape = {"kv_heads": kv_heads, "group": group, "head_size": head_size, "block_size": 16}
    lens = [5, 511, 512, 513, 1024, 1500, 2049, 4000, 7000]
    p = make_problem(device, [new] * len(lens), lens, dtype=dtype, **shape, **more)
    want, want_lse = batch_invariant_attention(*p.prefill, **p.options, return_lse=True)
    for most, end in ((8000, 9), (7000, 9), (1024, 5)):
        some = {"q": p.q[: new * end], "cu_seqlens_q": p.cu_seqlens_q[: end + 1], "seq_lens": p.seq_lens[:end]}
        few = replace(p, block_tables=p.block_tables[:end], **some)
        for programs in (1, 200, 8192):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(segments, "_PROGRAMS", programs)
                order = torch.arange(end - 1, -1, -1, dtype=torch.int32, device=device)
                limits = {"max_seqlen_q": new, "max_seqlen_k": most, "order": None if programs == 200 else order}
                got, lse = batch_invariant_attention(*few.prefill, **p.options, **limits, return_lse=True)
            assert torch.equal(got, want[: new * end]), (most, programs)
            assert torch.equal(lse, want_lse[: new * end]), (most, programs)


def test_empty(device):
    p = make_problem(device, [], [], head_size=16)
    assert batch_invariant_attention(*p.prefill).shape == p.q.shape


@pytest.mark.parametrize(("name", "bad"), [("cu_seqlens_q", torch.zeros(0, dtype=torch.int32)), ("q", torch.zeros(3))])
def test_bad_arguments_are_named(device, name, bad):
    p = make_problem(device, [3], [5], head_size=16)
    names = ("q", "k_cache", "v_cache", "block_tables", "cu_seqlens_q", "seq_lens")
    given = dict(zip(names, p.prefill, strict=True)) | {name: bad.to(device)}
    with pytest.raises(ValueError, match=name):
        batch_invariant_attention(**given)
