"""Which tokens min-p, top-k and top-p leave: found by bisection over the bits of the logits, with no sort.

What they leave is always the beginning of one order (larger logit first, the lower id first among equals), so it is
described by its last token: a threshold, and the last id kept among the tokens that equal it. All three limits ask for
a largest t: top-k such that at least k tokens are >= t; top-p such that the tokens >= t weigh at least p of what
the limits before it left; min-p gives t itself. Exactly k tokens stay, and exactly the shortest beginning of weight p.

A group's maximum (see `common.py`) is one of its tokens, so the t that the maxima alone ask for is a lower bound
of the one wanted, and a tight one unless the distribution is flat: only groups whose maximum reaches it are read again.
Their tokens above the bound go to a buffer that one program holds in registers, where a step of the bisection is one
sum. If there are too many (a nucleus of thousands of tokens), passes over the row with three pivots each narrow the
range first, in the spirit of the pivot search of FlashInfer (Ye et al., 2025), where the first three come from a sample
(Floyd and Rivest, "Expected time bounds for selection", 1975). No step waits for the host, and a row's
result depends on that row alone.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.sampling.candidates import gather, list_groups, load_listed
from tritonllm.kernels.sampling.common import FLOAT_MAX, GROUP, load_row, weight, weight_ref

_COARSE = tl.constexpr(1 << 16)  # bits of the bound that need not be exact: it only has to exclude most groups
_FINE = tl.constexpr(1 << 12)  # bits of a guess that need not be exact
_ERRORS = tl.constexpr(2.5)  # of the sample: what is sought lies within, 99 times of 100 where groups are alike
_ROWS = tl.constexpr(16)  # partial sums of a pass, times GROUP: 8 for each of 256 threads
_LOWEST_KEY = tl.constexpr(-0x7F800001)  # of -inf
_REF_WIDTH = 1024  # tokens that the reference sorts first; it sorts the rest if they do not settle every row


@triton.jit
def order_key(b_x):
    """float32 -> int32 with the same order."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(b_key):
    """The inverse of :func:`order_key`."""
    return (b_key ^ ((b_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _bisect(b_key, b_weight, target, low, high, above, GAP: tl.constexpr):
    """Halve [low, high) down to ``GAP`` keys, keeping the largest key t whose tokens >= t weigh the target or more.

    ``above`` is the weight that counts at every key. Returns the new ``low`` and the weight at the new ``high``.
    """
    at_high = above
    while high - low > GAP:
        middle = low + (high - low) // 2
        total = above + tl.sum(tl.where(b_key >= middle.to(tl.int32), b_weight, 0.0))
        enough = total >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        at_high = tl.where(enough, at_high, total)
    return low, at_high


@triton.jit
def _pivot(low, high, by_value, PART: tl.constexpr):
    """A key inside (low, high), at ``PART`` of the way by the logits' values or by their keys."""
    x_low = tl.maximum(key_value(low.to(tl.int32)), -FLOAT_MAX)
    x_high = tl.minimum(key_value(high.to(tl.int32)), FLOAT_MAX)
    value_key = order_key(x_low * (1 - PART) + x_high * PART).to(tl.int64)
    key = tl.where(by_value, value_key, low + ((high - low).to(tl.float32) * PART).to(tl.int64))
    return tl.maximum(tl.minimum(key, high - 1), low + 1)


@triton.jit
def _fold(b, ROWS: tl.constexpr):
    """Add what one thread holds of a tile: [n * ROWS, GROUP] -> [ROWS, GROUP], with nothing moved between threads."""
    return tl.sum(tl.reshape(b, [b.shape[0] // ROWS, ROWS, GROUP]), axis=0)


@triton.jit
def _sum(b):
    return tl.sum(tl.sum(b, axis=0))


@triton.jit
def _quarters(low, high, by_value):
    """Three keys inside (low, high), in order."""
    key1 = _pivot(low, high, by_value, 0.25)
    key2 = tl.maximum(_pivot(low, high, by_value, 0.5), key1)
    return key1, key2, tl.maximum(_pivot(low, high, by_value, 0.75), key2)


@triton.jit
def _guess(row, p_list, n_listed, V, top, scale, part, floor, low, high, CAPACITY: tl.constexpr):
    """Three keys inside (low, high) that should be just below, at and just above the key sought.

    From a sample, listed groups at equal distances: the key such that the tokens >= it weigh ``part`` of those
    >= ``floor``, give or take its standard error. A pass over a wrong guess only narrows the range by less.
    """
    SAMPLE: tl.constexpr = max(1, CAPACITY // GROUP)
    b_group = tl.load(p_list + tl.arange(0, SAMPLE) * n_listed // SAMPLE)
    b_token = b_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    b_x = load_row(row, b_token, b_token < V)
    b_key = order_key(b_x)
    b_weight = tl.where(b_key >= floor.to(tl.int32), weight(b_x, top, scale), 0.0)
    whole = tl.sum(b_weight)
    error = _ERRORS * tl.sqrt((1.0 / part - 1.0) * tl.sum(b_weight * b_weight)) / whole
    above = tl.zeros((), tl.float32)
    key2, _ = _bisect(b_key, b_weight, whole * part, low, high, above, _FINE)
    key1, _ = _bisect(b_key, b_weight, whole * part * (1.0 + error), low, key2 + _FINE, above, _FINE)
    key3, _ = _bisect(b_key, b_weight, whole * part * (1.0 - error), key2, high, above, _FINE)
    key1 = tl.minimum(tl.maximum(key1, low + 1), high - 1)
    key2 = tl.minimum(tl.maximum(key2, key1), high - 1)
    return key1, key2, tl.minimum(tl.maximum(key3 + _FINE, key2), high - 1)


@triton.jit
def _narrow(row, p_list, n_listed, V, top, scale, target, low, high, above, key1, key2, key3, TILE: tl.constexpr):
    """One pass over the listed groups: the part of [low, high) between two of these keys that holds the one sought.

    Returns ``low, high``, the weight of the tokens >= high, and the number of tokens in [low, high).
    """
    ROWS: tl.constexpr = min(TILE, _ROWS)
    b_weight1 = tl.zeros([ROWS, GROUP], tl.float32)
    b_weight2 = tl.zeros([ROWS, GROUP], tl.float32)
    b_weight3 = tl.zeros([ROWS, GROUP], tl.float32)
    b_count0 = tl.zeros([ROWS, GROUP], tl.int32)
    b_count1 = tl.zeros([ROWS, GROUP], tl.int32)
    b_count2 = tl.zeros([ROWS, GROUP], tl.int32)
    b_count3 = tl.zeros([ROWS, GROUP], tl.int32)
    x_low, x_high = key_value(low.to(tl.int32)), key_value(high.to(tl.int32))
    x1, x2, x3 = key_value(key1.to(tl.int32)), key_value(key2.to(tl.int32)), key_value(key3.to(tl.int32))
    for first in range(0, n_listed, TILE):
        b_x, _ = load_listed(row, p_list, first, n_listed, V, TILE)
        b_weight = weight(b_x, top, scale)
        b_weight1 += _fold(tl.where(b_x >= x1, b_weight, 0.0), ROWS)
        b_weight2 += _fold(tl.where(b_x >= x2, b_weight, 0.0), ROWS)
        b_weight3 += _fold(tl.where(b_x >= x3, b_weight, 0.0), ROWS)
        m_below = b_x < x_high
        b_count0 += _fold((m_below & (b_x >= x_low)).to(tl.int32), ROWS)
        b_count1 += _fold((m_below & (b_x >= x1)).to(tl.int32), ROWS)
        b_count2 += _fold((m_below & (b_x >= x2)).to(tl.int32), ROWS)
        b_count3 += _fold((m_below & (b_x >= x3)).to(tl.int32), ROWS)
    weight1, weight2, weight3 = _sum(b_weight1), _sum(b_weight2), _sum(b_weight3)
    count0, count1, count2, count3 = _sum(b_count0), _sum(b_count1), _sum(b_count2), _sum(b_count3)
    in1, in2, in3 = weight1 >= target, weight2 >= target, weight3 >= target
    count = tl.where(in3, count3, tl.where(in2, count2 - count3, tl.where(in1, count1 - count2, count0 - count1)))
    above = tl.where(in3, above, tl.where(in2, weight3, tl.where(in1, weight2, weight1)))
    high = tl.where(in3, high, tl.where(in2, key3, tl.where(in1, key2, key1)))
    low = tl.where(in3, key3, tl.where(in2, key2, tl.where(in1, key1, low)))
    return low, high, above, count


@triton.jit
def _search(row, p_list, p_buffer, V, n_groups, b_max, top, scale, target, total, floor, NG, CAPACITY, TILE):
    """The largest key t such that the tokens >= t weigh the target or more; ``floor`` if there is none above it.

    ``total`` is about what the tokens >= floor weigh.

    Returns t, the weight of the tokens > t, and the number of tokens equal to t.
    """
    high = order_key(top).to(tl.int64) + 1
    above = tl.zeros((), tl.float32)
    low, _ = _bisect(order_key(b_max), weight(b_max, top, scale), target, floor, high, above, _COARSE)
    n_listed = list_groups(p_list, b_max, n_groups, key_value(low.to(tl.int32)), NG)
    count = n_listed * GROUP  # at most: rarely are more than a few tokens of a group above the bound
    limit = tl.full((), 8 * CAPACITY, tl.int32)
    found = tl.full((), CAPACITY + 1, tl.int32)
    turn = tl.zeros((), tl.int32)
    by_value = tl.full((), 1, tl.int32)
    while (found > CAPACITY) & ((high - low > 1) | (turn == 0)):
        if count > limit:
            before = count
            key1, key2, key3 = _quarters(low, high, by_value == 1)
            if turn == 0:
                part = tl.minimum(target / tl.minimum(total, n_listed * GROUP), 1.0)
                key1, key2, key3 = _guess(row, p_list, n_listed, V, top, scale, part, floor, low, high, CAPACITY)
            low, high, above, count = _narrow(
                row, p_list, n_listed, V, top, scale, target, low, high, above, key1, key2, key3, TILE
            )
            # Steps by value suit most rows; a step by key after one that failed bounds the passes for all rows
            by_value = ((by_value == 0) | (2 * count <= before)).to(tl.int32)
        else:
            lowest, end = tl.maximum(key_value(low.to(tl.int32)), -FLOAT_MAX), key_value(high.to(tl.int32))
            found = gather(row, p_list, p_buffer, n_listed, V, lowest, end, TILE, CAPACITY, False)
            count = found
        limit = tl.full((), CAPACITY, tl.int32)  # the count is now exact
        turn += 1
    ties = count
    if found <= CAPACITY:
        b_at = CAPACITY - 1 - tl.arange(0, CAPACITY)  # from the end: see `load_listed` on neighbours
        b_x = tl.load(p_buffer + b_at, mask=b_at < found, other=float("-inf"))
        b_key = order_key(b_x)
        low, above = _bisect(b_key, weight(b_x, top, scale), target, low, high, above, 1)
        ties = tl.sum((b_key == low.to(tl.int32)).to(tl.int32))
    return low, above, ties


@triton.jit
def _weight_above(row, p_list, V, n_groups, b_max, top, scale, key, NG: tl.constexpr, TILE: tl.constexpr):
    """The weight of the tokens whose key is larger."""
    n_listed = list_groups(p_list, b_max, n_groups, key_value(key.to(tl.int32)), NG)
    ROWS: tl.constexpr = min(TILE, _ROWS)
    b_total = tl.zeros([ROWS, GROUP], tl.float32)
    for first in range(0, n_listed, TILE):
        b_x, _ = load_listed(row, p_list, first, n_listed, V, TILE)
        b_total += _fold(tl.where(order_key(b_x) > key.to(tl.int32), weight(b_x, top, scale), 0.0), ROWS)
    return _sum(b_total)


@triton.jit
def _nth_tie(row, p_list, V, n_groups, b_max, key, n, NG: tl.constexpr, TILE: tl.constexpr):
    """The id of the n-th token, in the order of ids, whose key is ``key``."""
    n_listed = list_groups(p_list, b_max, n_groups, key_value(key.to(tl.int32)), NG)
    seen = tl.zeros((), tl.int32)
    token = tl.zeros((), tl.int32)
    for first in range(0, n_listed, TILE):
        b_x, b_token = load_listed(row, p_list, first, n_listed, V, TILE)
        m_tie = order_key(b_x) == key.to(tl.int32)
        b_tied = tl.sum(m_tie.to(tl.int32), 1)
        b_before = seen + tl.cumsum(b_tied, 0) - b_tied
        m_nth = m_tie & (b_before[:, None] + tl.cumsum(m_tie.to(tl.int32), 1) == n)
        token += tl.sum(tl.sum(tl.where(m_nth, b_token, 0), 0))
        seen += tl.sum(b_tied)
    return token


@triton.jit
def load_limits(top_k_ptr, top_p_ptr, min_p_ptr, sequence, CACHE: tl.constexpr):
    """The parameters of one sequence; a pointer that is None stands for no limit. ``CACHE`` modifies the loads."""
    top_k = tl.load(top_k_ptr + sequence, cache_modifier=CACHE) if top_k_ptr is not None else 0
    top_p = tl.load(top_p_ptr + sequence, cache_modifier=CACHE) if top_p_ptr is not None else 1.0
    min_p = tl.load(min_p_ptr + sequence, cache_modifier=CACHE) if min_p_ptr is not None else 0.0
    return top_k, top_p, min_p


@triton.jit
def is_limited(V, top_k, top_p, min_p):
    return ((top_k > 0) & (top_k < V)) | (top_p < 1) | (min_p > 0)


@triton.jit
def search_limits(
    row,
    p_list,  # scratch [n_groups] int32
    p_buffer,  # scratch [CAPACITY] float32
    V,
    n_groups,
    b_max,  # [NG] of the scan; -inf after n_groups
    total,  # the weight of all tokens
    top,  # the largest logit, finite
    scale,
    top_k,
    top_p,
    min_p,
    NG: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Threshold and last id among the tokens equal to it, for `keep`; and the weight of what they keep."""
    key = tl.full((), _LOWEST_KEY, tl.int64)
    outside = key  # tokens with larger keys stay, and `quota` of those whose key is `key`
    quota = tl.full((), V, tl.int32)
    ties = tl.zeros((), tl.int32)
    has_k = (top_k > 0) & (top_k < V)
    if min_p > 0:
        key = order_key(top + tl.log2(tl.minimum(min_p, 1.0)) / scale).to(tl.int64)
        outside = key - 1  # all ties stay
    for turn in range(2):  # top-k by a scale of 0, which makes weights count; then top-p. A loop, to be compiled once
        is_k = turn == 0
        if (is_k & has_k) | ((turn == 1) & (top_p < 1)):
            own_scale = tl.where(is_k, 0.0, scale)
            target = tl.where(is_k, top_k.to(tl.float32), top_p * total)
            # Tokens lighter than (1 - p) / V of the total are outside even if all are: half of that allows for rounding
            light = order_key(top + tl.log2((1.0 - top_p) * total / (2.0 * V)) / scale).to(tl.int64)
            floor = tl.where(is_k, key, tl.maximum(key, light))
            found_key, above, ties = _search(
                *(row, p_list, p_buffer, V, n_groups, b_max, top, own_scale, target),
                *(tl.where(is_k, V * 1.0, total), floor, NG, CAPACITY, TILE),
            )
            lightest = weight(key_value(found_key.to(tl.int32)), top, own_scale)
            wanted = tl.ceil(tl.minimum((target - above) / tl.maximum(lightest, 1e-37), V * 1.0)).to(tl.int32)
            quota = tl.maximum(tl.where(found_key == key, tl.minimum(wanted, quota), wanted), 1)
            total = tl.where(is_k, total, above + tl.minimum(quota, ties) * lightest)
            key = found_key
            outside = key
        if is_k & (outside > _LOWEST_KEY):
            total = _weight_above(row, p_list, V, n_groups, b_max, top, scale, outside, NG, TILE)
            total += tl.minimum(quota, ties) * weight(key_value(key.to(tl.int32)), top, scale)
    last_tie = tl.full((), V, tl.int32)
    if ties > quota:
        last_tie = _nth_tie(row, p_list, V, n_groups, b_max, key, quota, NG, TILE)
    return key_value(key.to(tl.int32)), last_tie, total


def limits_ref(
    x: torch.Tensor,
    scale: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`search_limits` in torch.

    Args:
        x: ``[R, V]`` float32, cleaned.
        scale: ``[R]`` float32.
        top_k, top_p, min_p: ``[R]``, or ``None`` where no row has such a limit.

    Returns:
        ``[R]`` each: the threshold, the last id kept among the tokens equal to it, the weight of what is kept.
    """
    rows, vocab = x.shape
    top = x.amax(-1, keepdim=True).clamp_min(-FLOAT_MAX.value)
    every = torch.ones(rows, dtype=torch.float32, device=x.device)
    k = (every * vocab).long() if top_k is None else torch.where((top_k > 0) & (top_k < vocab), top_k, vocab).long()
    p = every.double() if top_p is None else top_p.double().clamp_max(1)
    floor = every * -torch.inf
    if min_p is not None:
        floor = torch.where(min_p > 0, top[:, 0] + min_p.clamp(1e-38, 1).log2() / scale, floor)

    threshold, last_tie = every * -torch.inf, torch.full_like(k, vocab)
    total = weight_ref(x, top, scale[:, None]).sum(-1, dtype=torch.float64)
    width = min(vocab, _REF_WIDTH)
    todo = ((k < vocab) | (p < 1) | (floor > -torch.inf)).nonzero()[:, 0]
    while todo.numel():
        values = x[todo].topk(width).values
        cumulated = weight_ref(values, top[todo], scale[todo, None]).cumsum(-1, dtype=torch.float64)
        whole = (k[todo] == vocab) & (floor[todo] == -torch.inf)
        count = torch.minimum((values >= floor[todo, None]).sum(-1), k[todo]).clamp_min(1)  # left by min-p and top-k
        before = torch.where(whole, total[todo], cumulated.gather(-1, count[:, None] - 1)[:, 0])
        nucleus = (cumulated < (p[todo] * before)[:, None]).sum(-1) + 1
        kept = torch.where(p[todo] < 1, torch.where(whole, nucleus, torch.minimum(nucleus, count)), count)
        known = (kept <= width) & (whole | (count < width) | (count == k[todo]))
        settled = known | (width == vocab)
        done, kept = todo[settled], kept[settled, None].clamp_max(width)
        t = values[settled].gather(-1, kept - 1)
        quota = kept - (values[settled] > t).sum(-1, keepdim=True)
        threshold[done], total[done] = t[:, 0], cumulated[settled].gather(-1, kept - 1)[:, 0]
        last_tie[done] = ((x[done] == t).cumsum(-1) < quota).sum(-1)
        todo, width = todo[~settled], vocab
    return threshold, last_tie, total.float()
