"""What `sample` and `rejection_sample` share: the scan over the logits, and the two-level Gumbel-max draw.

Adding independent Gumbel noise to log-weights and taking the largest draws from the distribution that they define, and
the largest of a set of noisy log-weights is itself the log of their sum plus Gumbel noise (Maddison, Tarlow and Minka,
"A* sampling", 2014). So a token can be drawn in two steps, a group of 128 tokens and then a token of it, with one noise
value for each group and for each token of one group, where the flat trick needs one, with two logarithms, for every
logit. The scan reduces each group to its maximum and its weight: it reads the logits once, is bound by memory, and is
all that an untruncated row needs; the rest works on V/128 groups.

A group's sum is always formed by the same threads in the same order, whatever the launch configuration, so results do
not depend on it.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.random import gumbel_ref

GROUP = tl.constexpr(128)  # tokens in a group
STEP = tl.constexpr(64)  # elements of float32: memory of ranks begins at multiples of 256 bytes
RUN = tl.constexpr(32)  # the scan takes a group as four runs: 8 threads with 4 tokens of each
FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = 0.6931471805599453
# Launch options of every kernel in which a sum decides a branch or a loop. All threads must take the same way, or those
# that wait at a barrier wait for ever. But a sum over at most a warp is a butterfly of exchanges, where a thread adds
# its neighbour's value to its own, and a multiply-add in the place of "own product, rounded, plus the neighbour's"
# rounds once in each thread: so neighbours end with sums that differ in the last bit. On an H200 `sample` hung so with
# min-p as the only limit and 129 to 4096 tokens. Without fusion both threads add the same two numbers.
UNIFORM_SUMS = {"enable_fp_fusion": False}
MIN_TEMPERATURE = tl.constexpr(1e-5)  # below it the argmax; as in vLLM
MAX_TEMPERATURE = tl.constexpr(1e30)  # all tokens are equally likely; beyond it a weight's scale would be 0


@triton.jit
def _clean(b_x):
    """float32 logits: -inf for NaN, the largest float for +inf."""
    b_x = b_x.to(tl.float32)
    return tl.minimum(tl.where(b_x == b_x, b_x, float("-inf")), FLOAT_MAX)


@triton.jit
def load_logits(p_row, b_token, m_token):
    """float32 logits, cleaned of what is no number, and 0.0 for -0.0, whose bits differ; -inf where masked."""
    return _clean(tl.load(p_row + b_token, mask=m_token, other=float("-inf"))) + 0.0


@triton.jit
def load_row(row, b_token, m_token):
    """:func:`load_logits` of a row that may lie on several ranks: a pointer; where the others' parts lie, or ``None``;
    and the columns of a rank. See :func:`tokens_at`."""
    p_token = tokens_at(row[0], row[1], b_token, m_token, row[2])
    return _clean(tl.load(p_token, mask=m_token, other=float("-inf"))) + 0.0


@triton.jit
def tokens_at(p_row, steps_ptr, b_at, m_at, EACH: tl.constexpr):
    """Where elements ``b_at`` of a row lie, of which each rank has ``EACH``.

    Args:
        p_row: the own part of the row.
        steps_ptr: ``[ranks]`` int64, by how many ``STEP`` elements each rank's memory is away from the own; ``None`` if
            all elements lie here.
    """
    p_at = p_row + b_at
    if steps_ptr is not None:
        b_rank = b_at // EACH
        p_at += tl.load(steps_ptr + b_rank, mask=m_at, other=0) * STEP - b_rank * EACH
    return p_at


@triton.jit
def scale_of(temperature):
    """What turns a difference of logits into one of log2-weights; finite also for rows that take the argmax."""
    return LOG2E / tl.minimum(tl.maximum(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


@triton.jit
def weight(b_x, top, scale):
    """exp2((x - top) * scale), and 0 for masked tokens. With scale 0 every other token weighs 1: sums then count."""
    return tl.where(b_x > float("-inf"), tl.exp2(tl.maximum(b_x - top, -FLOAT_MAX) * scale), 0.0)


@triton.jit
def _better(score_a, id_a, score_b, id_b):
    is_a = (score_a > score_b) | ((score_a == score_b) & (id_a < id_b))
    return tl.where(is_a, score_a, score_b), tl.where(is_a, id_a, id_b)


@triton.jit
def first_best(b_score, b_id):
    """The highest score, none of which may be NaN, and the lowest id that has it; of blocks [N] or [M, N].

    One exchange between threads: the maximum, and then the lowest id that equals it, are two, one after the other.
    """
    if len(b_score.shape) == 2:
        b_score, b_id = tl.reduce((b_score, b_id), 1, _better)
    return tl.reduce((b_score, b_id), 0, _better)


@triton.jit
def first_max(b_score, b_id):
    """The lowest id that has the highest score."""
    _, best_id = first_best(b_score, b_id)
    return best_id


@triton.jit
def keep(b_x, b_token, threshold, last_tie):
    """Which tokens truncation left: above the threshold, or equal to it with an id up to ``last_tie``."""
    return (b_x > threshold) | ((b_x == threshold) & (b_token <= last_tie))


@triton.jit
def load_scan(max_ptr, sum_ptr, row, n_groups, NG: tl.constexpr):
    """The groups of one row, and what the scan found of each."""
    b_group = tl.arange(0, NG)
    b_max = tl.load(max_ptr + row * n_groups + b_group, mask=b_group < n_groups, other=float("-inf"))
    b_sum = tl.load(sum_ptr + row * n_groups + b_group, mask=b_group < n_groups, other=0.0)
    return b_group, b_max, b_sum


@triton.jit
def load_scans(max_ptr, sum_ptr, steps_ptr, row, n_groups, NG: tl.constexpr, EACH: tl.constexpr):
    """The largest logit and the sum of each group of a row that lies on several ranks, with ``EACH`` groups on each:
    see :func:`tokens_at`."""
    b_group = tl.arange(0, NG)
    m_group = b_group < n_groups
    p_max = tokens_at(max_ptr + row * EACH, steps_ptr, b_group, m_group, EACH)
    p_sum = tokens_at(sum_ptr + row * EACH, steps_ptr, b_group, m_group, EACH)
    b_max = tl.load(p_max, mask=m_group, other=float("-inf"))
    return b_max, tl.load(p_sum, mask=m_group, other=0.0)


@triton.jit
def argmax_token(p_row, b_max, b_group, V):
    """The lowest id of the largest logit; 0 if all are -inf. ``b_max`` are the maxima of the groups."""
    group = first_max(b_max, b_group)
    b_token = group * GROUP + tl.arange(0, GROUP)
    return first_max(load_logits(p_row, b_token, b_token < V), b_token)


@triton.jit
def load_run(p_row, b_group, run, V, m_group=True):
    """Run ``run`` of each group, [groups, RUN]: a quarter of it; -inf for groups that are masked ([groups, 1])."""
    b_token = b_group[:, None] * GROUP + run * RUN + tl.arange(0, RUN)[None, :]
    # Nearly nothing is read twice: 320 rows of 151936 take 46.6 us so, and 49.6 if they push each other out (H200)
    m_token = (b_token < V) & m_group
    return _clean(tl.load(p_row + b_token, mask=m_token, other=float("-inf"), eviction_policy="evict_first"))


@triton.jit
def reduce_runs(b_x0, b_x1, b_x2, b_x3, scale):
    """The largest logit of each group, and the group's weight relative to it; of the group's four runs."""
    b_max = tl.max(tl.maximum(tl.maximum(b_x0, b_x1), tl.maximum(b_x2, b_x3)), axis=1) + 0.0  # as `load_logits`
    b_top = tl.maximum(b_max, -FLOAT_MAX)[:, None]  # finite: -inf - -inf is no number
    b_weight = tl.exp2((b_x0 - b_top) * scale) + tl.exp2((b_x1 - b_top) * scale)
    b_weight += tl.exp2((b_x2 - b_top) * scale) + tl.exp2((b_x3 - b_top) * scale)
    return b_max, tl.sum(b_weight, axis=1)


@triton.jit
def _scan_kernel(
    logits_ptr,  # [B, N, V]
    temperature_ptr,  # [B]
    max_ptr,  # [B * N, n_groups]
    sum_ptr,  # [B * N, n_groups]
    V,
    n_groups,
    positions,  # N
    stride_b,
    stride_n,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + (row // positions) * stride_b + (row % positions) * stride_n
    scale = scale_of(tl.load(temperature_ptr + row // positions))
    for tile in range(TILES):
        b_group = (tl.program_id(1) * TILES + tile) * GROUPS + tl.arange(0, GROUPS)
        b_x0, b_x1 = load_run(p_row, b_group, 0, V), load_run(p_row, b_group, 1, V)
        b_x2, b_x3 = load_run(p_row, b_group, 2, V), load_run(p_row, b_group, 3, V)
        b_max, b_sum = reduce_runs(b_x0, b_x1, b_x2, b_x3, scale)
        m_group = b_group < n_groups
        tl.store(max_ptr + row * n_groups + b_group, b_max, mask=m_group)
        tl.store(sum_ptr + row * n_groups + b_group, b_sum, mask=m_group)


def default_config(rows: int, vocab: int) -> tuning.Config:
    """A program takes 4 * num_warps groups at a time: 16 logits a thread, whose loads are all in flight at once."""
    groups = triton.cdiv(vocab, GROUP.value)
    warps = 4 if rows * groups >= 16384 else 2  # small problems spread over all multiprocessors
    return {"TILES": 2 if rows * groups >= 65536 else 1, "num_warps": warps}


def scan(
    logits: torch.Tensor, temperature: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce each group of 128 logits; one pass.

    Args:
        logits: ``[B, N, V]``, contiguous in the last dimension.
        temperature: ``[B]`` float32.
        out: what is returned, by default new tensors. They may be wider: groups behind the columns hold nothing.

    Returns:
        ``[B * N, ceil(V / 128)]`` float32 twice: the largest logit of each group, and the group's weight
        sum(exp((x - largest) / temperature)).
    """
    batch, positions, vocab = logits.shape
    rows = batch * positions
    if out is None:
        group_max = torch.empty(rows, triton.cdiv(vocab, GROUP.value), dtype=torch.float32, device=logits.device)
        out = group_max, torch.empty_like(group_max)
    group_max, group_sum = out
    n_groups = group_max.shape[1]
    config = tuning.get_config("sample_scan", logits.device, default_config, rows=rows, vocab=vocab)
    groups = 4 * config["num_warps"]  # a fixed ratio: the threads that share a group are always the same eight
    grid = (rows, triton.cdiv(n_groups, groups * config["TILES"]))
    sizes = (vocab, n_groups, positions, *logits.stride()[:2])
    flags = config | dependent_launch(logits.device)
    _scan_kernel[grid](logits, temperature, group_max, group_sum, *sizes, GROUPS=groups, **flags)
    return group_max, group_sum


