"""Decode attention of sequences that begin with the same blocks: those keys are read once for all of them.

A softmax over two sets of keys follows from the softmax over each and the logarithms of their denominators, so the
shared keys can be attended to apart from the rest: they are one sequence to which the queries of all sequences belong,
prefill attention without a causal mask, where they are read once per tile of queries instead of once per sequence.
Then follow decode attention over what each sequence has of its own, and the merge. (Hydragen: Juravsky et al., 2024;
cascade inference: Ye et al., FlashInfer, 2024.)

The shared pass takes ``4 B L H D`` FLOPs for L keys and saves ``2 (B - 1) L K D`` elements of memory traffic: for 256
sequences of Llama-3.1-8B with 2048 shared keys, the floor on an H200 is 12 us in place of 500. Few sequences make few
tiles of queries, so the shared keys are divided into parts, each a sequence of its own to the prefill kernel, until the
tiles fill the chip.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch.nn.functional import pad

from tritonllm.kernels.attention.decode import paged_decode_attention
from tritonllm.kernels.attention.merge import merge_attention_states
from tritonllm.kernels.attention.prefill import varlen_prefill_attention
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import with_reference

MAX_PARTS = 16


class CascadePlan(NamedTuple):
    """Where the keys of B sequences lie when some of them begin with the same blocks; see :func:`plan_cascade`.

    Attributes:
        prefix_tables: ``[N, Mp]`` int32, the shared blocks in N parts, in order.
        prefix_lens: ``[N]`` int32, keys of each part; may be 0.
        prefix_cu_seqlens: ``[N + 1]`` int32: 0, B, 2 B and so on.
        suffix_tables: ``[B, Ms]`` int32, each sequence's other blocks: all it has if it does not share.
        suffix_lens: ``[B]`` int32, keys in those.
        shares: ``[B]`` bool, which sequences begin with the shared blocks.
    """

    prefix_tables: torch.Tensor
    prefix_lens: torch.Tensor
    prefix_cu_seqlens: torch.Tensor
    suffix_tables: torch.Tensor
    suffix_lens: torch.Tensor
    shares: torch.Tensor


def cascade_parts(batch: int) -> int:
    """Into how many parts to divide the shared keys: a power of two, at most ``MAX_PARTS``.

    With 32 heads, B sequences are ``B / 4`` tiles of 128 (query, head) pairs: 256 // B parts make 64 programs of them.
    Twice as many fill an H200 and win from some 2000 shared keys on, but their states cost more than that below
    (docs/notebook/decode-attention.md, "Cascade").
    Batches that differ by less than a step of 16 get the same number, so that a padded batch needs no other plan.
    """
    wanted = max(1, 256 // (triton.cdiv(batch, 16) * 16))
    return min(MAX_PARTS, 1 << (wanted.bit_length() - 1))


def plan_cascade(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    shares: torch.Tensor,
    shared_blocks: int,
    block_size: int,
    *,
    parts: int | None = None,
) -> CascadePlan:
    """Divide sequences' keys into those that are shared and the others; on any device, without waiting for it.

    Args:
        block_tables: ``[B, M]`` int32, as for decode attention.
        seq_lens: ``[B]`` int32.
        shares: ``[B]`` bool; the sequences for which it is true have the same first ``shared_blocks`` blocks, all of
            them full.
        shared_blocks: how many blocks are shared, at most M.
        block_size: keys in a block.
        parts: into how many parts to divide the shared blocks; by default :func:`cascade_parts`.

    Raises:
        ValueError: a wrong shape, dtype, device or number.
    """
    check_tensor("seq_lens", seq_lens, ("B",), dtype=torch.int32)
    batch, device = len(seq_lens), seq_lens.device
    check_tensor("block_tables", block_tables, (batch, "M"), dtype=torch.int32, like=seq_lens)
    check_tensor("shares", shares, (batch,), dtype=torch.bool, like=seq_lens)
    width = block_tables.shape[1]
    require(0 <= shared_blocks <= width, f"shared_blocks must be from 0 to {width}, got {shared_blocks}")
    require(batch > 0, "seq_lens must have at least one sequence")
    parts = cascade_parts(batch) if parts is None else parts
    require(parts >= 1, f"parts must be at least 1, got {parts}")
    per_part = triton.cdiv(shared_blocks, parts)
    one_that_shares = shares.int().argmax()[None]
    shared = block_tables.index_select(0, one_that_shares)[0, :shared_blocks]
    before = torch.arange(parts, dtype=torch.int32, device=device) * (per_part * block_size)
    others = pad(block_tables[:, shared_blocks:], (0, shared_blocks))
    return CascadePlan(
        prefix_tables=pad(shared, (0, parts * per_part - shared_blocks)).view(parts, per_part),
        prefix_lens=(shared_blocks * block_size - before).clamp(0, per_part * block_size),
        prefix_cu_seqlens=torch.arange(parts + 1, dtype=torch.int32, device=device) * batch,
        suffix_tables=torch.where(shares[:, None], others, block_tables),
        suffix_lens=seq_lens - shares.int() * (shared_blocks * block_size),
        shares=shares,
    )


def _check_plan(q: torch.Tensor, plan: CascadePlan) -> None:
    check_tensor("q", q, ("B", "H", "D"))
    batch, int32 = len(q), torch.int32
    check_tensor("plan.prefix_tables", plan.prefix_tables, ("N", "Mp"), dtype=int32, like=q)
    parts = len(plan.prefix_tables)
    require(parts > 0, "plan.prefix_tables must have at least one part")
    check_tensor("plan.prefix_lens", plan.prefix_lens, (parts,), dtype=int32, like=q)
    check_tensor("plan.prefix_cu_seqlens", plan.prefix_cu_seqlens, (parts + 1,), dtype=int32, like=q)
    check_tensor("plan.suffix_tables", plan.suffix_tables, (batch, "Ms"), dtype=int32, like=q)
    check_tensor("plan.suffix_lens", plan.suffix_lens, (batch,), dtype=int32, like=q)
    check_tensor("plan.shares", plan.shares, (batch,), dtype=torch.bool, like=q)


def cascade_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: CascadePlan,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`~tritonllm.kernels.paged_decode_attention` that reads shared leading blocks once for all sequences.

    There is no window and no ALiBi: both depend on a query's own position, and the shared keys know none.

    Args:
        q: ``[B, H, D]``; dtypes, head sizes, strides and the arguments not listed here as in decode attention.
        plan: where the keys are; made once by :func:`plan_cascade` and good for every layer. One captured launch
            serves any lengths that its tensors may hold at replay.
        workspace: as in decode attention.
        max_seqlen_k: as in decode attention, of the keys that are not shared.

    Returns:
        What decode attention would return for the whole sequences, but for the rounding of each set's output to the
        dtype of ``q`` before they are merged.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit, or a float8 cache on a GPU without float8.
    """
    _check_plan(q, plan)
    parts = len(plan.prefix_lens)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "k_scale": k_scale, "v_scale": v_scale}
    options |= {"return_lse": True, "workspace": workspace}
    prefix_out, prefix_lse = varlen_prefill_attention(
        *(q if parts == 1 else q.repeat(parts, 1, 1), k_cache, v_cache),
        *(plan.prefix_tables, plan.prefix_cu_seqlens, plan.prefix_lens),
        # what is launched depends on the next power of two alone, as a start expects, also where a key's query heads
        # are no power of two
        max_seqlen_q=triton.next_power_of_2(max(1, len(q))),
        causal=False,
        **options,
    )
    suffix = paged_decode_attention(
        *(q, k_cache, v_cache, plan.suffix_tables, plan.suffix_lens),
        **{"sinks": sinks, "max_seqlen_k": max_seqlen_k, **options},
    )
    prefix = prefix_out.view(parts, *q.shape), prefix_lse.view(parts, *q.shape[:2])
    return merge_attention_states(*prefix, *suffix, use_a=plan.shares, out=out, return_lse=return_lse)


cascade_decode_attention_ref = with_reference(cascade_decode_attention)
