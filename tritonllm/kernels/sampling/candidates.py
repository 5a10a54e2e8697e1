"""The usual case of truncation: all that can stay are a few of the largest logits, at most ``SMALL`` candidates.

They are the tokens that reach a bound taken from the groups' maxima, and fit in a program's registers, where every
candidate is compared with every other: a token's rank and the weight before it decide top-k and top-p at once, ties
included, with no sort and no search. The candidates also suffice for the draw, so the logits are not read again.
"""

import triton
import triton.language as tl

from tritonllm.kernels.runtime.random import STREAM_GROUP, STREAM_TOKEN, gumbel
from tritonllm.kernels.sampling.common import GROUP, keep, load_row, weight

SMALL = tl.constexpr(256)
_CHUNK = tl.constexpr(16)  # candidates compared with all the others at a time
# Groups whose tokens are looked through at a time. Registers decide: with 32 of them and a chunk of 16 a program of 8
# warps takes 110, and two fit a multiprocessor; with 64 and 32 it takes 226. Top-k + top-p of 256 rows: 55.5 and 62.3
# us, of one 12.6 and 13.4 (H200). With 16 groups three fit, and it takes 62.4 and 13.5.
_GATHERED = tl.constexpr(32)
_ROUNDS = tl.constexpr(6)
_COLUMNS = tl.constexpr(256)  # threads of a program


