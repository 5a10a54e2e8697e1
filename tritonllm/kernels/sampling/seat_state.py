"""From one step to the next on the device: what the last one drew, and where each sequence's next token goes.

A step may be launched before the host knows which tokens the last one drew, and with drafts even how many. So the
device keeps, for the seat that a request holds while it runs, its last token and position and what sampling wants of
it, and for drafters that look back all of its tokens. One launch first settles what the step before drew, and then
derives the next step's inputs from the seats: a decode's token, position, slot and length (with drafts to verify, the
places of these as well), and every row's sampling parameters.

Some kilobytes, all of them latency: one program, whose loads wait together as far as they can, so that the cost is the
launch and some trips to memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonllm.config.sampling_rows import DTYPES, NEUTRAL, SamplingRows
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.sampling.seats import Decodes, SeatState, StepRows, Verdict


@triton.jit
def _note_tokens(
    history_ptr,
    b_before,
    b_position,
    b_count,
    b_drawn,
    ids_ptr,
    m_verified,
    stride,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the new tokens behind the ones before them; what lies beyond the end of the history is left out."""
    b_row = tl.arange(0, BLOCK)
    for i in tl.static_range(MOST):
        b_at = b_position + 1 + i
        m_new = (b_before >= 0) & (i < b_count)
        b_token = b_drawn
        if ids_ptr is not None:
            b_id = tl.load(ids_ptr + b_row * MOST + i, mask=m_new & m_verified, other=0)
            b_token = tl.where(m_verified, b_id, b_drawn)
        p_history = history_ptr + b_before.to(tl.int64) * stride + b_at
        tl.store(p_history, b_token.to(tl.int32), mask=m_new & (b_at < stride))


