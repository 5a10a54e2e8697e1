"""The Hopper decode kernel: when it is taken, and on a Hopper GPU that it computes what the reference does."""

from unittest.mock import patch

import pytest
import torch
from support.attention import make_problem, tree_masks
from support.compare import assert_close, assert_logs_close, poisoned
from support.marks import hopper

from tritonllm.kernels import (
    WORKSPACE_SIZE,
    paged_decode_attention,
    paged_decode_attention_ref,
    paged_verify_attention,
    paged_verify_attention_ref,
)
from tritonllm.kernels.attention.sm90 import decode as sm90
from tritonllm.kernels.runtime import tuning

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def config(rows=8, programs=264, block_n=64):
    shape = {"BLOCK_M": rows, "BLOCK_N": block_n, "PROGRAMS": programs, "num_warps": 4}
    return {"kernel": "sm90", **shape, "num_stages": 2, "maxnreg": 128 if rows <= 16 else 248}


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"head_size": 64}, True),
        ({"cache_dtype": FP8}, True),
        ({"cache_dtype": torch.float8_e5m2}, True),
        ({"block_size": 256}, True),
        ({"block_size": 8}, True),
        ({"head_size": 80}, False),
        ({"head_size": 256}, False),
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, False),
        ({"block_size": 12}, False),
        ({"block_size": 4}, False),
    ],
)
def test_shapes(changes, fits):
    given = {"head_size": 128, "block_size": 16, "dtype": BF16, "cache_dtype": BF16} | changes
    k, v = torch.empty(2, 4, given["block_size"], 2, given["head_size"]).to(given["cache_dtype"]).unbind()
    q = torch.empty(3, 4, given["head_size"], dtype=given["dtype"])
    assert sm90.fits(q, k, v) == fits


def test_layouts():
    """Keys and values must each be one row of memory after the other, which a pool of pairs of blocks is not."""
    q, (k, v) = torch.empty(3, 4, 128, dtype=BF16), torch.empty(2, 4, 16, 2, 128, dtype=BF16).unbind()
    pool = torch.empty(4, 2, 16, 2, 128, dtype=BF16)
    assert sm90.fits(q, k, v)
    assert not sm90.fits(q, pool[:, 0], pool[:, 1])
    assert not sm90.fits(q, k, v.transpose(1, 2).contiguous().transpose(1, 2))


