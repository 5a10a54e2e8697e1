"""One draw from max(p - q, 0), normalised: the token in place of a draft that was rejected.

By thinning (von Neumann's rejection method, 1951): propose a token x of p, and take it with probability
max(p(x) - q(x), 0) / p(x). What is taken has the wanted distribution, however many proposals fail, and a proposal needs
q at one token, not the whole row. A position rejects its draft with the very probability with which it takes a
proposal, so it makes one proposal on average, whatever p and q. A proposal is drawn in three steps, a run of 32 groups,
a group of it, a token of it, each by a uniform number and the cumulated weights in float64; the scan has left all but
the tokens' weights. 16 proposals at a time take as long as one.

If 64 fail (in at most 0.6% of the positions: those where p and q differ by 1.5%), both rows are read whole, by the
two-level Gumbel-max draw of `sampling/common.py` over what p - q leaves. That draw also serves a truncated p.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.random import (
    STREAM_GROUP,
    STREAM_RESIDUAL_GROUP,
    STREAM_RESIDUAL_TOKEN,
    STREAM_TOKEN,
    gumbel,
    philox_ref,
)
from tritonllm.kernels.sampling import GROUP, first_max, keep, list_groups, load_logits, weight

STREAM_PROPOSAL = tl.constexpr(5)  # of `random`: its indices are 4 * proposal + which of its numbers
TRIES = tl.constexpr(16)  # proposals made at a time
TURNS = tl.constexpr(4)
RUN_GROUPS = tl.constexpr(32)
# A token that p - q leaves nothing keeps this part of p: it is drawn only if rounding left nothing to any token.
REMNANT = tl.constexpr(2.0**-40)
_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def _unit(b_index, seed, step):
    """One float64 in (0, 1) for each index, a multiple of 2^-33."""
    step_low, step_high = step.to(tl.uint32), (step >> 32).to(tl.uint32)
    b_word, _, _, _ = tl.philox(
        seed, b_index.to(tl.uint32), step_low, step_high, tl.full((), STREAM_PROPOSAL, tl.uint32)
    )
    return (b_word.to(tl.float64) + 0.5) * _UNIT


@triton.jit
def _cumulate(b):
    """``tl.cumsum(b, 1)``. Of few columns it is a sum for each: Triton 3.6 fails to compile the scan if a thread of the
    layout has more columns than there are (two of 8,192 float32 tokens, four of 16,384 bfloat16 ones)."""
    M: tl.constexpr = b.shape[1]
    if M <= 8:
        b_column = tl.arange(0, M)
        m_up_to = b_column[:, None] <= b_column[None, :]
        return tl.sum(tl.where(m_up_to[None, :, :], b[:, :, None], 0.0), axis=1)
    else:
        return tl.cumsum(b, 1)


@triton.jit
def _pick(b_weight, b_u):
    """For each row of ``b_weight [N, M]`` a column, as likely as it weighs: where the sum passes u of the whole."""
    b_cumulated = _cumulate(b_weight.to(tl.float64))
    b_target = b_u * tl.max(b_cumulated, axis=1)
    return tl.minimum(tl.sum((b_cumulated <= b_target[:, None]).to(tl.int32), axis=1), b_weight.shape[1] - 1)


@triton.jit
def _propose(p_row, p_max, p_sum, V, n_groups, b_weight, top, scale, b_try, seed, step, NG: tl.constexpr):
    """A token of p before truncation for each try, from the weights ``b_weight [NG]`` of its groups."""
    RUN: tl.constexpr = min(NG, RUN_GROUPS)
    b_of_run = tl.sum(tl.reshape(b_weight, [NG // RUN, RUN]), axis=1)
    b_of_run = tl.broadcast_to(b_of_run[None, :], [TRIES, NG // RUN])
    b_group = _pick(b_of_run, _unit(4 * b_try, seed, step))[:, None] * RUN + tl.arange(0, RUN)[None, :]
    b_max = tl.load(p_max + b_group, mask=b_group < n_groups, other=float("-inf"))
    b_sum = tl.load(p_sum + b_group, mask=b_group < n_groups, other=0.0)
    b_picked = tl.min(b_group, axis=1) + _pick(b_sum * weight(b_max, top, scale), _unit(4 * b_try + 1, seed, step))
    b_token = b_picked[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_x = load_logits(p_row, b_token, b_token < V)
    return b_picked * GROUP + _pick(weight(b_x, top, scale), _unit(4 * b_try + 2, seed, step))


@triton.jit
def _residual(p_row, p_probs, b_token, m_token, top, scale, threshold, last_tie, total, has_draft):
    """What p - q leaves of each token's weight, and the weight itself; all that is kept of it without a draft."""
    b_x = load_logits(p_row, b_token, m_token)
    b_weight = weight(b_x, top, scale)
    b_kept = tl.where(keep(b_x, b_token, threshold, last_tie), b_weight, 0.0)
    b_q = tl.load(p_probs + b_token, mask=m_token & has_draft, other=0.0).to(tl.float32)
    return tl.maximum(b_kept - b_q * total, b_kept * REMNANT), b_weight


