"""The Hopper kernel: when it is taken, and on a Hopper GPU that it computes what the portable one does."""

from unittest.mock import patch

import pytest
import torch
from support.attention import Problem, make_problem
from support.chips import chosen_for
from support.compare import assert_close, assert_logs_close, poisoned
from support.marks import hopper

from tritonllm.kernels import varlen_prefill_attention, varlen_prefill_attention_ref
from tritonllm.kernels.attention import prefill
from tritonllm.kernels.attention.arguments import Options, Pages, Queries
from tritonllm.kernels.attention.common import check_attention
from tritonllm.kernels.attention.sm90 import decode
from tritonllm.kernels.attention.sm90 import prefill as sm90
from tritonllm.kernels.runtime import tuning

BF16, FP16 = torch.bfloat16, torch.float16


def caches(head_size=128, block_size=16, dtype=BF16, blocks=4):
    return torch.empty(2, blocks, block_size, 2, head_size, dtype=dtype).unbind()


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"head_size": 64, "dtype": FP16}, True),
        ({"block_size": 256}, True),
        ({"block_size": 8}, True),
        ({"head_size": 96}, False),
        ({"dtype": torch.float32}, False),
        ({"block_size": 12}, False),
        ({"block_size": 4}, False),
    ],
)
def test_shapes(changes, fits):
    k, v = caches(**changes)
    q = torch.empty(3, 4, k.shape[-1], dtype=k.dtype)
    assert sm90.fits(q, k, v) == fits


def test_layouts():
    """Keys and values must each be one row of memory after the other, which a pool of pairs of blocks is not."""
    q, (k, v) = torch.empty(3, 4, 128, dtype=BF16), caches()
    pool = torch.empty(4, 2, 16, 2, 128, dtype=BF16)
    assert not sm90.fits(q, pool[:, 0], pool[:, 1])
    assert not sm90.fits(q, k, v.transpose(1, 2).contiguous().transpose(1, 2))
    assert not sm90.fits(q, k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn))
    assert not sm90.fits(q.half(), k, v)
    shifted = torch.empty(v.numel() + 1, dtype=BF16)[1:].view(v.shape)
    assert sm90.fits(q, k, shifted) == (shifted.data_ptr() % 16 == 0)


def check(p: Problem, causal: bool, taken=sm90) -> None:
    longest = max([1, *p.cu_seqlens_q.diff().tolist()])
    keywords = {"max_seqlen_q": longest, "causal": causal, "return_lse": True, **p.options}
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=p.q.device)
    with patch.object(taken, "launch", wraps=taken.launch) as launch:
        _, lse = varlen_prefill_attention(*p.prefill, **keywords, out=out)
    assert launch.call_count == 1
    want, want_lse = varlen_prefill_attention_ref(*p.exact().prefill, **keywords)
    assert_close(out, want, p.q.dtype)
    assert_logs_close(lse, want_lse, p.q.dtype)
    with chosen_for(None):
        other, _ = varlen_prefill_attention(*p.prefill, **keywords)
    assert_close(out, other.float(), p.q.dtype)


BATCHES = {
    "one": ([200], [200]),
    "chunk": ([128], [1000]),
    "ragged": ([300, 1, 0, 64, 17], [300, 90, 10, 1000, 17]),
    "more queries than keys": ([70, 40], [20, 40]),
    "many": ([70] * 150, [70 + 7 * i % 64 for i in range(150)]),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 70},
        {"window": 5, "sinks": True},
        {"causal": False, "softcap": 5.0},
        {"alibi_slopes": True, "softcap": 4.0, "k_scale": "heads", "v_scale": "heads"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("head_size", "block_size", "kv_heads", "group", "dtype"),
    [(128, 16, 2, 4, BF16), (64, 8, 1, 8, FP16), (128, 256, 2, 1, FP16), (64, 64, 2, 3, BF16), (128, 16, 1, 71, BF16)],
    ids=str,
)
@pytest.mark.parametrize("batch", BATCHES)
def test_matches_reference(device, batch, head_size, block_size, kv_heads, group, dtype, options):
    """Stale slots hold NaN, table entries beyond the keys point nowhere."""
    causal = options.get("causal", True)
    options = {name: value for name, value in options.items() if name != "causal"}
    shape = {"head_size": head_size, "block_size": block_size, "kv_heads": kv_heads, "group": group, "dtype": dtype}
    p = make_problem(device, *BATCHES[batch], layout="apart", **shape, **options)
    for split_rows in (0, 1 << 30):  # never and always
        with patch.object(prefill, "SPLIT_ROWS", split_rows), patch.object(prefill, "SPLIT_TOKENS", 1 << 30):
            check(p, causal)


