"""Log-probabilities of chosen tokens, their ranks, and the most likely tokens: one pass over the logits.

The pass reduces each group of 128 logits to its largest, its weight, and how many exceed the chosen one. A program for
each row then has the logarithm of the sum, the rank, and a bound that at least ``top_n`` groups reach: the ``top_n``
largest logits reach it too. Those that do (`candidates`) are read again from their groups, and each one's rank among
them is its place. If more than 256 reach the bound, there are many equals: then the groups with the ``top_n`` largest
maxima are read, which hold the ``top_n`` largest logits, and these are taken out one by one.

So the logits are read once, and nothing of their size is written, where ``log_softmax`` and ``topk`` read or write
[R, V] six times.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.sampling.candidates import (
    SMALL,
    bound_groups,
    gather,
    list_groups,
    load_candidates,
    load_ids,
    survey,
)
from tritonllm.kernels.sampling.common import (
    FLOAT_MAX,
    GROUP,
    LN2,
    LOG2E,
    clean_ref,
    load_logits,
    load_run,
    load_scan,
    reduce_runs,
)
from tritonllm.kernels.sampling.truncation import key_value, order_key

# Of a program, four for each of its warps. Nothing is faster, from 1 row (3.7 us, and 5.3 for programs of 64 groups) to
# 256 (42.8 us, and 44.8): H200, V = 151936, N = 0.
_GROUPS = 16
MOST_SELECTED = 32  # beyond it torch's topk finds the most likely tokens
_CHUNK = tl.constexpr(32)  # candidates compared with all the others at a time
_LN2 = tl.constexpr(LN2)
_NO_KEY = tl.constexpr(-(1 << 63))
_LAST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["chosen_ptr"])
def _count_kernel(
    logits_ptr,  # [R, V]
    chosen_ptr,  # [R]
    max_ptr,  # [R, n_groups]
    sum_ptr,  # [R, n_groups]
    count_ptr,  # [R, n_groups] int32
    V,
    n_groups,
    stride_logits,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + row * stride_logits
    chosen = tl.load(chosen_ptr + row)
    x = load_logits(p_row, chosen, (chosen >= 0) & (chosen < V))
    b_group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    b_x0, b_x1 = load_run(p_row, b_group, 0, V), load_run(p_row, b_group, 1, V)
    b_x2, b_x3 = load_run(p_row, b_group, 2, V), load_run(p_row, b_group, 3, V)
    b_max, b_sum = reduce_runs(b_x0, b_x1, b_x2, b_x3, LOG2E)
    b_count = (b_x0 > x).to(tl.int32) + (b_x1 > x).to(tl.int32) + (b_x2 > x).to(tl.int32) + (b_x3 > x).to(tl.int32)
    p_group, m_group = row * n_groups + b_group, b_group < n_groups
    tl.store(max_ptr + p_group, b_max, mask=m_group)
    tl.store(sum_ptr + p_group, b_sum, mask=m_group)
    tl.store(count_ptr + p_group, tl.sum(b_count, axis=1), mask=m_group)
    let_next_start(PDL)  # not before: programs that wait take places of those that load


@triton.jit
def _pack(b_x, b_id):
    """One int64 for a value and its id: larger for larger values, and among equals for lower ids."""
    return (order_key(b_x).to(tl.int64) << 32) | (b_id ^ _LAST_ID).to(tl.int64)


@triton.jit
def _unpack_id(b_packed):
    return (b_packed & _LAST_ID).to(tl.int32) ^ _LAST_ID


@triton.jit
def _largest(b_packed, n, N: tl.constexpr):
    """The n largest, in order, of numbers that all differ; then ``_NO_KEY``. One reduction for each: N is small."""
    b_at = tl.arange(0, N)
    b_largest = tl.full([N], _NO_KEY, tl.int64)
    for i in range(n):
        best = tl.max(b_packed)
        b_packed = tl.where(b_packed == best, _NO_KEY, b_packed)
        b_largest = tl.where(b_at == i, best, b_largest)
    return b_largest


@triton.jit
def _ranks(p_buffer, found):
    """For each of up to ``SMALL`` candidates, how many others come before it."""
    b_at, b_x = load_candidates(p_buffer, 0, found, SMALL)
    b_token = load_ids(p_buffer, b_at, found)
    b_rank = tl.zeros([_CHUNK, SMALL], tl.int32)  # summed over its rows, which a thread holds for itself
    for first in range(0, found, _CHUNK):
        c_at, c_x = load_candidates(p_buffer, first, found, _CHUNK)
        c_token = load_ids(p_buffer, c_at, found)
        m_before = (c_token[:, None] < b_token[None, :]) & (c_x[:, None] == b_x[None, :])
        b_rank += (m_before | (c_x[:, None] > b_x[None, :])).to(tl.int32)
    return tl.sum(b_rank, 0)


@triton.jit(do_not_specialize=["chosen_ptr", "top_n"])
def _select_kernel(
    logits_ptr,  # [R, V]
    chosen_ptr,  # [R]
    max_ptr,  # [R, n_groups]
    sum_ptr,  # [R, n_groups]
    count_ptr,  # [R, n_groups]
    list_ptr,  # scratch [R, n_groups]
    buffer_ptr,  # scratch [R, 2 * SMALL]
    ids_ptr,  # [R, 1 + top_n] int64
    logprobs_ptr,  # [R, 1 + top_n] float32
    ranks_ptr,  # [R] int64
    lse_ptr,  # [R] float32
    V,
    n_groups,
    top_n,  # columns; those after the first are only written if N > 0
    stride_logits,
    NG: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + row * stride_logits
    b_group, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
    b_count = tl.load(count_ptr + row * n_groups + b_group, mask=b_group < n_groups, other=0)
    chosen = tl.load(chosen_ptr + row)
    x = load_logits(p_row, chosen, (chosen >= 0) & (chosen < V))
    top = tl.maximum(tl.max(b_max), -FLOAT_MAX)
    low, n_finite, total = survey(b_max, b_sum, top, LOG2E)
    lse = tl.maximum(top + tl.log2(total) * _LN2, -FLOAT_MAX)  # finite also for a row of -inf
    p_ids, p_logprobs = ids_ptr + row * (top_n + 1), logprobs_ptr + row * (top_n + 1)
    tl.store(p_ids, chosen)
    tl.store(p_logprobs, x - lse)
    tl.store(ranks_ptr + row, tl.sum(b_count).to(tl.int64) + 1)
    tl.store(lse_ptr + row, lse)
    if N > 0:
        p_list, p_buffer = list_ptr + row * n_groups, buffer_ptr + row * (2 * SMALL)
        found = tl.zeros((), tl.int32)
        bound, n_listed = bound_groups(b_max, top, low, n_finite, top_n, 2 * N)
        if (n_listed >= top_n) & (n_listed <= 2 * N):
            n_listed = list_groups(p_list, b_max, n_groups, bound, NG)
            found = gather((p_row, None, 1), p_list, p_buffer, n_listed, V, bound, float("inf"), 2 * N, SMALL, True)
        if (found >= top_n) & (found <= SMALL):
            b_at, b_x = load_candidates(p_buffer, 0, found, SMALL)
            b_rank = _ranks(p_buffer, found)
            m_best = (b_rank < top_n) & (b_at < found)
            tl.store(p_ids + 1 + b_rank, load_ids(p_buffer, b_at, found).to(tl.int64), mask=m_best)
            tl.store(p_logprobs + 1 + b_rank, b_x - lse, mask=m_best)
        else:  # too many equals, or too few numbers
            b_best = _largest(_pack(b_max, b_group), tl.minimum(top_n, n_groups), N)
            b_token = _unpack_id(b_best)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            m_token = (b_best > _NO_KEY)[:, None] & (b_token < V)
            b_key = tl.where(m_token, _pack(load_logits(p_row, b_token, m_token), b_token), _NO_KEY)
            b_best = _largest(tl.reshape(b_key, [N * GROUP]), top_n, N)
            b_place = tl.arange(0, N)
            tl.store(p_ids + 1 + b_place, _unpack_id(b_best).to(tl.int64), mask=b_place < top_n)
            tl.store(p_logprobs + 1 + b_place, key_value((b_best >> 32).to(tl.int32)) - lse, mask=b_place < top_n)


def _reference(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    top_n: int,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    vocab = logits.shape[1]
    x = clean_ref(logits)
    lse = torch.logsumexp(x.double(), -1, keepdim=True)
    inside = ((chosen >= 0) & (chosen < vocab))[:, None]
    of_chosen = x.gather(1, chosen.clamp(0, vocab - 1)[:, None]).masked_fill(~inside, -torch.inf)
    best = x.sort(dim=-1, descending=True, stable=True)
    values = torch.cat([of_chosen, best.values[:, :top_n]], -1)
    ids.copy_(torch.cat([chosen[:, None], best.indices[:, :top_n]], -1))
    logprobs.copy_(torch.where(values > -torch.inf, values - lse, -torch.inf))
    ranks.copy_((x > of_chosen).sum(-1) + 1)


def _most_likely(logits: torch.Tensor, top_n: int) -> torch.Tensor:
    """Ids of the largest logits, among equals the lower first. ``topk`` leaves that order open, so no two of the int64
    that it compares are equal: a value in the upper half, its id in the lower. As :func:`_pack`, in torch."""
    bits = (clean_ref(logits) + 0.0).view(torch.int32)  # + 0.0: -0 is 0
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    last = 0x7FFFFFFF
    return last - (key.add_(last - torch.arange(logits.shape[1], device=logits.device)).topk(top_n).values & last)


@register_op(mutates=("ids", "logprobs", "ranks"), reference=_reference)
def _token_logprobs(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    top_n: int,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    rows, vocab = logits.shape
    if rows == 0:
        return
    n_groups, device = triton.cdiv(vocab, GROUP.value), logits.device
    group_max = torch.empty(rows, n_groups, dtype=torch.float32, device=device)
    group_sum, group_count = torch.empty_like(group_max), torch.empty_like(group_max, dtype=torch.int32)
    lse = torch.empty(rows, 1, dtype=torch.float32, device=device)
    stats = (group_max, group_sum, group_count)
    launch = dependent_launch(device)
    grid = (rows, triton.cdiv(n_groups, _GROUPS))
    options = {"GROUPS": _GROUPS, "PDL": launch["PDL"], "num_warps": 4}
    _count_kernel[grid](logits, chosen, *stats, vocab, n_groups, logits.stride(0), **options)
    selected = MOST_SELECTED if 0 < top_n <= MOST_SELECTED else 0
    options = {"NG": triton.next_power_of_2(n_groups), "N": selected, "num_warps": 8, **launch}
    groups_listed = torch.empty(rows, n_groups if selected else 0, dtype=torch.int32, device=device)
    candidates = torch.empty(rows, 2 * SMALL.value if selected else 0, dtype=torch.float32, device=device)
    outputs = (groups_listed, candidates, ids, logprobs, ranks, lse)
    _select_kernel[(rows,)](logits, chosen, *stats, *outputs, vocab, n_groups, top_n, logits.stride(0), **options)
    if top_n > selected:
        best = _most_likely(logits, top_n)
        ids[:, 1:] = best
        torch.sub(clean_ref(logits).gather(1, best), lse, out=logprobs[:, 1:])


def token_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, top_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities (natural) at each row: of one chosen token and of the most likely ones.

    Args:
        logits: ``[R, V]`` float16, bfloat16 or float32, before temperature; contiguous in the last dimension.
        chosen: ``[R]`` int64; an id outside [0, V) has log-probability -inf.
        top_n: how many of the most likely tokens; all V if there are fewer. Up to 32 they cost no pass of their own.

    Returns:
        ``ids [R, 1 + N]`` int64 and ``logprobs [R, 1 + N]`` float32: first the chosen token, then the most likely ones,
        best first, N being ``min(top_n, V)``; among equals the lower id comes first.
        ``ranks [R]`` int64: of the chosen token, 1 for the most likely.

    Raises:
        ValueError: a wrong shape, dtype or device, a negative ``top_n``, or an empty vocabulary.
    """
    check_tensor("logits", logits, ("R", "V"))
    rows, vocab = logits.shape
    require(vocab > 0, "logits must have at least one column (the vocabulary is empty)")
    check_tensor("chosen", chosen, (rows,), dtype=torch.int64, like=logits)
    require(top_n >= 0, f"top_n must be 0 or more, got {top_n}")
    top_n = min(top_n, vocab)
    ids = torch.empty(rows, 1 + top_n, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, 1 + top_n, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _token_logprobs(logits, chosen, top_n, ids, logprobs, ranks)
    return ids, logprobs, ranks


token_logprobs_ref = with_reference(token_logprobs)
