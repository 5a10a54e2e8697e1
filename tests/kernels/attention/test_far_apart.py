"""Tensors that are views with 2^30 elements between heads, slots, blocks or tokens: offsets of 2^31 and more."""

from dataclasses import replace

import pytest
import torch
from support.attention import DECODES, PREFILL, make_problem
from support.compare import assert_close
from support.far_apart import far_apart
from support.marks import hopper

from tritonllm.kernels import (
    build_cos_sin_cache,
    copy_blocks,
    copy_blocks_ref,
    fused_decode_attention,
    merge_attention_states,
    merge_attention_states_ref,
    paged_decode_attention,
    paged_decode_attention_ref,
    paged_verify_attention,
    paged_verify_attention_ref,
    qk_norm_rope_store,
    store_kv,
    varlen_prefill_attention,
    varlen_prefill_attention_ref,
)
from tritonllm.kernels.runtime import tuning

HALF = torch.float16
WHICH = ("q", "out", "k blocks", "v blocks", "k slots", "v slots", "k heads", "v heads")
CACHE_DIMS = {"blocks": 0, "slots": 1, "heads": 2}


def small_problem(device, q_lens, head_size=16, block_size=3):
    """3 heads of keys, a query head each, 3 slots a block and 3 blocks."""
    lens = [7] if len(q_lens) == 1 else [3, 4]
    p = make_problem(device, q_lens, lens, kv_heads=3, group=1, head_size=head_size, block_size=block_size, dtype=HALF)
    used = [block for row, n in zip(p.block_tables.tolist(), lens, strict=True) for block in row[: -(-n // block_size)]]
    assert len(used) == 3
    tables = torch.zeros_like(p.block_tables)
    for row, n in enumerate(lens):
        count = -(-n // block_size)
        before = sum(-(-m // block_size) for m in lens[:row])
        tables[row, :count] = torch.arange(before, before + count)
    return replace(
        p,
        q=p.q.contiguous(),
        k_cache=p.k_cache[used].contiguous(),
        v_cache=p.v_cache[used].contiguous(),
        block_tables=tables,
    )


def spread(p, which):
    """The problem and an output, one dimension of one tensor of them far apart."""
    out = torch.empty_like(p.q)
    if which == "q":
        return replace(p, q=far_apart(p.q, 1)), out
    if which == "out":
        return p, far_apart(out, 1)
    cache, dim = which.split()
    name = f"{cache}_cache"
    return replace(p, **{name: far_apart(getattr(p, name), CACHE_DIMS[dim])}), out


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize(("kernel", "settled"), [*((name, False) for name in DECODES), ("few in parts", True)])
def test_decode(device, kernel, which, settled):
    p = small_problem(device, [1])
    far, out = spread(p, which)
    with tuning.override("paged_decode_attention", DECODES[kernel]):
        paged_decode_attention(*far.decode, out=out, settled=settled)
    want = paged_decode_attention_ref(*p.exact().decode)
    assert_close(out.contiguous(), want)


@pytest.mark.parametrize("which", WHICH)
def test_verify(device, which):
    p = small_problem(device, [2, 1])
    far, out = spread(p, which)
    with tuning.override("paged_verify_attention", DECODES["balanced"]):
        paged_verify_attention(*far.prefill, max_seqlen_q=2, out=out)
    assert_close(out.contiguous(), paged_verify_attention_ref(*p.exact().prefill, max_seqlen_q=2))


@pytest.mark.parametrize("which", WHICH)
def test_prefill(device, which):
    p = small_problem(device, [2, 3])
    far, out = spread(p, which)
    with tuning.override("varlen_prefill_attention", PREFILL):
        varlen_prefill_attention(*far.prefill, max_seqlen_q=3, out=out)
    assert_close(out.contiguous(), varlen_prefill_attention_ref(*p.exact().prefill, max_seqlen_q=3))


@pytest.mark.parametrize("which", [name for name in WHICH if name != "q"])
def test_fused(device, which):
    """The newest key and value are stored far away, and read there."""
    p = small_problem(device, [1])
    far, out = spread(p, which)
    rows = torch.randn(1, 9 * 16, device=device).to(HALF)
    slots = p.block_tables[:, 2].long() * 3  # of the seventh key
    with tuning.override("paged_decode_attention", DECODES["few in parts"]):
        fused_decode_attention(rows, far.k_cache, far.v_cache, slots, far.block_tables, far.seq_lens, out=out)
    q, k, v = rows.view(1, 3, 3, 16).unbind(1)
    p.k_cache[p.block_tables[0, 2], 0], p.v_cache[p.block_tables[0, 2], 0] = k[0], v[0]
    for got, want in ((far.k_cache, p.k_cache), (far.v_cache, p.v_cache)):
        assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))  # slots that nobody sees hold NaN
    assert_close(out.contiguous(), paged_decode_attention_ref(*replace(p, q=q).exact().decode))


def caches(device, which):
    """A pair of ``[3, 3, 3, 16]``, one dimension of the one that ``which`` names far apart."""
    pair = {name: torch.zeros(3, 3, 3, 16, dtype=HALF, device=device) for name in ("k", "v")}
    if which.split()[0] in pair and which.split()[1] in CACHE_DIMS:
        name, dim = which.split()
        pair[name] = far_apart(pair[name], CACHE_DIMS[dim])
    return pair["k"], pair["v"]


STORES = ("k blocks", "v blocks", "k slots", "v slots", "k heads", "v heads")


@pytest.mark.parametrize("which", (*STORES, "new keys", "new values"))
def test_store(device, which):
    k_cache, v_cache = caches(device, which)
    k, v = torch.randn(2, 3, 3, 16, device=device).to(HALF).unbind()
    slots = torch.tensor([8, 0, 4], device=device)
    near = (k, v)
    if which == "new keys":
        k = far_apart(k, 1)
    if which == "new values":
        v = far_apart(v, 1)
    store_kv(k, v, k_cache, v_cache, slots)
    for cache, stored in zip((k_cache, v_cache), near, strict=True):
        for token, slot in enumerate(slots.tolist()):
            assert torch.equal(cache[slot // 3, slot % 3], stored[token])


@pytest.mark.parametrize("which", STORES)
def test_copy(device, which):
    k_cache, v_cache = caches(device, which)
    for cache in (k_cache, v_cache):
        cache.copy_(torch.randn(cache.shape, device=device))
    near = k_cache.clone(memory_format=torch.contiguous_format), v_cache.clone(memory_format=torch.contiguous_format)
    pairs = torch.tensor([[2, 0], [-1, 1]], device=device)
    copy_blocks(k_cache, v_cache, pairs)
    copy_blocks_ref(*near, pairs)
    assert torch.equal(k_cache, near[0]) and torch.equal(v_cache, near[1])


@pytest.mark.parametrize("which", STORES)
def test_projection(device, which):
    k_cache, v_cache = caches(device, which)
    rows = torch.randn(3, 9 * 16, device=device).to(HALF)
    k, v = rows.view(3, 3, 3, 16)[:, 1:].clone().unbind(1)
    table = build_cos_sin_cache(16, 8, 1e4).to(device)
    slots = torch.tensor([8, 0, 4], device=device)
    qk_norm_rope_store(rows, k_cache, v_cache, slots, torch.zeros_like(slots), table)  # position 0 turns nothing
    for cache, stored in zip((k_cache, v_cache), (k, v), strict=True):
        for token, slot in enumerate(slots.tolist()):
            assert torch.equal(cache[slot // 3, slot % 3], stored[token])


@pytest.mark.parametrize("which", ["out_a", "out_b", "out"])
@pytest.mark.parametrize("dim", [0, 1])
def test_merge(device, which, dim):
    given = {name: torch.randn(3, 3, 16, device=device).to(HALF) for name in ("out_a", "out_b", "out")}
    lses = {name: torch.randn(3, 3, device=device) for name in ("lse_a", "lse_b")}
    far = given | {which: far_apart(given[which], dim)}
    merge_attention_states(**far, **lses)
    want = merge_attention_states_ref(given["out_a"].float(), lses["lse_a"], given["out_b"].float(), lses["lse_b"])
    assert_close(far["out"].contiguous(), want, HALF)


@hopper
@pytest.mark.parametrize("which", ["q", "out"])
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("q_lens", [[1], [1, 2]], ids=["decode", "verify"])
def test_hopper_decode(device, which, rows, q_lens):
    """Its bulk copies take caches only whose heads lie side by side."""
    p = make_problem(device, q_lens, [70, 9][: len(q_lens)], kv_heads=3, group=1, dtype=HALF, layout="apart")
    p = replace(p, q=p.q.contiguous())
    far, out = spread(p, which)
    config = {"kernel": "sm90", "BLOCK_M": rows, "BLOCK_N": 64, "PROGRAMS": 264}
    config |= {"num_warps": 4, "num_stages": 2, "maxnreg": 128}
    if len(q_lens) == 1:
        with tuning.override("paged_decode_attention", config):
            paged_decode_attention(*far.decode, out=out)
    else:
        with tuning.override("paged_verify_attention", config):
            paged_verify_attention(*far.prefill, max_seqlen_q=2, out=out)
    want = paged_verify_attention_ref(*p.exact().prefill, max_seqlen_q=2)
    assert_close(out.contiguous(), want)


@hopper
@pytest.mark.parametrize("which", ["q", "out"])
@pytest.mark.parametrize("tokens", [3, 200], ids=["rows one by one", "bulk copies"])
def test_hopper_prefill(device, which, tokens):
    options = {"kv_heads": 3, "group": 1, "head_size": 64, "block_size": 16, "layout": "apart"}
    p = make_problem(device, [tokens], [256], dtype=HALF, **options)
    far, out = spread(replace(p, q=p.q.contiguous()), which)
    config = {"kernel": "sm90", "BLOCK_M": 128, "PROGRAMS": 132, "num_warps": 4}
    config |= {"BLOCK_N": 64, "PARTS": 2, "MERGED": False, "SPLIT": 0, "num_stages": 4}
    with tuning.override("varlen_prefill_attention", config):
        varlen_prefill_attention(*far.prefill, max_seqlen_q=tokens, out=out)
    want = varlen_prefill_attention_ref(*p.exact().prefill, max_seqlen_q=tokens)
    assert_close(out.contiguous(), want)
