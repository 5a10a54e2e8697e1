"""Every portable kernel of attention, called in one way: with a problem, and options that all of them take; and what
they should give."""

import math
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


def attention_in_double(
    p: Problem,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs ``[T, H, D]`` and log-sum-exps ``[T, H]`` in float64; queries are the last tokens and see no key after
    them.

    Args:
        softcap: 0: none.
        sinks, slopes: as in :func:`~tritonllm.kernels.paged_decode_attention`, the slopes ALiBi's.
    """
    outs, lses = [], []
    begins, size, group = p.cu_seqlens_q.tolist(), p.k_cache.shape[1], p.q.shape[1] // p.k_cache.shape[2]
    for seq, length in enumerate(p.seq_lens.tolist()):
        q = p.q[begins[seq] : begins[seq + 1]].double()
        at = torch.arange(length, device=q.device)
        places = (p.block_tables[seq, at // size].long(), at % size)
        k, v = (cache[places].double().repeat_interleave(group, 1) for cache in (p.k_cache, p.v_cache))
        logits = torch.einsum("thd,lhd->thl", q, k) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        distance = at - torch.arange(length - len(q), length, device=q.device)[:, None]
        if slopes is not None:
            logits = logits + slopes.double()[:, None] * distance[:, None, :]
        logits = logits.masked_fill((distance > 0)[:, None, :], -math.inf)
        if sinks is not None:
            logits = torch.cat((logits, sinks.double().expand(len(q), -1)[..., None]), -1)
        weights = logits.softmax(-1)[..., :length]
        outs.append(torch.einsum("thl,lhd->thd", weights, v))
        lses.append(logits.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses)
