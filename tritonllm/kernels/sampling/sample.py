"""One token for each row of logits: temperature, min-p, top-k, top-p, with one noise for each seed and step.

The order is vLLM's: edit the logits (`edits.py`) and ban tokens (`masks.py`), divide by the temperature, drop tokens
less likely than min_p times the likeliest, keep the top_k largest, keep the shortest beginning of those that holds
top_p of their probability, draw. Ties at an edge go to the lower ids, so exactly ``top_k`` tokens stay, and ``top_k=1``
is the argmax.

Three launches, whatever the rows ask for; one if no row can have limits. The first (`draw.py`) reads the logits
once and draws for rows without limits by the Gumbel-max trick (`common.py`). The others (`limited.py`) give
one program to each row with limits: the second settles rows whose limits leave a few hundred tokens at most
(`candidates`), the third searches the rest (`truncation`); both read again only the groups that matter. Floor: the
bytes of the logits over the memory bandwidth, 36 us for [256, 151936] float32 on an H200.
"""

import torch

from tritonllm.config.sampling_rows import DTYPES, SamplingRows
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.random import STREAM_GROUP, STREAM_TOKEN
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.sampling.common import LN2, MIN_TEMPERATURE, clean_ref, draw_ref, keep_ref, scale_ref
from tritonllm.kernels.sampling.draw import draw_rows
from tritonllm.kernels.sampling.edits import LogitEdits, check_edits, edit_logits_ref
from tritonllm.kernels.sampling.limited import draw_limited_rows
from tritonllm.kernels.sampling.masks import NO_MASKS, MaybeMasks, TokenMasks, ban_ref, check_masks
from tritonllm.kernels.sampling.truncation import limits_ref


def log_weights_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """``[B, V]`` float32: log2 of what a row that is not greedy draws from, up to a constant; -inf if excluded."""
    x, scale = clean_ref(logits), scale_ref(temperature)
    log_weights = (x - x.amax(-1, keepdim=True)) * scale[:, None]
    excluded = x == -torch.inf  # a row of -inf is left with nothing
    if not (top_k is top_p is min_p is None):
        threshold, last_tie, _ = limits_ref(x, scale, top_k, top_p, min_p)
        excluded |= ~keep_ref(x, threshold, last_tie)
    return log_weights.masked_fill(excluded, -torch.inf)


def sample_rows(
    logits: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    seats: torch.Tensor | None,
    edits: LogitEdits | None,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    offsets: torch.Tensor | None = None,
    masks: MaybeMasks = NO_MASKS,
) -> None:
    """What :func:`sample` launches, for ``[B, N, V]``: see ``draw.draw_rows``."""
    if logits.shape[0] == 0 or logits.shape[1] == 0:
        return
    group_max, group_sum = draw_rows(logits, parameters, seats, edits, workspace, out, offsets, masks)
    if any(limit is not None for limit in parameters.limits):
        draw_limited_rows(logits, parameters, offsets, group_max, group_sum, out)


def _reference(
    logits: torch.Tensor, workspace: torch.Tensor | None, out: torch.Tensor, parameters: SamplingRows[torch.Tensor]
) -> None:
    torch.argmax(clean_ref(logits), -1, out=out)
    rows = (parameters.temperature >= MIN_TEMPERATURE.value).nonzero()[:, 0]
    if rows.numel():
        temperature, seeds, steps = (t[rows] for t in (parameters.temperature, parameters.seeds, parameters.steps))
        limits = (None if t is None else t[rows] for t in parameters.limits)
        log_weights = log_weights_ref(logits[rows], temperature, *limits)
        out[rows] = draw_ref(log_weights, seeds, steps, STREAM_GROUP.value, STREAM_TOKEN.value)


@register_op(mutates=("workspace", "out"), reference=_reference)
def _sample(
    logits: torch.Tensor, workspace: torch.Tensor | None, out: torch.Tensor, parameters: SamplingRows[torch.Tensor]
) -> None:
    sample_rows(logits.unsqueeze(1), parameters, None, None, workspace, out)


def _masked_reference(
    logits: torch.Tensor,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    masks: MaybeMasks,
) -> None:
    ban_ref(logits, masks)
    _reference(logits, workspace, out, parameters)


@register_op(mutates=("logits", "workspace", "out"), reference=_masked_reference)
def _sample_masked(
    logits: torch.Tensor,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    masks: MaybeMasks,
) -> None:
    sample_rows(logits.unsqueeze(1), parameters, None, None, workspace, out, masks=masks)


def _edited_reference(
    logits: torch.Tensor,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    seats: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    edits: LogitEdits,
    masks: MaybeMasks,
) -> None:
    logits.copy_(edit_logits_ref(logits, edits, seats, parameters.steps))
    ban_ref(logits, masks)
    _reference(logits, workspace, out, parameters)


@register_op(mutates=("logits", "workspace", "out"), reference=_edited_reference)
def _sample_edited(
    logits: torch.Tensor,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    seats: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    edits: LogitEdits,
    masks: MaybeMasks,
) -> None:
    sample_rows(logits.unsqueeze(1), parameters, seats, edits, workspace, out, masks=masks)


