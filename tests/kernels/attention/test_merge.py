import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, assert_logs_close, poisoned, with_row_padding
from support.examples import examples

from tritonllm.kernels import merge_attention_states, merge_attention_states_ref


def random_states(parts, tokens, heads, head_size, dtype, device, empty=0.0):
    """Outputs and lses of `parts` sets and one more; a set is empty with this chance, and its output then NaN."""
    lse = torch.randn(parts + 1, tokens, heads, device=device) * 3 + 30
    lse[torch.rand(lse.shape, device=device) < empty] = -math.inf
    out = torch.randn(parts + 1, tokens, heads, head_size, device=device).to(dtype)
    out[lse == -math.inf] = math.nan
    return out[:-1], lse[:-1], out[-1], lse[-1]


@settings(max_examples=examples(50))
@given(
    parts=st.sampled_from([1, 2, 3, 16]),
    tokens=st.integers(0, 5),
    heads=st.sampled_from([1, 3, 8]),
    head_size=st.sampled_from([16, 24, 80, 128]),
    dtype=st.sampled_from(FLOATS),
    empty=st.sampled_from([0.0, 0.3, 1.0]),
    masked=st.booleans(),
)
def test_matches_reference(device, parts, tokens, heads, head_size, dtype, empty, masked):
    out_a, lse_a, out_b, lse_b = random_states(parts, tokens, heads, head_size, dtype, device, empty)
    out_a, out_b, lse_b = with_row_padding(out_a, 8), with_row_padding(out_b, 16), with_row_padding(lse_b, 1)
    use_a = torch.rand(tokens, device=device) < 0.5 if masked else None
    out = poisoned(tokens, heads, head_size, dtype=dtype, device=device)
    got, lse = merge_attention_states(out_a, lse_a, out_b, lse_b, use_a=use_a, out=out, return_lse=True)
    assert got is out
    exact = out_a.float(), lse_a, out_b.float(), lse_b
    want, want_lse = merge_attention_states_ref(*exact, use_a=use_a, return_lse=True)
    assert_close(out, want, dtype)
    assert_logs_close(lse, want_lse, torch.float32)


@pytest.mark.parametrize("parts", [None, 1, 4])
def test_parts_of_a_softmax(device, parts):
    """The reference and the kernel, against the softmax over all keys; `None`: one set without its own dimension."""
    keys, size = 7, 16
    sets = (parts or 1) + 1
    logits = torch.randn(sets, 3, 2, keys, device=device) * 4
    values = torch.randn(sets, keys, size, device=device)
    outs = torch.einsum("nthk,nkd->nthd", logits.softmax(-1), values)
    lses = logits.logsumexp(-1)
    want = logits.permute(1, 2, 0, 3).flatten(-2).softmax(-1) @ values.flatten(0, 1)
    a = (outs[0], lses[0]) if parts is None else (outs[:-1], lses[:-1])
    for merge in (merge_attention_states, merge_attention_states_ref):
        out, lse = merge(*a, outs[-1], lses[-1], return_lse=True)
        assert_close(out, want)
        assert_close(lse, lses.logsumexp(0))
        assert torch.equal(merge(*a, outs[-1], lses[-1]), out)


def test_an_empty_set_changes_nothing(device):
    (out,), (lse,), nothing, empty = random_states(1, 2, 3, 16, torch.float32, device)
    nothing.fill_(math.nan)
    empty.fill_(-math.inf)
    for states in ((out, lse, nothing, empty), (nothing, empty, out, lse)):
        merged, merged_lse = merge_attention_states(*states, return_lse=True)
        assert torch.equal(merged, out)
        torch.testing.assert_close(merged_lse, lse)
    merged, merged_lse = merge_attention_states(nothing, empty, nothing, empty, return_lse=True)
    assert (merged == 0).all() and (merged_lse == -math.inf).all()


@pytest.mark.parametrize("scale", [1e3, 1e30])
def test_large_lses(device, scale):
    """One set takes all the weight, however far apart they are."""
    out_a, lse_a, out_b, lse_b = random_states(2, 4, 3, 16, torch.float32, device)
    lse_a[0], lse_a[1], lse_b[:] = -scale, scale, 0.0
    out, lse = merge_attention_states(out_a, lse_a, out_b, lse_b, return_lse=True)
    assert torch.equal(out, out_a[1]) and (lse == scale).all()
    out, lse = merge_attention_states(out_a, lse_a - 3 * scale, out_b, lse_b - scale, return_lse=True)
    assert torch.equal(out, out_b) and (lse == -scale).all()


BAD = [
    ({"out_b": torch.zeros(2, 16)}, r"out_b must have shape \[T, H, D\]"),
    ({"out_a": torch.zeros(1, 2, 4, 16)}, r"out_a must have shape \[N, 3, 4, 16\]"),
    ({"out_a": torch.zeros(2, 3, 4, 16).half()}, "out_a must be torch.float32"),
    ({"lse_a": torch.zeros(1, 3, 4)}, r"lse_a must have shape \[2, 3, 4\]"),
    ({"lse_a": torch.zeros(2, 3, 4).half()}, "lse_a must be torch.float32"),
    ({"lse_b": torch.zeros(2, 4)}, r"lse_b must have shape \[3, 4\]"),
    ({"use_a": torch.zeros(3)}, "use_a must be torch.bool"),
    ({"use_a": torch.zeros(2, dtype=torch.bool)}, r"use_a must have shape \[3\]"),
    ({"out": torch.zeros(3, 4, 8)}, "out must have shape"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments(change, message):
    states = {"out_a": torch.zeros(2, 3, 4, 16), "lse_a": torch.zeros(2, 3, 4)}
    states |= {"out_b": torch.zeros(3, 4, 16), "lse_b": torch.zeros(3, 4)}
    for fn in (merge_attention_states, merge_attention_states_ref):
        with pytest.raises(ValueError, match=message):
            fn(**{**states, **change})


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    states = random_states(2, 3, 2, 16, torch.float32, device)
    use_a = torch.tensor([True, False, True], device=device)
    for mask, lse in ((None, None), (use_a, torch.empty(3, 2, device=device))):
        args = (*states, mask, torch.empty(3, 2, 16, device=device), lse)
        torch.library.opcheck(torch.ops.tritonllm.merge_attention_states.default, args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 257, 32, 128), (2, 256, 32, 128), (16, 8, 71, 64), (3, 17, 8, 512)])
def test_real_shapes(device, shape, dtype):
    states = random_states(*shape, dtype, device, empty=0.2)
    use_a = torch.rand(shape[1], device=device) < 0.8
    exact = [x.float() for x in states]
    assert_close(merge_attention_states(*states, use_a=use_a), merge_attention_states_ref(*exact, use_a=use_a), dtype)


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """The last of three parts of a gigaelement each."""
    tokens, heads, head_size = 2**30 // (64 * 512), 64, 512
    out_a = torch.zeros(3, tokens, heads, head_size, dtype=torch.bfloat16, device=device)
    out_a[2, -1] = 1.0
    lse_a = torch.full((3, tokens, heads), -math.inf, device=device)
    lse_a[2] = 0.0
    out = merge_attention_states(out_a, lse_a, out_a[0], lse_a[0])
    assert (out[-1] == 1).all() and (out[:-1] == 0).all()