def check(p, programs=264, tree=None, **state):
    """Decode if every sequence has one new token, else verify. ``state``: of decode, ``order`` and ``settled``."""
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=p.q.device)
    workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32, device=p.q.device)
    longest = int(p.cu_seqlens_q.diff().max())
    rows = max(8, 1 << (longest * p.q.shape[1] // p.k_cache.shape[2] - 1).bit_length())
    block_n = 128 if rows == 8 and p.k_cache.element_size() == 1 and programs > 100 else 64
    keywords = {**p.options, "return_lse": True}
    with patch.object(sm90, "launch", wraps=sm90.launch) as launch:
        if (p.cu_seqlens_q.diff() == 1).all():
            with tuning.override("paged_decode_attention", config(rows, programs, block_n)):
                _, lse = paged_decode_attention(*p.decode, **keywords, **state, out=out, workspace=workspace)
            want, want_lse = paged_decode_attention_ref(*p.exact().decode, **keywords)
        else:
            keywords |= {"max_seqlen_q": longest, "tree_mask": tree}
            with tuning.override("paged_verify_attention", config(rows, programs, block_n)):
                _, lse = paged_verify_attention(*p.prefill, **keywords, out=out, workspace=workspace)
            want, want_lse = paged_verify_attention_ref(*p.exact().prefill, **keywords)
    assert launch.call_count == 1
    assert (workspace == 0).all()
    assert_close(out, want, p.q.dtype)
    assert_logs_close(lse, want_lse, p.q.dtype)


OPTIONS = [
    {},
    {"window": 50},
    {"softcap": 5.0},
    {"alibi_slopes": True},
    {"window": 33, "sinks": True, "softcap": 3.0, "k_scale": "heads", "v_scale": "heads"},
]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("float8", [False, True, "e5m2"], ids=["16 bits", "e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("head_size", "block_size", "kv_heads", "group", "dtype"),
    [(128, 16, 2, 4, BF16), (64, 8, 1, 8, FP16), (128, 256, 2, 1, FP16), (64, 64, 2, 3, BF16), (128, 16, 1, 30, BF16)],
    ids=str,
)
@pytest.mark.parametrize("lens", [[300, 1, 0, 64, 1111], [200] * 40, [1], [5000, 17]], ids=str)
def test_decode_matches_reference(device, lens, head_size, block_size, kv_heads, group, dtype, float8, options):
    """Stretches and drawn pairs; stale slots hold NaN, table entries beyond the keys point nowhere."""
    shape = {"head_size": head_size, "block_size": block_size, "kv_heads": kv_heads, "group": group, "dtype": dtype}
    p = make_problem(device, [1] * len(lens), lens, layout="apart", float8=float8, **shape, **options)
    for programs in (7, 264):
        check(p, programs)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("float8", [False, True, "e5m2"], ids=["16 bits", "e4m3", "e5m2"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("q_lens", [[5, 0, 8, 2], [3] * 9], ids=str)
def test_verify_matches_reference(device, q_lens, tree, float8, options):
    if tree and "alibi_slopes" in options:
        options = {"sinks": True}
    lens = [new + 70 * i for i, new in enumerate(q_lens)] if 0 in q_lens else [200] * len(q_lens)
    p = make_problem(device, q_lens, lens, layout="apart", group=4, head_size=128, dtype=BF16, float8=float8, **options)
    for programs in (7, 264):
        check(p, programs, tree_masks(q_lens, device) if tree else None)


LENGTHS = {  # how many programs draw whole sequences of them, longest first, and how many cut them
    "few hundred": [37 * i % 900 for i in range(130)],
    "more than a vector of them": [11 * i % 400 for i in range(600)],
    "one too long to share out": [100] * 90 + [20_000],
    "all alike": [300] * 66,
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("order", ["longest first", "any"])
@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS)
def test_order_of_the_sequences(device, lens, order, settled):
    """Whatever it is, the results are right, and the workspace is clean for the next launch."""
    for more in ({}, {"kv_heads": 1, "group": 30}, {"window": 50, "float8": True, "sinks": True}):
        p = make_problem(device, [1] * len(lens), lens, layout="apart", head_size=128, dtype=BF16, **more)
        places = p.seq_lens.argsort(descending=True) if order == "longest first" else torch.randperm(len(lens))
        for programs in (7, 264):
            check(p, programs, order=places.to(device, torch.int32), settled=settled)


@pytest.mark.gpu
@hopper
def test_a_drawn_sequence_does_not_depend_on_the_others(device):
    """Sequences that are not cut: the same bits in any company and any order."""
    lens = [53 * i % 1200 for i in range(150)]
    p = make_problem(device, [1] * len(lens), lens, layout="apart", kv_heads=8, group=2, head_size=128, dtype=BF16)
    tensors = q, k, v, tables, seq_lens = p.decode
    shuffled = torch.randperm(len(lens), device=device)
    with tuning.override("paged_decode_attention", config()):
        out = paged_decode_attention(*tensors, order=seq_lens.argsort(descending=True).int())
        order = seq_lens[shuffled].argsort(descending=True).int()
        other = paged_decode_attention(q[shuffled], k, v, tables[shuffled], seq_lens[shuffled], order=order)
    assert torch.equal(out[shuffled], other)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("size", [1, 2, 9])
def test_any_workspace(device, size):
    p = make_problem(device, [1] * 4, [90, 1, 0, 333], layout="apart", head_size=128, dtype=BF16)
    workspace = torch.zeros(size, dtype=torch.int32, device=device)
    with tuning.override("paged_decode_attention", config()):
        out = paged_decode_attention(*p.decode, workspace=workspace)
    assert_close(out, paged_decode_attention_ref(*p.exact().decode), BF16)
    assert (workspace == 0).all()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "lens", [[30_000, 70, 4001], [900] * 200, LENGTHS["few hundred"]], ids=["stretches", "drawn pairs", "unequal ones"]
)
def test_same_bits_every_time(device, lens):
    p = make_problem(device, [1] * len(lens), lens, layout="apart", head_size=128, dtype=BF16)
    workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32, device=device)
    state = {"workspace": workspace, "order": p.seq_lens.argsort(descending=True).int()}
    with tuning.override("paged_decode_attention", config()):
        first = paged_decode_attention(*p.decode, **state).clone()
        for _ in range(200):
            assert torch.equal(paged_decode_attention(*p.decode, **state), first)
    assert (workspace == 0).all()