@triton.jit
def list_groups(p_list, b_max, n_groups, threshold, NG: tl.constexpr):
    """Write the groups that reach the threshold to ``p_list``, in order; returns how many."""
    b_group = tl.arange(0, NG)
    m_active = (b_max >= threshold) & (b_group < n_groups)
    b_at = tl.cumsum(m_active.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all threads have read the previous list
    tl.store(p_list + b_at, b_group, mask=m_active)
    tl.debug_barrier()
    return tl.sum(m_active.to(tl.int32))


@triton.jit
def load_listed(row, p_list, first, n_listed, V, TILE: tl.constexpr):
    """Logits and ids of ``TILE`` listed groups, in the order of their ids: two [TILE, GROUP] blocks."""
    b_at = first + tl.arange(0, TILE)
    b_group = tl.load(p_list + b_at, mask=b_at < n_listed, other=0)
    b_token = b_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return load_row(row, b_token, (b_at < n_listed)[:, None] & (b_token < V)), b_token


@triton.jit
def _load_apart(row, p_list, first, n_listed, V, TILE: tl.constexpr):
    """Logits and ids as :func:`load_listed` gives them, but as [TILE * GROUP] blocks, for scattered stores: neighbours
    belong to different threads.

    If the compiler saw that four tokens lie side by side, it would give them to one thread, and then deal the tile out
    anew, through shared memory, for the stores: for 64 groups that takes 4.0 us on an H200, this 2.4.
    """
    b_lane = tl.arange(0, TILE * GROUP)
    b_at = first + b_lane // GROUP
    b_token = tl.load(p_list + b_at, mask=b_at < n_listed, other=0) * GROUP + b_lane % GROUP
    b_token ^= n_listed >> 31  # 0, which the compiler cannot know
    return load_row(row, b_token, (b_at < n_listed) & (b_token < V)), b_token


@triton.jit
def _add_lowest_count(low_a, count_a, total_a, low_b, count_b, total_b):
    return tl.minimum(low_a, low_b), count_a + count_b, total_a + total_b


@triton.jit
def survey(b_max, b_sum, top, scale):
    """The lowest of the groups' maxima, how many groups have one, and the weight of all tokens."""
    m_finite = b_max > float("-inf")
    b_low, b_weight = tl.where(m_finite, b_max, top), b_sum * weight(b_max, top, scale)
    return tl.reduce((b_low, m_finite.to(tl.int32), b_weight), 0, _add_lowest_count)


@triton.jit
def _counts(b_max, low, step):
    """How many groups reach low + step, ..., low + 5 step: 12 bits of one number each."""
    b_packed = (b_max >= low + step).to(tl.int64)
    b_packed += (b_max >= low + 2 * step).to(tl.int64) << 12
    b_packed += (b_max >= low + 3 * step).to(tl.int64) << 24
    b_packed += (b_max >= low + 4 * step).to(tl.int64) << 36
    b_packed += (b_max >= low + 5 * step).to(tl.int64) << 48
    return tl.sum(b_packed)


@triton.jit
def bound_groups(b_max, top, low, count, least, most):
    """A value that between ``least`` and ``most`` groups reach, if a few steps find one; and how many do.

    ``count`` groups have a maximum; ``low`` is the lowest.
    """
    high, n = low, count  # the answer: few enough reach `high`
    if count > most:
        high, n = top, 0
        turn = 0
        while (n < least) & (turn < _ROUNDS):
            step = (high - low) / 6
            packed = _counts(b_max, low, step)
            part = 1  # the lowest pivot that few enough reach
            for i in tl.static_range(1, 6):
                part += (((packed >> (12 * i - 12)) & 0xFFF) > most).to(tl.int32)
            n = tl.where(part < 6, ((packed >> (12 * tl.minimum(part, 5) - 12)) & 0xFFF).to(tl.int32), n)
            high = tl.where(part < 6, low + part * step, high)
            low = low + (part - 1) * step
            turn += 1
    return high, n


@triton.jit
def gather(
    row, p_list, p_buffer, n_listed, V, low, high, TILE: tl.constexpr, MOST: tl.constexpr, WITH_IDS: tl.constexpr
):
    """Store the tokens of listed groups with logits in [low, high): logits, and behind ``MOST`` of them ids.

    Returns how many there are. No more than ``MOST`` are stored, in no particular order, but always the same.
    """
    LANES: tl.constexpr = TILE * GROUP
    COLUMNS: tl.constexpr = min(LANES, _COLUMNS)
    found = tl.zeros((), tl.int32)
    p_ids = p_buffer.to(tl.pointer_type(tl.int32)) + MOST
    tl.debug_barrier()  # all threads have read what the buffer held
    for first in range(0, n_listed, TILE):
        b_x, b_token = _load_apart(row, p_list, first, n_listed, V, TILE)
        # A thread's tokens lie next to each other in the buffer: only one number a thread crosses threads
        b_own = tl.reshape(((b_x >= low) & (b_x < high)).to(tl.int32), [LANES // COLUMNS, COLUMNS])
        b_inside = tl.sum(b_own, 0)
        b_before = tl.cumsum(b_inside, 0) - b_inside
        b_slot = found - 1 + tl.reshape(tl.cumsum(b_own, 0) + b_before[None, :], [LANES])
        m_store = (b_x >= low) & (b_x < high) & (b_slot < MOST)
        tl.store(p_buffer + b_slot, b_x, mask=m_store)
        if WITH_IDS:
            tl.store(p_ids + b_slot, b_token, mask=m_store)
        found += tl.sum(b_inside)
    tl.debug_barrier()
    return found


@triton.jit
def load_candidates(p_buffer, first, found, N: tl.constexpr):
    """Slots and logits of ``N`` candidates."""
    b_at = first + tl.arange(0, N)
    return b_at, tl.load(p_buffer + b_at, mask=b_at < found, other=float("-inf"))


@triton.jit
def load_ids(p_buffer, b_at, found):
    """The ids of the candidates in these slots."""
    return tl.load(p_buffer.to(tl.pointer_type(tl.int32)) + SMALL + b_at, mask=b_at < found, other=0)


@triton.jit
def _rank_candidates(p_buffer, found, top, scale):
    """For each candidate, how many others come before it, and their weight."""
    b_at, b_x = load_candidates(p_buffer, 0, found, SMALL)
    b_token = load_ids(p_buffer, b_at, found)
    b_rank = tl.zeros([_CHUNK, SMALL], tl.int32)  # summed over its rows, which a thread holds for itself
    b_before = tl.zeros([_CHUNK, SMALL], tl.float32)
    for first in range(0, found, _CHUNK):
        c_at, c_x = load_candidates(p_buffer, first, found, _CHUNK)
        c_token = load_ids(p_buffer, c_at, found)
        m_before = (c_token[:, None] < b_token[None, :]) & (c_x[:, None] == b_x[None, :])
        m_before |= c_x[:, None] > b_x[None, :]
        b_rank += m_before.to(tl.int32)
        b_before += tl.where(m_before, weight(c_x, top, scale)[:, None], 0.0)
    return tl.sum(b_rank, 0), tl.sum(b_before, 0)


@triton.jit
def _add_and_last(total_a, rank_a, x_a, token_a, total_b, rank_b, x_b, token_b):
    is_a = rank_a > rank_b
    x, token = tl.where(is_a, x_a, x_b), tl.where(is_a, token_a, token_b)
    return total_a + total_b, tl.maximum(rank_a, rank_b), x, token


@triton.jit
def judge_candidates(p_buffer, found, V, total, is_whole, top, scale, top_k, top_p):
    """Limits as of `search_limits` from the candidates, if they include all that can stay.

    They do if they hold enough of the weight of all tokens, ``total``, or ``is_whole``. Returns ``found, threshold,
    last_tie, total``; found = 0 if they do not.
    """
    b_at, b_x = load_candidates(p_buffer, 0, found, SMALL)
    b_token = load_ids(p_buffer, b_at, found)
    b_rank, b_before = _rank_candidates(p_buffer, found, top, scale)
    m_kept = b_at < found
    if (top_k > 0) & (top_k < V):
        m_kept &= b_rank < top_k
    b_weight = weight(b_x, top, scale)
    if top_p < 1:
        own = tl.sum(tl.where(m_kept, b_weight, 0.0))
        target = top_p * tl.where(is_whole, own, total)
        m_kept &= (b_before < target) | (b_rank == 0)
        found = tl.where(is_whole | (own >= target), found, 0)
    # In the order of ranks, which all differ, what stays is a beginning: its last token has both limits
    b_kept = tl.where(m_kept, b_weight, 0.0)
    kept, _rank, threshold, last_tie = tl.reduce((b_kept, tl.where(m_kept, b_rank, -1), b_x, b_token), 0, _add_and_last)
    return found, threshold, last_tie, kept


@triton.jit
def limit_candidates(
    row,
    p_list,
    p_buffer,
    V,
    n_groups,
    b_max,
    b_sum,
    top,
    scale,
    top_k,
    top_p,
    min_p,
    NG: tl.constexpr,
    TILE: tl.constexpr,
):
    """Limits as of `search_limits`, if candidates settle them.

    Returns ``found, threshold, last_tie, total, whole``: how many candidates the buffer holds, 0 if they do not
    suffice; limits; and the weight of all tokens.
    """
    low, count, whole = survey(b_max, b_sum, top, scale)
    has_k = (top_k > 0) & (top_k < V)
    lightest = tl.where(min_p > 0, top + tl.log2(tl.minimum(min_p, 1.0)) / scale, float("-inf"))
    threshold = lightest
    last_tie = tl.full((), V, tl.int32)
    total = whole
    found = tl.zeros((), tl.int32)
    if (has_k == 0) | (top_k <= TILE):
        least = tl.where(has_k, tl.maximum(top_k, TILE // 2), TILE - TILE // 8)
        bound, n_listed = bound_groups(b_max, top, low, count, least, TILE)
        may_hold = tl.sum(tl.where(b_max >= bound, b_sum * weight(b_max, top, scale), 0.0))
        if (has_k == 0) & (may_hold < top_p * whole):  # more groups, if they can help
            bound, n_listed = bound_groups(b_max, top, low, count, 2 * TILE, 3 * TILE)
            may_hold = tl.sum(tl.where(b_max >= bound, b_sum * weight(b_max, top, scale), 0.0))
        is_whole = (has_k & (n_listed >= top_k)) | (bound <= lightest)  # nothing below the bound can stay
        if is_whole | ((min_p <= 0) & (has_k == 0) & (may_hold >= top_p * whole)):
            bound = tl.maximum(bound, lightest)
            n_listed = list_groups(p_list, b_max, n_groups, bound, NG)
            found = gather(row, p_list, p_buffer, n_listed, V, bound, float("inf"), min(TILE, _GATHERED), SMALL, True)
            found = tl.where(found <= SMALL, found, 0)
        if found > 0:
            found, threshold, last_tie, total = judge_candidates(
                p_buffer, found, V, whole, is_whole, top, scale, top_k, top_p
            )
    return found, threshold, last_tie, total, whole


@triton.jit
def _better_draw(group_score_a, score_a, token_a, group_score_b, score_b, token_b):
    """By the group's score, then the lower group, then the token's score, then the lower token."""
    group_a, group_b = token_a // GROUP, token_b // GROUP
    is_a = (score_a > score_b) | ((score_a == score_b) & (token_a < token_b))
    is_a = tl.where(group_a == group_b, is_a, group_a < group_b)
    is_a = tl.where(group_score_a == group_score_b, is_a, group_score_a > group_score_b)
    group_score, score = tl.where(is_a, group_score_a, group_score_b), tl.where(is_a, score_a, score_b)
    return group_score, score, tl.where(is_a, token_a, token_b)


@triton.jit
def draw_candidate(p_buffer, found, top, scale, threshold, last_tie, seed, step):
    """The token drawn from the candidates that the limits keep. Overwrites their logits."""
    b_at, b_x = load_candidates(p_buffer, 0, found, SMALL)
    b_token = load_ids(p_buffer, b_at, found)
    b_group = b_token // GROUP
    m_kept = keep(b_x, b_token, threshold, last_tie) & (b_at < found)
    tl.debug_barrier()  # all threads have read the logits
    # A weight is computed once here, not once in every thread that adds it
    tl.store(p_buffer + b_at, tl.where(m_kept, weight(b_x, top, scale), 0.0))
    tl.debug_barrier()
    b_sum = tl.zeros([_CHUNK, SMALL], tl.float32)
    for first in range(0, found, _CHUNK):
        c_at = first + tl.arange(0, _CHUNK)
        c_group, c_weight = load_ids(p_buffer, c_at, found) // GROUP, tl.load(p_buffer + c_at)
        b_sum += tl.where(c_group[:, None] == b_group[None, :], c_weight[:, None], 0.0)
    # All tokens of a group compute its score, and alike, so one exchange between threads finds group and token
    b_group_score = tl.log2(tl.sum(b_sum, 0)) + gumbel(b_group, seed, step, STREAM_GROUP)
    b_score = (b_x - top) * scale + gumbel(b_token, seed, step, STREAM_TOKEN)
    b_group_score = tl.where(m_kept, b_group_score, float("-inf"))
    _, _, token = tl.reduce((b_group_score, tl.where(m_kept, b_score, float("-inf")), b_token), 0, _better_draw)
    return token