FEW = {  # new tokens, and keys
    "one turn": ([40], [9000]),
    "one turn of two tiles": ([60], [5000]),
    "several": ([33, 0, 16, 1, 100], [4000, 70, 20, 3001, 129]),
    "no past": ([200], [200]),
    "more queries than keys": ([60, 33], [10, 700]),
    "nobody": ([0, 0], [30, 0]),
    "more tiles than programs": ([40] * 40, [900 + 50 * i for i in range(40)]),
}


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    "options", [{}, {"window": 700, "sinks": True}, {"alibi_slopes": True, "softcap": 4.0, "k_scale": "heads"}], ids=str
)
@pytest.mark.parametrize(("kv_heads", "group", "head_size"), [(8, 4, 128), (1, 71, 64), (2, 3, 128)], ids=str)
@pytest.mark.parametrize("batch", FEW)
def test_keys_shared_out(device, batch, kv_heads, group, head_size, options):
    """Few rows: the parts of their keys, merged, and the workspace is zero again."""
    shape = {"kv_heads": kv_heads, "group": group, "head_size": head_size, "block_size": 16, "dtype": BF16}
    p = make_problem(device, *FEW[batch], layout="apart", **shape, **options)
    longest = max(34, *FEW[batch][0])  # or decode's kernel takes them
    workspace = torch.zeros(4096, dtype=torch.int32, device=device)
    keywords = {"max_seqlen_q": longest, "return_lse": True, **p.options}
    with patch.object(prefill, "SPLIT_ROWS", 1 << 30), patch.object(prefill, "SPLIT_TOKENS", 1 << 30):
        outs = [varlen_prefill_attention(*p.prefill, **keywords, workspace=workspace) for _ in range(3)]
    assert (workspace == 0).all()
    want, want_lse = varlen_prefill_attention_ref(*p.exact().prefill, **keywords)
    for out, lse in outs:
        assert_close(out, want, BF16)
        assert_logs_close(lse, want_lse, BF16)
        assert torch.equal(out, outs[0][0]), "the order of merging depends on time"


