"""Every portable kernel of attention, called in one way: with a problem, and options that all of them take."""

from typing import Any

import torch

from support.attention import DECODES, PREFILL, Problem
from tritonllm.kernels import (
    fused_decode_attention,
    paged_decode_attention,
    paged_verify_attention,
    varlen_prefill_attention,
)
from tritonllm.kernels.runtime import tuning


def decode(p: Problem, kernel: str, **options: Any):
    with tuning.override("paged_decode_attention", DECODES[kernel]):
        return paged_decode_attention(*p.decode, **options, return_lse=True)


def fused(p: Problem, **options: Any):
    """The newest key and value come with the query, and are stored."""
    sequences = torch.arange(len(p.seq_lens), device=p.q.device)
    newest = p.seq_lens.long() - 1
    size = p.k_cache.shape[1]
    slots = p.block_tables[sequences, newest // size].long() * size + newest % size
    places = (slots // size, slots % size)
    rows = torch.cat((p.q, p.k_cache[places], p.v_cache[places]), 1).flatten(1)
    with tuning.override("paged_decode_attention", DECODES["few in parts"]):
        return fused_decode_attention(
            rows, p.k_cache, p.v_cache, slots, p.block_tables, p.seq_lens, **options, return_lse=True
        )


def verify(p: Problem, **options: Any):
    with tuning.override("paged_verify_attention", DECODES["balanced"]):
        return paged_verify_attention(*p.prefill, max_seqlen_q=4, **options, return_lse=True)


def prefill(p: Problem, **options: Any):
    with tuning.override("varlen_prefill_attention", PREFILL):
        return varlen_prefill_attention(*p.prefill, max_seqlen_q=4, **options, return_lse=True)


OPERATIONS = {
    "balanced": lambda p, **options: decode(p, "balanced", **options),
    "split": lambda p, **options: decode(p, "split in parts", **options),
    "few": lambda p, **options: decode(p, "few in parts", **options),
    "few with the newest apart": lambda p, **options: decode(p, "few in parts", **options, settled=True),
    "fused": fused,
    "verify": verify,
    "prefill": prefill,
}