@triton.jit(do_not_specialize=["S", "R", "D", "drawn_rows", "stride_table", "stride_history"])
def _advance_seats_kernel(
    state,  # SeatState
    parameters,  # SamplingRows of seats
    rows,  # StepRows
    out,  # SamplingRows of rows
    decodes,  # Decodes
    drawn_ptr,  # [drawn_rows]
    ids_ptr,  # [drawn_rows, MOST] or None
    accepted_ptr,  # [drawn_rows] or None
    history_ptr,  # [S, stride_history] or None
    limits_ptr,  # [R] or None
    drafts_ptr,  # [R] or None
    S,
    R,
    D,
    drawn_rows,
    stride_table,
    stride_history,
    MOST: tl.constexpr,
    TOKENS: tl.constexpr,  # of each decode
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least S
):
    b_row = tl.arange(0, BLOCK)
    m_row = b_row < R
    b_before = tl.load(state.row_seats + b_row, mask=b_row < drawn_rows, other=-1)
    b_seat = tl.load(rows.seats + b_row, mask=m_row, other=-1)
    m_seat = b_seat >= 0
    b_start = tl.load(rows.starts + b_row, mask=m_seat, other=0)
    b_token = tl.load(rows.tokens + b_row, mask=m_seat, other=0)
    m_decode = m_seat & (b_token < D * TOKENS)
    b_id = tl.load(decodes.ids + b_token, mask=m_decode, other=0)
    b_temperature = tl.load(parameters.temperature + b_seat, mask=m_seat, other=0.0)
    b_top_k = tl.load(parameters.top_k + b_seat, mask=m_seat, other=0)
    b_top_p = tl.load(parameters.top_p + b_seat, mask=m_seat, other=1.0)
    b_min_p = tl.load(parameters.min_p + b_seat, mask=m_seat, other=0.0)
    b_seed = tl.load(parameters.seeds + b_seat, mask=m_seat, other=0)
    b_step = tl.load(parameters.steps + b_seat, mask=m_seat, other=0)

    # What the step before drew.
    m_before = b_before >= 0
    b_count = b_before * 0 + 1
    m_verified = b_before < -1
    b_drawn = tl.load(drawn_ptr + b_row, mask=m_before, other=0)
    if ids_ptr is not None:
        b_accepted = tl.load(accepted_ptr + b_row, mask=m_before, other=-1).to(tl.int32)
        m_verified = b_accepted >= 0
        b_count = tl.maximum(b_accepted, 0) + 1
        b_last_id = tl.load(ids_ptr + b_row * MOST + b_accepted, mask=m_verified, other=0)
        b_drawn = tl.where(m_verified, b_last_id, b_drawn)
    b_position = tl.load(state.positions + b_before, mask=m_before, other=0)
    if history_ptr is not None:
        _note_tokens(
            history_ptr, b_before, b_position, b_count, b_drawn, ids_ptr, m_verified, stride_history, MOST, BLOCK
        )
    tl.store(state.last_tokens + b_before, b_drawn.to(tl.int32), mask=m_before)
    tl.store(state.positions + b_before, b_position + b_count, mask=m_before)
    tl.debug_barrier()  # all threads see all seats, and have read whose they were
    if accepted_ptr is not None:
        tl.store(accepted_ptr + b_row, b_row.to(tl.int64) * 0 - 1, mask=b_row < drawn_rows)

    # This step's rows. What is taken from a seat is also written to the inputs, so that the same step can run again.
    b_place = tl.load(state.positions + b_seat, mask=m_seat & (b_start < 0), other=0)
    b_last = tl.load(state.last_tokens + b_seat, mask=m_decode & (b_id < 0), other=0)
    b_start = tl.where(b_start < 0, b_place, b_start)
    tl.store(state.positions + b_seat, b_start, mask=m_seat)
    tl.store(state.row_seats + b_row, b_seat, mask=b_row < S)
    tl.store(rows.starts + b_row, b_start, mask=m_seat)
    tl.store(decodes.ids + b_token, tl.where(b_id < 0, b_last, b_id), mask=m_decode)
    tl.store(out.temperature + b_row, b_temperature, mask=m_row)
    tl.store(out.top_k + b_row, b_top_k, mask=m_row)
    tl.store(out.top_p + b_row, b_top_p, mask=m_row)
    tl.store(out.min_p + b_row, b_min_p, mask=m_row)
    tl.store(out.seeds + b_row, b_seed, mask=m_row)
    tl.store(out.steps + b_row, tl.where(m_seat, b_step + b_start + 1, 0), mask=m_row)
    b_limit, b_stored = b_start + TOKENS, b_row * 0 + TOKENS
    if limits_ptr is not None:
        b_limit = tl.load(limits_ptr + b_row, mask=m_decode, other=1)
    if drafts_ptr is not None:
        b_drafts = tl.load(drafts_ptr + b_row, mask=m_decode, other=0)
        b_drafts = tl.maximum(tl.minimum(b_drafts, b_limit - 1 - b_start), 0)
        tl.store(drafts_ptr + b_row, b_drafts, mask=m_decode)
        b_stored = b_drafts + 1
    p_table = decodes.tables + (b_token // TOKENS) * stride_table
    for i in tl.static_range(TOKENS):
        b_at = tl.minimum(b_start + i, b_limit - 1)
        m_slot = m_decode & (b_start + i < b_limit) & (i < b_stored)
        b_block = tl.load(p_table + b_at // BLOCK_TOKENS, mask=m_slot, other=0).to(tl.int64)
        b_slot = b_block * BLOCK_TOKENS + b_at % BLOCK_TOKENS
        tl.store(decodes.positions + b_token + i, b_at.to(tl.int64), mask=m_decode)
        tl.store(decodes.slots + b_token + i, tl.where(m_slot, b_slot, -1), mask=m_decode)
    b_length = tl.minimum(b_start, b_limit - 1) + TOKENS
    tl.store(decodes.lengths + b_token // TOKENS, b_length, mask=m_decode)


def _settle_ref(
    state: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    ids: torch.Tensor | None,
    accepted: torch.Tensor | None,
    history: torch.Tensor | None,
) -> None:
    last_tokens, positions, row_seats = state
    before = (row_seats[: len(drawn)] >= 0).nonzero()[:, 0]
    at = row_seats[before].long()
    tokens, extra = drawn[before, None], torch.zeros_like(before)
    if ids is not None and accepted is not None:
        verified = accepted[before, None] >= 0
        tokens = torch.where(verified, ids[before], tokens.expand(-1, ids.shape[1]))
        extra = accepted[before].clamp_min(0)
        accepted.fill_(-1)
    if history is not None:
        offset = torch.arange(tokens.shape[1], device=drawn.device)
        place = positions[at].long()[:, None] + 1 + offset
        new = (offset <= extra[:, None]) & (place < history.shape[1])
        history[at[:, None].expand_as(place)[new], place[new]] = tokens[new].int()
    last_tokens[at] = tokens.gather(1, extra[:, None])[:, 0].int()
    positions[at] += extra.int() + 1


def _reference(
    state: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    decodes: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    ids: torch.Tensor | None,
    accepted: torch.Tensor | None,
    history: torch.Tensor | None,
    limits: torch.Tensor | None,
    drafts: torch.Tensor | None,
    block_tokens: int,
) -> None:
    last_tokens, positions, row_seats = state
    seats, starts, tokens = rows
    given, places, slots, lengths, tables = decodes
    _settle_ref(state, drawn, ids, accepted, history)

    row = (seats >= 0).nonzero()[:, 0]
    seat = seats[row].long()
    start = torch.where(starts[row] < 0, positions[seat], starts[row])
    positions[seat] = starts[row] = start
    row_seats.fill_(-1)
    row_seats[: len(seats)] = seats
    for name, target, source in zip(SamplingRows._fields, out, parameters, strict=True):
        target.fill_(NEUTRAL.get(name, 0))
        target[row] = source[seat]
    out[-1][row] += start + 1

    each = max(1, len(given) // max(1, len(lengths)))
    decode = tokens[row] < len(given)
    row, seat, start, token = row[decode], seat[decode], start[decode].long(), tokens[row[decode]]
    given[token] = torch.where(given[token] < 0, last_tokens[seat], given[token])
    limit = start + each if limits is None else limits[row].long()
    stored = torch.full_like(start, each)
    if drafts is not None:
        drafts[row] = torch.minimum(drafts[row], (limit - 1 - start).int()).clamp_min(0)
        stored = drafts[row] + 1
    for i in range(each):
        inside, at = (start + i < limit) & (i < stored), torch.minimum(start + i, limit - 1)
        block = tables[token // each, torch.where(inside, at // block_tokens, 0)].long()
        slots[token + i] = torch.where(inside, block * block_tokens + at % block_tokens, -1)
        places[token + i] = at
    lengths[token // each] = torch.minimum(start, limit - 1).int() + each


@register_op(mutates=("state", "rows", "out", "decodes", "accepted", "history", "drafts"), reference=_reference)
def _advance_seats(
    state: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    decodes: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    ids: torch.Tensor | None,
    accepted: torch.Tensor | None,
    history: torch.Tensor | None,
    limits: torch.Tensor | None,
    drafts: torch.Tensor | None,
    block_tokens: int,
) -> None:
    at, of_rows, of_decodes = SeatState(*state), StepRows(*rows), Decodes(*decodes)
    seats, count = len(at.row_seats), len(of_decodes.lengths)
    block = max(32, triton.next_power_of_2(seats))
    _advance_seats_kernel[(1,)](
        *(at, SamplingRows(*parameters), of_rows, SamplingRows(*out), of_decodes),
        *(drawn, ids, accepted, history, limits, drafts),
        *(seats, len(of_rows.seats), count, len(drawn), of_decodes.tables.stride(0)),
        0 if history is None else history.shape[1],
        MOST=1 if ids is None else ids.shape[1],
        TOKENS=max(1, len(of_decodes.ids) // max(1, count)),
        BLOCK_TOKENS=block_tokens,
        BLOCK=block,
        num_warps=min(8, max(1, block // 32)),
    )


def _check(
    state: SeatState, parameters: SamplingRows, rows: StepRows, out: SamplingRows, decodes: Decodes, drawn: torch.Tensor
) -> None:
    check_tensor("state.last_tokens", state.last_tokens, ("S",), dtype=torch.int32)
    like = state.last_tokens
    seats = len(like)
    for name, t in zip(SeatState._fields[1:], state[1:], strict=True):
        check_tensor(f"state.{name}", t, (seats,), dtype=torch.int32, like=like)
    check_tensor("rows.seats", rows.seats, ("R",), dtype=torch.int32, like=like)
    count = len(rows.seats)
    require(count <= seats, f"rows.seats must be at most the {seats} seats, got {count}")
    check_tensor("rows.starts", rows.starts, (count,), dtype=torch.int32, like=like)
    check_tensor("rows.tokens", rows.tokens, (count,), dtype=torch.int64, like=like)
    for which, table, size in (("parameters", parameters, seats), ("out", out, count)):
        for (name, dtype), t in zip(DTYPES.items(), table, strict=True):
            check_tensor(f"{which}.{name}", t, (size,), dtype=getattr(torch, dtype), like=like)
    check_tensor("decodes.lengths", decodes.lengths, ("D",), dtype=torch.int32, like=like)
    check_tensor("decodes.ids", decodes.ids, ("T",), dtype=torch.int32, like=like)
    count, tokens = len(decodes.lengths), len(decodes.ids)
    even = tokens % count == 0 if count else tokens == 0
    require(even, f"decodes.ids must be equally many for each of {count} decodes, got {tokens}")
    for name in ("positions", "slots"):
        check_tensor(f"decodes.{name}", getattr(decodes, name), (tokens,), dtype=torch.int64, like=like)
    check_tensor("decodes.tables", decodes.tables, (count, "M"), dtype=torch.int32, like=like)
    check_tensor("drawn", drawn, ("N",), dtype=torch.int64, like=like)
    require(drawn.shape[0] <= seats, f"drawn must have at most {seats} rows, got {drawn.shape[0]}")


def _check_verdict(verdict: Verdict, drawn: torch.Tensor) -> None:
    check_tensor("verdict.ids", verdict.ids, (len(drawn), "G"), dtype=torch.int64, like=drawn)
    contiguous = verdict.ids.is_contiguous() and verdict.ids.shape[1] >= 1
    require(contiguous, "verdict.ids must be contiguous, with at least one column")
    check_tensor("verdict.accepted", verdict.accepted, (len(drawn),), dtype=torch.int64, like=drawn)


def advance_seats(
    state: SeatState,
    parameters: SamplingRows,
    rows: StepRows,
    out: SamplingRows,
    decodes: Decodes,
    drawn: torch.Tensor,
    *,
    block_tokens: int,
    verdict: Verdict | None = None,
    history: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
    drafts: torch.Tensor | None = None,
) -> None:
    """Settle what the step before drew, and derive this step's inputs from the seats, all in place.

    First the seat of each row of the step before gets its last new token, and its position moves on by as many as there
    were. Then each row takes the parameters of its seat (padding: temperature, top_k, min_p, seed and step 0, top_p 1),
    and each decode its token and position, if the host did not know them, and the slots and length that follow.

    To run it twice for the same step changes nothing that counts, whatever has been drawn in between.

    Args:
        state: the state of S seats.
        parameters: the sampling parameters of the seats.
        rows: the rows of the step, at most S.
        out: gets the parameters of the rows.
        decodes: the D decodes of the step.
        drawn: ``[N]`` int64, N at most S: the new token of each row of the step before.
        block_tokens: tokens of a block of ``decodes.tables``, over all ranks where they split a sequence's keys: slots
            are those of whole blocks.
        verdict: the new tokens of each row, if the step before verified drafts; ``None``: none ever does.
        history: ``[S, L]`` int32, the tokens of each seat's sequence by their positions, to which the new ones are
            written; ``None``: nobody wants them.
        limits: ``[R]`` int32, at least 1: so many positions of a decode have a slot in its table; what lies beyond is
            computed at the last of them, and not stored. ``None``: they all have.
        drafts: ``[R]`` int32, how many drafts a row may have: lowered to the positions that have a slot, and of the
            others nothing is stored. ``None``: all have ``G - 1``.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    _check(state, parameters, rows, out, decodes, drawn)
    require(block_tokens >= 1, f"block_tokens must be at least 1, got {block_tokens}")
    ids, accepted = (None, None) if verdict is None else verdict
    if verdict is not None:
        _check_verdict(verdict, drawn)
    if history is not None:
        check_tensor("history", history, (len(state.row_seats), "L"), dtype=torch.int32, like=drawn)
        require(history.is_contiguous(), "history must be contiguous")
    for name, column in (("limits", limits), ("drafts", drafts)):
        if column is not None:
            check_tensor(name, column, (len(rows.seats),), dtype=torch.int32, like=drawn)
    lists = [list(tensors) for tensors in (state, parameters, rows, out, decodes)]
    _advance_seats(*lists, drawn, ids, accepted, history, limits, drafts, block_tokens)


advance_seats_ref = with_reference(advance_seats)
