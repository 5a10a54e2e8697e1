"""70,000 sequences: more than the second and third axis of a grid hold (tests/aot/test_grids.py checks the grids of all
operations; here the launches run)."""

from typing import NamedTuple

import pytest
import torch
from support.attention import DECODES, PREFILL
from support.compare import assert_close

from tritonllm.kernels import (
    copy_blocks,
    fused_decode_attention,
    paged_decode_attention,
    paged_decode_attention_ref,
    paged_verify_attention,
    paged_verify_attention_ref,
    varlen_prefill_attention,
    varlen_prefill_attention_ref,
)
from tritonllm.kernels.runtime import tuning

pytestmark = pytest.mark.gpu

MANY, BLOCKS, SIZE, HALF = 70_000, 64, 16, torch.float16


class Batch(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor

    def exact(self) -> "Batch":
        return Batch(self.q.float(), self.k_cache.float(), self.v_cache.float(), self.block_tables, self.seq_lens)


def batch_of(device: torch.device, new: int = 1) -> Batch:
    """Sequences of one block each, which others have too, with ``new`` queries."""
    caches = torch.randn(2, BLOCKS, SIZE, 2, 64, device=device).to(HALF)
    tables = torch.randint(0, BLOCKS, (MANY, 1), dtype=torch.int32, device=device)
    lens = torch.randint(new, SIZE + 1, (MANY,), dtype=torch.int32, device=device)
    return Batch(torch.randn(MANY * new, 4, 64, device=device).to(HALF), *caches, tables, lens)


@pytest.mark.parametrize("kernel", [*DECODES, None])
def test_decode(device, kernel):
    """None: what is chosen for so many."""
    p = batch_of(device)
    if kernel is None:
        out = paged_decode_attention(*p)
    else:
        with tuning.override("paged_decode_attention", DECODES[kernel]):
            out = paged_decode_attention(*p)
    assert_close(out, paged_decode_attention_ref(*p.exact()), HALF)


def test_fused(device):
    """Nothing is stored, so that sequences may share blocks."""
    p = batch_of(device)
    newest = p.seq_lens.long() - 1
    places = p.block_tables[:, 0].long(), newest
    rows = torch.cat((p.q, p.k_cache[places], p.v_cache[places]), 1).flatten(1)
    slots = torch.full((MANY,), -1, device=device)
    with tuning.override("paged_decode_attention", DECODES["few in parts"]):
        out = fused_decode_attention(rows, p.k_cache, p.v_cache, slots, p.block_tables, p.seq_lens)
    assert_close(out, paged_decode_attention_ref(*p.exact()), HALF)


@pytest.mark.parametrize("operation", ["verify", "prefill", "prefill by the portable kernel"])
def test_several_tokens_each(device, operation):
    """Of the last sequences the outputs are compared."""
    p = batch_of(device, 2)
    begins = torch.arange(MANY + 1, dtype=torch.int32, device=device) * 2
    arguments = (p.q, p.k_cache, p.v_cache, p.block_tables, begins, p.seq_lens)
    if operation == "verify":
        out = paged_verify_attention(*arguments, max_seqlen_q=2)
    elif operation == "prefill":
        out = varlen_prefill_attention(*arguments, max_seqlen_q=2)
    else:
        with tuning.override("varlen_prefill_attention", PREFILL):
            out = varlen_prefill_attention(*arguments, max_seqlen_q=2)
    last = p.exact()._replace(q=p.q[-100:].float(), block_tables=p.block_tables[-50:], seq_lens=p.seq_lens[-50:])
    reference = paged_verify_attention_ref if operation == "verify" else varlen_prefill_attention_ref
    want = reference(*last[:4], begins[:51], last.seq_lens, max_seqlen_q=2)
    assert_close(out[-100:], want, HALF)


def test_copy(device):
    """A pair each, and more programs than an axis of 65,535 holds."""
    blocks = torch.randn(2, 2 * MANY, 2, 1, 64, device=device).to(HALF)
    want = blocks[:, :MANY].clone()
    pairs = torch.arange(MANY, device=device)[:, None] + torch.tensor([0, MANY], device=device)
    copy_blocks(*blocks, pairs)
    assert torch.equal(blocks[:, MANY:], want)


def test_copy_of_large_blocks(device):
    """128 MiB elements a block: 131,072 programs for a pair."""
    k_cache, v_cache = torch.zeros(2, 2, 256, 1024, 512, dtype=HALF, device=device)
    for cache in (k_cache, v_cache):
        cache[0].normal_()
    with tuning.override("copy_blocks", {"BLOCK": 1024, "num_warps": 4}):
        copy_blocks(k_cache, v_cache, torch.tensor([[0, 1]], device=device))
    assert torch.equal(k_cache[0], k_cache[1]) and torch.equal(v_cache[0], v_cache[1])