@pytest.mark.gpu
@hopper
def test_keys_shared_out_in_a_graph(device):
    """Into how many parts is decided when the graph runs."""
    batches = [([40, 3], [6000, 9]), ([1, 63], [1, 64]), ([0, 34], [0, 3000])]
    shape = {"kv_heads": 8, "group": 4, "head_size": 128, "block_size": 16, "dtype": BF16, "layout": "apart"}
    problems = [make_problem(device, *batch, **shape) for batch in batches]
    width = max(p.block_tables.shape[1] for p in problems)
    blocks = max(p.k_cache.shape[0] for p in problems)
    q = torch.zeros(64, 32, 128, dtype=BF16, device=device)
    k_cache, v_cache = torch.zeros(2, blocks, 16, 8, 128, dtype=BF16, device=device)
    tables = torch.zeros(2, width, dtype=torch.int32, device=device)
    cu, seq_lens = torch.zeros(3, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    args = (q, k_cache, v_cache, tables, cu, seq_lens)
    varlen_prefill_attention(*args, max_seqlen_q=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen_prefill_attention(*args, max_seqlen_q=64)
    for p in [*problems, problems[0]]:
        for mine, new in zip(args, p.prefill, strict=True):
            mine[tuple(slice(n) for n in new.shape)] = new
        graph.replay()
        want = varlen_prefill_attention_ref(*p.exact().prefill, max_seqlen_q=64)
        assert_close(out[: len(want)], want, BF16)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("options", [{}, {"window": 70, "sinks": True}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize(
    ("new", "keys"),
    [([8], [5000]), ([8, 0, 3, 1], [300, 20, 3, 900]), ([8, 5], [2, 5]), ([2] * 300, [40 + i for i in range(300)])],
    ids=["one turn", "several", "more queries than keys", "many"],
)
@pytest.mark.parametrize(("head_size", "float8"), [(64, False), (128, False), (128, True)])
def test_very_few_rows_are_decodes(device, new, keys, head_size, float8, options):
    shape = {"kv_heads": 8, "group": 4, "head_size": head_size, "block_size": 16, "dtype": BF16, "float8": float8}
    check(make_problem(device, new, keys, layout="apart", **shape, **options), causal=True, taken=decode)


def test_which_kernel_few_rows_get():
    """By rows of a sequence, then by rows of the step: the same for all numbers of tokens below a power of two."""
    k, v = caches()
    tables, lens = torch.empty(1, 8, dtype=torch.int32), torch.empty(1, dtype=torch.int32)

    def few(tokens, longest, causal=True, groups=1):
        q = torch.empty(tokens, 8 * groups, 128, dtype=BF16)  # groups of 4
        queries = Queries(q, torch.empty(2, dtype=torch.int32), longest, causal)
        args = check_attention(q, Pages(k, v, tables, lens), Options(None, None, 0.0), None, False, batch=1)
        with chosen_for(90):
            return prefill._config_key(queries, Pages(k, v, tables, lens), args)["few"]

    assert [few(9, 8), few(9, 9), few(9, 8, causal=False)] == ["decode", "split", "split"]
    assert [few(513, 513), few(1024, 1024), few(1025, 1025)] == ["split", "split", "no"]
    assert [few(512, 512, groups=4), few(513, 513, groups=4)] == ["split", "no"]


HOPPER = {"kernel": "sm90", "BLOCK_M": 128, "SPLIT": 0, "num_warps": 4}
NARROW = [(64, 1, False, 4), (64, 2, False, 2), (64, 1, True, 3), (64, 2, True, 4)]  # keys, parts, merged, stages
WIDE = [(128, 1, False, 2), (128, 2, False, 2)]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize(("keys", "parts", "merged", "stages"), [*NARROW, *WIDE])
def test_configurations(device, keys, parts, merged, stages, programs):
    """Many tiles of rows in few programs, of sequences with more and fewer keys than the ring holds."""
    config = HOPPER | {"BLOCK_N": keys, "PARTS": parts, "MERGED": merged, "num_stages": stages, "PROGRAMS": programs}
    new, seq_lens = [256, 1, 0, 300, 40, 130], [256, 250, 3, 900, 40, 140]
    with tuning.override("varlen_prefill_attention", config):
        for options in ({}, {"window": 33, "sinks": True}):
            p = make_problem(device, new, seq_lens, layout="apart", group=4, head_size=128, dtype=BF16, **options)
            check(p, causal=True)
            if "window" not in options:  # to both sides: the portable kernel's
                check(p, causal=False)


@pytest.mark.gpu
@hopper
def test_workspace_is_zero_again(device):
    """Many launches may share one workspace, and a graph of them: each leaves it as it was."""
    p = make_problem(device, [256] * 64, [256] * 64, layout="apart", kv_heads=8, group=4, head_size=128, dtype=BF16)
    workspace = torch.zeros(3, dtype=torch.int32, device=device)
    want = varlen_prefill_attention(*p.prefill, max_seqlen_q=256)
    for _ in range(3):
        assert torch.equal(varlen_prefill_attention(*p.prefill, max_seqlen_q=256, workspace=workspace), want)
        assert (workspace == 0).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [varlen_prefill_attention(*p.prefill, max_seqlen_q=256, workspace=workspace) for _ in range(4)]
    for _ in range(2):
        graph.replay()
    assert all(torch.equal(out, want) for out in outs)
    assert (workspace == 0).all()


@pytest.mark.gpu
@hopper
def test_rows_that_bulk_copies_cannot_move(device):
    """Strides that are no multiple of 16 bytes, and an output with gaps between its heads."""
    p = make_problem(device, [200, 77], [300, 77], layout="apart", kv_heads=2, group=4, head_size=64, dtype=BF16)
    q = torch.zeros(277, 8 * 64 + 1, dtype=BF16, device=device)[:, 1:].view(277, 8, 64)
    q.copy_(p.q)
    want = varlen_prefill_attention(*p.prefill, max_seqlen_q=200)
    assert torch.equal(varlen_prefill_attention(q, *p.prefill[1:], max_seqlen_q=200), want)
    out = torch.full((277, 8, 72), float("nan"), dtype=BF16, device=device)
    varlen_prefill_attention(*p.prefill, max_seqlen_q=200, out=out[..., :64])
    assert torch.equal(out[..., :64], want)
    assert out[..., 64:].isnan().all()