@triton.jit
def thin(p_row, p_probs, p_max, p_sum, V, n_groups, b_weight, top, scale, threshold, last_tie, total, seed, step, NG):
    """The first proposal that is taken, or -1."""
    b_try = tl.arange(0, TRIES)
    token = tl.full((), -1, tl.int32)
    turn = tl.zeros((), tl.int32)
    while (token < 0) & (turn < TURNS):
        b_index = turn * TRIES + b_try
        b_token = _propose(p_row, p_max, p_sum, V, n_groups, b_weight, top, scale, b_index, seed, step, NG)
        b_left, b_of_p = _residual(
            p_row, p_probs, b_token, b_token < V, top, scale, threshold, last_tie, total, b_token >= 0
        )
        first = tl.min(tl.where(_unit(4 * b_index + 3, seed, step) * b_of_p < b_left, b_try, TRIES))
        token = tl.max(tl.where(b_try == first, b_token, -1))
        turn += 1
    return token


@triton.jit
def draw_exhaustively(
    p_row,
    p_probs,
    p_list,  # scratch [n_groups] int32
    V,
    n_groups,
    b_max,  # [NG] of the scan
    top,
    scale,
    threshold,
    last_tie,
    total,
    has_draft,
    seed,
    step,
    NG: tl.constexpr,
    TILE: tl.constexpr,
):
    """The two-level draw from what p - q leaves; without a draft from p, with the noise of `sample`."""
    n_listed = n_groups + tl.zeros((), tl.int32)
    if threshold > float("-inf"):
        n_listed = list_groups(p_list, b_max, n_groups, threshold, NG)
    is_listed = n_listed < n_groups  # else the list would be that of all groups, and need not be looked up
    stream = tl.where(has_draft, STREAM_RESIDUAL_GROUP, STREAM_GROUP)
    b_best = tl.full([TILE], float("-inf"), tl.float32)
    b_best_group = tl.zeros([TILE], tl.int32)
    for first in range(0, n_listed, TILE):
        b_at = first + tl.arange(0, TILE)
        b_group = tl.where(is_listed, tl.load(p_list + b_at, mask=is_listed & (b_at < n_listed), other=0), b_at)
        b_token = b_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        m_token = (b_at < n_listed)[:, None] & (b_token < V)
        b_left, _ = _residual(p_row, p_probs, b_token, m_token, top, scale, threshold, last_tie, total, has_draft)
        b_score = tl.log2(tl.sum(b_left, axis=1)) + gumbel(b_group, seed, step, stream)
        m_better = b_score > b_best
        b_best = tl.where(m_better, b_score, b_best)
        b_best_group = tl.where(m_better, b_group, b_best_group)
    b_token = first_max(b_best, b_best_group) * GROUP + tl.arange(0, GROUP)
    b_left, _ = _residual(p_row, p_probs, b_token, b_token < V, top, scale, threshold, last_tie, total, has_draft)
    stream = tl.where(has_draft, STREAM_RESIDUAL_TOKEN, STREAM_TOKEN)
    return first_max(tl.log2(b_left) + gumbel(b_token, seed, step, stream), b_token)


def _pick_ref(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    cumulated = weights.double().cumsum(-1)
    return (cumulated <= u[..., None] * cumulated[..., -1:]).sum(-1).clamp_max(weights.shape[-1] - 1)


def thin_ref(weights: torch.Tensor, left: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """:func:`thin` in torch.

    Args:
        weights: ``[R, V]`` float32, of p before truncation.
        left: ``[R, V]``, what p - q leaves of them.
        seeds, steps: ``[R]`` int64.

    Returns:
        ``[R]`` int64: the tokens, -1 where all proposals fail.
    """
    rows, vocab = weights.shape
    tries, n_groups = TRIES.value * TURNS.value, triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))
    run = min(n_groups, RUN_GROUPS.value)
    index = 4 * torch.arange(tries, device=weights.device)
    u = [philox_ref(index + k, seeds[:, None], steps[:, None], STREAM_PROPOSAL.value) for k in range(4)]
    u = [(word.double() + 0.5) * _UNIT.value for word in u]
    groups = torch.nn.functional.pad(weights, (0, n_groups * GROUP.value - vocab)).view(rows, n_groups, GROUP.value)
    runs = groups.sum(-1).view(rows, n_groups // run, run)
    row = torch.arange(rows, device=weights.device)[:, None]
    token = torch.full((rows,), -1, device=weights.device)
    for first in range(0, tries, TRIES.value):  # a turn at a time, for the sake of memory
        u0, u1, u2, u3 = (numbers[:, first : first + TRIES.value] for numbers in u)
        picked = _pick_ref(runs.sum(-1)[:, None].expand(-1, TRIES.value, -1), u0)
        picked = picked * run + _pick_ref(runs[row, picked], u1)
        proposed = (picked * GROUP.value + _pick_ref(groups[row, picked], u2)).clamp_max(vocab - 1)
        taken = u3 * weights.gather(1, proposed) < left.gather(1, proposed)
        earliest = proposed.gather(1, taken.long().argmax(-1, keepdim=True))[:, 0]
        token = torch.where((token < 0) & taken.any(-1), earliest, token)
    return token
