import itertools
import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import Problem, make_problem
from support.compare import FLOATS, assert_close, assert_logs_close, poisoned
from support.examples import examples

from tritonllm.kernels import (
    cascade_decode_attention,
    cascade_decode_attention_ref,
    paged_decode_attention_ref,
    plan_cascade,
)
from tritonllm.kernels.attention.cascade import MAX_PARTS, cascade_parts
from tritonllm.kernels.runtime import chip


def share(p: Problem, shared: int, lens: list[int], who: list[bool]) -> tuple[Problem, torch.Tensor]:
    """The same problem where the sequences that may (`who`, and long enough) begin with the blocks of the first."""
    block_size = p.k_cache.shape[1]
    shares = [yes and n >= shared * block_size for yes, n in zip(who, lens, strict=True)]
    tables = p.block_tables.clone()
    if any(shares):
        tables[shares, :shared] = tables[shares.index(True), :shared].clone()
    return replace(p, block_tables=tables), torch.tensor(shares, dtype=torch.bool, device=tables.device)


def plan_of(p: Problem, shares: torch.Tensor, shared: int, parts: int | None = None):
    return plan_cascade(p.block_tables, p.seq_lens, shares, shared, p.k_cache.shape[1], parts=parts)


def check(p: Problem, shares: torch.Tensor, shared: int, parts: int | None = None) -> None:
    out = poisoned(*p.q.shape, dtype=p.q.dtype, device=p.q.device)
    plan = plan_of(p, shares, shared, parts)
    with patch.object(chip, "processors", return_value=4):  # 264 programs that have nothing to do took 90% of the time
        got, lse = cascade_decode_attention(p.q, p.k_cache, p.v_cache, plan, **p.options, out=out, return_lse=True)
    assert got is out
    want, want_lse = paged_decode_attention_ref(*p.exact().decode, **p.options, return_lse=True)
    assert_close(out, want, p.q.dtype)
    assert_logs_close(lse, want_lse, p.q.dtype)


def cases(**more):
    cache_scale = st.sampled_from([None, 0.75, "heads"])
    return given(
        lens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
        who=st.lists(st.booleans(), min_size=4, max_size=4),
        shared=st.integers(0, 6),
        parts=st.sampled_from([None, 1, 2, 3]),
        shape=st.fixed_dictionaries(
            {
                "kv_heads": st.integers(1, 2),
                "group": st.sampled_from([1, 3]),
                "head_size": st.sampled_from([16, 40]),
                "block_size": st.sampled_from([1, 5, 16]),
                "float8": st.sampled_from([False, True, "e5m2"]),
            }
        ),
        options=st.fixed_dictionaries(
            {
                "scale": st.sampled_from([None, 0.3]),
                "softcap": st.sampled_from([0.0, 4.0]),
                "sinks": st.sampled_from([None, True]),
                "k_scale": cache_scale,
                "v_scale": cache_scale,
            }
        ),
        **more,
    )


@settings(max_examples=examples(40))
@cases(dtype=st.sampled_from(FLOATS))
def test_equals_decode_over_the_whole(device, lens, who, shared, parts, shape, options, dtype):
    """Any of the sequences may share; lengths 0 stand for the padding of a captured batch."""
    p = make_problem(device, [1] * len(lens), lens, dtype=dtype, **shape, **options)
    p, shares = share(p, shared, lens, who[: len(lens)])
    if not bool(shares.any()):
        shared = 0  # there is no table to take the shared blocks from
    check(p, shares, shared, parts)


@settings(max_examples=examples(100))
@cases()
def test_the_reference_equals_decode_over_the_whole(device, lens, who, shared, parts, shape, options):
    p = make_problem(device, [1] * len(lens), lens, **shape, **options)
    p, shares = share(p, shared, lens, who[: len(lens)])
    plan = plan_of(p, shares, shared if bool(shares.any()) else 0, parts)
    got = cascade_decode_attention_ref(p.q, p.k_cache, p.v_cache, plan, **p.options, return_lse=True)
    for mine, want in zip(got, paged_decode_attention_ref(*p.decode, **p.options, return_lse=True), strict=True):
        assert_close(mine, want)