def clean_ref(logits: torch.Tensor) -> torch.Tensor:
    """:func:`load_logits` in torch."""
    return logits.float().nan_to_num(nan=-torch.inf, posinf=FLOAT_MAX.value, neginf=-torch.inf)


def scale_ref(temperature: torch.Tensor) -> torch.Tensor:
    return LOG2E.value / temperature.clamp(MIN_TEMPERATURE.value, MAX_TEMPERATURE.value)


def weight_ref(x: torch.Tensor, top: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """:func:`weight` in torch."""
    return torch.exp2((x - top).clamp_min(-FLOAT_MAX.value) * scale).masked_fill(x == -torch.inf, 0)


def keep_ref(x: torch.Tensor, threshold: torch.Tensor, last_tie: torch.Tensor) -> torch.Tensor:
    """:func:`keep` in torch, for rows."""
    ids = torch.arange(x.shape[-1], device=x.device)
    return (x > threshold[:, None]) | ((x == threshold[:, None]) & (ids <= last_tie[:, None]))


def draw_ref(
    log_weights: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    group_stream: torch.Tensor | int,
    token_stream: torch.Tensor | int,
) -> torch.Tensor:
    """The token of :func:`scored_draw_ref` alone."""
    return scored_draw_ref(log_weights, seeds, steps, group_stream, token_stream)[1]


def scored_draw_ref(
    log_weights: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    group_stream: torch.Tensor | int,
    token_stream: torch.Tensor | int,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two-level Gumbel-max draw in torch.

    Args:
        log_weights: ``[R, V]`` float32, log2 of unnormalised probabilities; -inf for what cannot be drawn.
        seeds, steps: ``[R]`` int64.
        group_stream, token_stream: the streams of the two noises, a number or ``[R, 1]``.
        first: the token of the first column, a multiple of a group.

    Returns:
        ``[R]`` float32, log2 of the drawn group's weight plus its noise, and ``[R]`` int64, the token.
    """
    rows, vocab = log_weights.shape
    n_groups = -(-vocab // GROUP.value)
    groups = torch.nn.functional.pad(log_weights, (0, n_groups * GROUP.value - vocab), value=-torch.inf)
    groups = groups.view(rows, n_groups, GROUP.value)
    seeds, steps = seeds[:, None], steps[:, None]
    group_ids = torch.arange(n_groups, device=groups.device)[None] + first // GROUP.value
    score = torch.logsumexp(groups * LN2, -1) * LOG2E.value + gumbel_ref(group_ids, seeds, steps, group_stream)
    group = score.argmax(-1, keepdim=True)
    width = min(vocab, GROUP.value)  # with few tokens, noise for all of the only group is nine tenths of the work
    token = first + group * GROUP.value + torch.arange(width, device=groups.device)
    best = score.gather(1, group)[:, 0]
    score = groups.gather(1, group[..., None].expand(-1, 1, width))[:, 0]
    score = score + gumbel_ref(token, seeds, steps, token_stream)
    return best, token.gather(1, score.argmax(-1, keepdim=True))[:, 0]