def check_parameters(batch: int, like: torch.Tensor, parameters: SamplingRows[torch.Tensor]) -> None:
    """Check the tensors that hold one value for each sequence."""
    for (name, dtype), t in zip(DTYPES.items(), parameters, strict=True):
        if t is not None:
            check_tensor(name, t, (batch,), dtype=getattr(torch, dtype), like=like)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    edits: LogitEdits | None = None,
    seats: torch.Tensor | None = None,
    masks: TokenMasks | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token for each row.

    A row's token depends on its logits, parameters, seed and step only: not on the batch or its place in it. A token of
    -inf or NaN is never drawn; a row with nothing else gives token 0. One of +inf is drawn before all others. The
    values of the parameters are on the device and are not checked: those outside the ranges below mean no limit, or the
    nearest valid one. Rows without limits or edits do not pay for those of others.

    Probabilities are summed in float32. So at the edge of ``top_p`` a token may be kept or left out if the probability
    of those before it is within a relative 1e-5 of the limit: of a flat distribution over 262,144 tokens some are.

    Args:
        logits: ``[B, V]`` float16, bfloat16 or float32; contiguous in the last dimension, any row stride. Rows
            with a seat are overwritten with what the edits make of them, and rows with a mask may be overwritten with
            -inf where that bans; others do not change.
        temperature: ``[B]`` float32; below 1e-5 the argmax is taken, the lowest id among equals.
        top_k: ``[B]`` int32: how many logits to keep; 0, -1 or V and more keep all. ``None``: no row has one.
        top_p: ``[B]`` float32 in (0, 1]; 1 keeps all. ``None``: no row has one.
        min_p: ``[B]`` float32 in [0, 1], relative to the largest probability; 0 keeps all. ``None``: no row has one.
        seeds: ``[B]`` int64, the sequence's own.
        steps: ``[B]`` int64, the number of the token in its sequence.
        edits: penalties, biases, bans and allowed tokens of requests, applied before all else. Needs float32 logits.
        seats: ``[B]`` int32 with ``edits``: the row's place in them; negative for none.
        masks: which tokens may come; a row that has none left gives token 0. ``None``: no row has a mask.
        workspace: at least ``[B]`` int32 zeros, and zeros again afterwards: saves the launch that makes them. Calls
            that may run at the same time need one each.
        out: ``[B]`` int64 to write into.

    Returns:
        ``[B]`` int64: ``out``, or a new tensor.

    Raises:
        ValueError: a wrong shape, dtype or device, an empty vocabulary, or only one of ``edits`` and ``seats``.
    """
    check_tensor("logits", logits, ("B", "V"))
    batch, vocab = logits.shape
    require(vocab > 0, "logits must have at least one column (the vocabulary is empty)")
    parameters = SamplingRows(temperature, top_k, top_p, min_p, seeds, steps)
    check_parameters(batch, logits, parameters)
    require((edits is None) == (seats is None), "edits and seats must be given together")
    if edits is not None and seats is not None:
        check_edits(edits, seats, logits)
    if masks is not None:
        check_masks(masks, logits)
    given = NO_MASKS if masks is None else MaybeMasks(*masks)
    if workspace is not None:
        check_tensor("workspace", workspace, ("B",), dtype=torch.int32, like=logits)
        require(len(workspace) >= batch, f"workspace must have at least {batch} elements, got {len(workspace)}")
    if out is None:
        out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    check_tensor("out", out, (batch,), dtype=torch.int64, like=logits)
    if edits is not None and seats is not None:
        _sample_edited(logits, workspace, out, seats, *parameters, *edits, *given)
    elif masks is not None:
        _sample_masked(logits, workspace, out, *parameters, *given)
    else:
        _sample(logits, workspace, out, *parameters)
    return out


sample_ref = with_reference(sample)


def drawn_log_weights(
    logits: torch.Tensor,
    rows: SamplingRows[torch.Tensor],
    edits: LogitEdits | None = None,
    seats: torch.Tensor | None = None,
    masks: TokenMasks | None = None,
    *,
    limited: bool = True,
) -> torch.Tensor:
    """The distributions that :func:`sample` draws from, in plain torch: for reports, not for draws.

    A row that takes the argmax has that of temperature 1 without limits. With edits, or where rows are ``limited``, the
    host waits for the device.

    Args:
        logits: ``[B, V]``; not changed.
        rows: parameters, edits, seats and masks as of :func:`sample`.
        limited: some row has a ``top_k``, ``top_p`` or ``min_p``.

    Returns:
        ``[B, V]`` float32: natural logarithms of probabilities, up to a constant of the row; -inf for what cannot be
        drawn.
    """
    if edits is not None and seats is not None:
        logits = edit_logits_ref(logits, edits, seats, rows.steps)
    if masks is not None:
        logits = logits.clone()
        ban_ref(logits, MaybeMasks(*masks))
    greedy = ~(rows.temperature >= MIN_TEMPERATURE.value)
    limits: list[torch.Tensor | None] = [None] * 3
    if limited:  # 0, 1 and 0 keep all tokens
        pairs = zip(rows.limits, (0, 1, 0), strict=True)
        limits = [None if limit is None else limit.masked_fill(greedy, neutral) for limit, neutral in pairs]
    log_weights = log_weights_ref(logits, rows.temperature.masked_fill(greedy, 1), *limits)
    return log_weights * LN2