def test_the_shared_keys_are_those_of_the_plan(device):
    """A wrong plan gives a wrong result: the prefix is read through the plan, not through each sequence's table."""
    p, shares = share(make_problem(device, [1] * 2, [40, 40], head_size=16), 1, [40, 40], [True, True])
    plan = plan_of(p, shares, 1)
    swapped = plan._replace(prefix_tables=torch.full_like(plan.prefix_tables, int(p.block_tables[0, 1])))
    right, wrong = (cascade_decode_attention(p.q, p.k_cache, p.v_cache, x) for x in (plan, swapped))
    assert not torch.allclose(right, wrong)


def slots(tables, lens, block_size):
    rows = zip(tables.tolist(), lens.tolist(), strict=True)
    return [[table[i // block_size] * block_size + i % block_size for i in range(n)] for table, n in rows]


@given(
    batch=st.integers(1, 4),
    shared=st.integers(0, 9),
    own=st.integers(1, 3),
    block_size=st.integers(1, 4),
    parts=st.integers(1, 5),
    data=st.data(),
)
def test_a_plan_holds_every_key_once(batch, shared, own, block_size, parts, data):
    who = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
    width = shared + own
    tables = torch.arange(batch * width, dtype=torch.int32).view(batch, width)
    if any(who):
        tables[who, :shared] = tables[who.index(True), :shared].clone()
    low = [shared * block_size if yes else 0 for yes in who]
    lens = torch.tensor([data.draw(st.integers(n, width * block_size)) for n in low], dtype=torch.int32)
    plan = plan_cascade(tables, lens, torch.tensor(who), shared if any(who) else 0, block_size, parts=parts)
    prefix = list(itertools.chain(*slots(plan.prefix_tables, plan.prefix_lens, block_size)))
    suffixes = slots(plan.suffix_tables, plan.suffix_lens, block_size)
    whole = slots(tables, lens, block_size)
    assert [prefix * yes + own for yes, own in zip(who, suffixes, strict=True)] == whole
    assert plan.prefix_cu_seqlens.tolist() == [i * batch for i in range(parts + 1)]
    assert plan.prefix_tables.shape == (parts, -(-(shared if any(who) else 0) // parts))
    assert {t.dtype for t in plan[:-1]} == {torch.int32}


def test_parts_fill_the_chip():
    assert [cascade_parts(n) for n in (1, 32, 33, 64, 65, 128, 129, 256, 257, 5000)] == [16, 8, 4, 4, 2, 2, 1, 1, 1, 1]
    assert max(map(cascade_parts, range(1, 300))) == MAX_PARTS


BAD = [
    ({"prefix_tables": torch.zeros(0, 3, dtype=torch.int32)}, "plan.prefix_tables must have at least one part"),
    ({"prefix_tables": torch.zeros(2, 3)}, "plan.prefix_tables must be torch.int32"),
    ({"prefix_lens": torch.zeros(2, dtype=torch.int32)}, r"plan.prefix_lens must have shape \[3\]"),
    ({"prefix_cu_seqlens": torch.zeros(3, dtype=torch.int32)}, r"plan.prefix_cu_seqlens must have shape \[4\]"),
    ({"suffix_tables": torch.zeros(3, 2, dtype=torch.int32)}, r"plan.suffix_tables must have shape \[2, Ms\]"),
    ({"suffix_lens": torch.zeros(3, dtype=torch.int32)}, r"plan.suffix_lens must have shape \[2\]"),
    ({"shares": torch.zeros(2)}, "plan.shares must be torch.bool"),
    ({"shares": torch.zeros(3, dtype=torch.bool)}, r"plan.shares must have shape \[2\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_plans(change, message):
    p = make_problem(torch.device("cpu"), [1, 1], [20, 20], head_size=16)
    plan = plan_of(p, torch.tensor([True, False]), 1, 3)
    for fn in (cascade_decode_attention, cascade_decode_attention_ref):
        with pytest.raises(ValueError, match=message):
            fn(p.q, p.k_cache, p.v_cache, plan._replace(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": torch.zeros(2)}, "seq_lens must be torch.int32"),
        ({"seq_lens": torch.zeros(0, dtype=torch.int32)}, r"block_tables must have shape \[0, M\]"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, r"block_tables must have shape \[2, M\]"),
        ({"shares": torch.zeros(2, dtype=torch.int32)}, "shares must be torch.bool"),
        ({"shared_blocks": 5}, "shared_blocks must be from 0 to 4, got 5"),
        ({"shared_blocks": -1}, "shared_blocks must be from 0 to 4"),
        ({"parts": 0}, "parts must be at least 1"),
    ],
)
def test_bad_arguments_of_a_plan(change, message):
    arguments = {"block_tables": torch.zeros(2, 4, dtype=torch.int32), "seq_lens": torch.zeros(2, dtype=torch.int32)}
    arguments |= {"shares": torch.ones(2, dtype=torch.bool), "shared_blocks": 2, "block_size": 16}
    with pytest.raises(ValueError, match=message):
        plan_cascade(**{**arguments, **change})


REAL = [
    # heads, kv heads, head size, block size, batch, shared blocks
    (32, 8, 128, 16, 256, 40),
    (16, 8, 128, 128, 40, 3),
    (71, 1, 64, 32, 9, 17),
    (8, 4, 256, 16, 20, 33),
    (12, 12, 80, 48, 33, 5),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "block_size", "batch", "shared"), REAL)
def test_real_shapes(device, heads, kv_heads, head_size, block_size, batch, shared, dtype):
    lens = [shared * block_size + 1 + 7 * i % 90 for i in range(batch)]
    lens[3], lens[5] = 0, 11  # padding, and one too short to share
    who = [i != 4 for i in range(batch)]
    shape = {"kv_heads": kv_heads, "group": heads // kv_heads, "head_size": head_size, "block_size": block_size}
    for options in ({}, {"sinks": True, "softcap": 30.0}, {"float8": True, "k_scale": "heads", "v_scale": 0.7}):
        check(
            *share(make_problem(device, [1] * batch, lens, dtype=dtype, **shape, **options), shared, lens, who), shared
        )


@pytest.mark.gpu
def test_cuda_graph(device):
    """One captured launch serves any shared length, none included, and any group that shares."""
    batch, width, block_size = 20, 40, 16
    steps = [(30, [True] * 20), (0, [False] * 20), (7, [i % 3 > 0 for i in range(20)])]
    problems = []
    for shared, who in steps:
        lens = [shared * block_size + 1 + 5 * i for i in range(batch)]
        p = make_problem(device, [1] * batch, lens, dtype=torch.bfloat16, head_size=128, block_size=block_size)
        problems.append(share(p, shared, lens, who))
    blocks = max(p.k_cache.shape[0] for p, _ in problems)
    q = torch.empty_like(problems[0][0].q)
    k_cache, v_cache = torch.zeros(2, blocks, *problems[0][0].k_cache.shape[1:], dtype=q.dtype, device=device)
    tables = torch.zeros(batch, width, dtype=torch.int32, device=device)
    nobody = torch.zeros(batch, dtype=torch.bool, device=device)
    plan = plan_cascade(tables, torch.zeros_like(tables[:, 0]), nobody, width, block_size)
    plan.prefix_lens.zero_()
    cascade_decode_attention(q, k_cache, v_cache, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cascade_decode_attention(q, k_cache, v_cache, plan)
    for (p, shares), (shared, _) in zip(problems, steps, strict=True):
        values = (p.q, p.k_cache, p.v_cache, *plan_of(p, shares, shared))
        for mine, new in zip((q, k_cache, v_cache, *plan), values, strict=True):
            mine[tuple(slice(n) for n in new.shape)] = new
        out.fill_(math.nan)
        graph.replay()
        assert_close(out, paged_decode_attention_ref(*p.exact().decode), torch.bfloat16)
