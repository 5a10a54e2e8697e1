"""The draw of rows with limits whose columns lie on several ranks, without bringing them together.

What `top_k`, `top_p` and `min_p` leave is a matter of the whole row, but hardly of all its columns: the maxima and sums
of the groups of 128 say which few groups can matter (`candidates.py`), and only those are read. Ranks whose GPUs reach
each other's memory read the others' groups where they lie. So all of them run the kernels of `sample`, on the same
bits, and get its token, also where a flat row has to be searched. Of a row with 64 such groups on two ranks 16 KB go
over the link, where gathering 128,256 columns takes 257 KB.

`sample_shard` comes first, for it leaves each rank's maxima and sums, and then whatever lets every rank know that all
of them have: the exchange of what `sample_shard` drew does.
"""

import torch

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.random import STREAM_GROUP, STREAM_TOKEN
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.sampling.common import GROUP, MIN_TEMPERATURE, STEP, draw_ref
from tritonllm.kernels.sampling.limited import LogitParts, draw_limited_rows
from tritonllm.kernels.sampling.sample import check_parameters, log_weights_ref


def _whole_ref(logits: torch.Tensor, parts: LogitParts) -> torch.Tensor:
    """``[R, vocab]``, of ranks that are all in one piece of memory."""
    shape, stride, start = logits.shape, logits.stride(), logits.storage_offset()
    own = [torch.as_strided(logits, shape, stride, start + STEP.value * step) for step in parts.rank_steps.tolist()]
    return torch.cat(own, 1)[:, : parts.vocab]


def _reference(
    logits: torch.Tensor,
    group_max: torch.Tensor,
    group_sum: torch.Tensor,
    out: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    parts: LogitParts,
) -> None:
    temperature, top_k, top_p, min_p, seeds, steps = parameters
    limited = torch.zeros_like(out, dtype=torch.bool)
    if top_k is not None:
        limited |= (top_k > 0) & (top_k < parts.vocab)
    if top_p is not None:
        limited |= top_p < 1
    if min_p is not None:
        limited |= min_p > 0
    rows = (limited & (temperature >= MIN_TEMPERATURE.value)).nonzero()[:, 0]
    if rows.numel():
        limits = (None if t is None else t[rows] for t in (top_k, top_p, min_p))
        log_weights = log_weights_ref(_whole_ref(logits, parts)[rows], temperature[rows], *limits)
        out[rows] = draw_ref(log_weights, seeds[rows], steps[rows], STREAM_GROUP.value, STREAM_TOKEN.value)


@register_op(mutates=("out",), reference=_reference)
def _sample_limited_shards(
    logits: torch.Tensor,
    group_max: torch.Tensor,
    group_sum: torch.Tensor,
    out: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    parts: LogitParts,
) -> None:
    if len(logits) and any(limit is not None for limit in parameters.limits):
        draw_limited_rows(logits.unsqueeze(1), parameters, None, group_max, group_sum, out, parts)


def sample_limited_shards(
    logits: torch.Tensor,
    group_max: torch.Tensor,
    group_sum: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    rank_steps: torch.Tensor,
    vocab: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Draw one token for each row that has limits, as :func:`sample` does, from logits of which each rank has a part.

    The memory of all ranks has the same layout, and this device reads all of it. Rank r has columns ``r * C`` to
    ``(r + 1) * C``. Whoever calls this sees to it that all ranks have written their parts, and that none overwrites
    them before all have drawn.

    Args:
        logits: ``[R, C]`` float32, this rank's part; contiguous in the last dimension, all ranks with one row stride.
            Columns behind the vocabulary may hold anything.
        group_max, group_sum: ``[R, C / 128]`` float32, this rank's part: what :func:`sample_shard` found of its
            columns.
        temperature, top_k, top_p, min_p, seeds, steps: the parameters of the rows, as in :func:`sample`.
        rank_steps: ``[ranks]`` int64: the address of each rank's memory less the own one's, in steps of 256 bytes.
        vocab: columns of all ranks together.
        out: ``[R]`` int64. Rows without limits, and those that take the argmax, are left as they are.

    Returns:
        ``out``.

    Raises:
        ValueError: a wrong shape, dtype or device, a C that is no multiple of 128, or a vocabulary that is more than
            the ranks hold.
    """
    check_tensor("logits", logits, ("R", "C"), dtype=torch.float32)
    rows, each = logits.shape
    require(each > 0 and each % GROUP.value == 0, f"logits must have a multiple of {GROUP.value} columns, got {each}")
    for name, t in (("group_max", group_max), ("group_sum", group_sum)):
        check_tensor(name, t, (rows, each // GROUP.value), dtype=torch.float32, like=logits)
        require(t.is_contiguous(), f"{name} must be contiguous")
    parameters = SamplingRows(temperature, top_k, top_p, min_p, seeds, steps)
    check_parameters(rows, logits, parameters)
    check_tensor("rank_steps", rank_steps, ("ranks",), dtype=torch.int64, like=logits)
    held = each * len(rank_steps)
    require(0 < vocab <= held, f"vocab must be from 1 to the {held} columns of all ranks, got {vocab}")
    check_tensor("out", out, (rows,), dtype=torch.int64, like=logits)
    _sample_limited_shards(logits, group_max, group_sum, out, *parameters, rank_steps, each, vocab)
    return out


sample_limited_shards_ref = with_reference(sample_limited_shards)
