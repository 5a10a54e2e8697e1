"""From one step to the next on the device: what the last one drew, and where each sequence's next token goes.

A step may be launched before the host knows which tokens the last one drew, and with drafts even how many. So the
device keeps, for the seat that a request holds while it runs, its last token and position and what sampling wants of
it. One launch first settles what the step before drew, and then derives the next step's inputs from the seats: a
decode's token, position, slot and length, and every row's sampling parameters.

Some kilobytes, all of them latency: one program, whose loads wait together as far as they can, so that the cost is the
launch and some trips to memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference


class SamplingRows(NamedTuple):
    """Parameters of `sample`, a row each; or of S seats.

    Attributes:
        temperature, top_p, min_p: float32.
        top_k: int32.
        seeds: int64.
        steps: int64, the index of the token that is about to be drawn; of a seat that index less the sequence's
            length, which is minus the length of its prompt.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    steps: torch.Tensor


class SeatState(NamedTuple):
    """What the device knows of S seats.

    Attributes:
        last_tokens: ``[S]`` int32, drawn last.
        positions: ``[S]`` int32, of the token that was sampled from last; once settled, of the one to compute next.
        row_seats: ``[S]`` int32, the seat of each row of the step before; -1 for none.
    """

    last_tokens: torch.Tensor
    positions: torch.Tensor
    row_seats: torch.Tensor


class StepRows(NamedTuple):
    """The R rows that a step samples from.

    Attributes:
        seats: ``[R]`` int32, no seat twice; -1 for padding.
        starts: ``[R]`` int32, the position of the token that is sampled from; -1 takes the seat's, and is replaced.
        tokens: ``[R]`` int64, which of the step's tokens it is; those below D are decodes.
    """

    seats: torch.Tensor
    starts: torch.Tensor
    tokens: torch.Tensor


class Decodes(NamedTuple):
    """The D decodes of a step, its first tokens and sequences.

    Attributes:
        ids: ``[D]`` int32; -1 takes the seat's last token, and is replaced.
        positions, slots: ``[D]`` int64, written.
        lengths: ``[D]`` int32, written.
        tables: ``[D, M]`` int32, blocks.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


@triton.jit(do_not_specialize=["S", "R", "D", "drawn_rows", "stride_table"])
def _advance_seats_kernel(
    state,  # SeatState
    parameters,  # SamplingRows of seats
    rows,  # StepRows
    out,  # SamplingRows of rows
    decodes,  # Decodes
    drawn_ptr,  # [drawn_rows, MOST]
    counts_ptr,  # [drawn_rows] or None
    limits_ptr,  # [R] or None
    S,
    R,
    D,
    drawn_rows,
    stride_table,
    MOST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # at least S
):
    b_row = tl.arange(0, BLOCK)
    m_row = b_row < R
    b_before = tl.load(state.row_seats + b_row, mask=b_row < drawn_rows, other=-1)
    b_seat = tl.load(rows.seats + b_row, mask=m_row, other=-1)
    m_seat = b_seat >= 0
    b_start = tl.load(rows.starts + b_row, mask=m_seat, other=0)
    b_token = tl.load(rows.tokens + b_row, mask=m_seat, other=0)
    m_decode = m_seat & (b_token < D)
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
    if counts_ptr is not None:
        b_count = tl.load(counts_ptr + b_row, mask=m_before, other=1)
    b_drawn = tl.load(drawn_ptr + b_row * MOST + b_count - 1, mask=m_before, other=0)
    b_position = tl.load(state.positions + b_before, mask=m_before, other=0) + b_count
    tl.store(state.last_tokens + b_before, b_drawn.to(tl.int32), mask=m_before)
    tl.store(state.positions + b_before, b_position, mask=m_before)
    tl.debug_barrier()  # all threads see all seats, and have read whose they were

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
    m_slot = m_decode
    if limits_ptr is not None:
        b_limit = tl.load(limits_ptr + b_row, mask=m_decode, other=1)
        m_slot = m_decode & (b_start < b_limit)
        b_start = tl.minimum(b_start, b_limit - 1)
    p_block = decodes.tables + b_token * stride_table + b_start // BLOCK_SIZE
    b_slot = tl.load(p_block, mask=m_slot, other=0).to(tl.int64) * BLOCK_SIZE + b_start % BLOCK_SIZE
    tl.store(decodes.positions + b_token, b_start.to(tl.int64), mask=m_decode)
    tl.store(decodes.slots + b_token, tl.where(m_slot, b_slot, -1), mask=m_decode)
    tl.store(decodes.lengths + b_token, b_start + 1, mask=m_decode)


def _reference(
    state: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    decodes: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    counts: torch.Tensor | None,
    limits: torch.Tensor | None,
    block_size: int,
) -> None:
    last_tokens, positions, row_seats = state
    seats, starts, tokens = rows
    ids, places, slots, lengths, tables = decodes
    before = (row_seats[: len(drawn)] >= 0).nonzero()[:, 0]
    count = torch.ones_like(before) if counts is None else counts[before].long()
    at = row_seats[before].long()
    last_tokens[at] = drawn[before, count - 1].int()
    positions[at] += count.int()

    row = (seats >= 0).nonzero()[:, 0]
    seat = seats[row].long()
    start = torch.where(starts[row] < 0, positions[seat], starts[row])
    positions[seat] = starts[row] = start
    row_seats.fill_(-1)
    row_seats[: len(seats)] = seats
    for name, target, source in zip(SamplingRows._fields, out, parameters, strict=True):
        target.fill_(1 if name == "top_p" else 0)
        target[row] = source[seat]
    out[-1][row] += start + 1

    decode = tokens[row] < len(ids)
    row, seat, start, token = row[decode], seat[decode], start[decode].long(), tokens[row[decode]]
    ids[token] = torch.where(ids[token] < 0, last_tokens[seat], ids[token])
    inside = torch.ones_like(start, dtype=torch.bool)
    if limits is not None:
        inside = start < limits[row]
        start = torch.minimum(start, limits[row].long() - 1)
    block = tables[token, torch.where(inside, start // block_size, 0)].long()
    slots[token] = torch.where(inside, block * block_size + start % block_size, -1)
    places[token] = start
    lengths[token] = start.int() + 1


@register_op(mutates=("state", "rows", "out", "decodes"), reference=_reference)
def _advance_seats(
    state: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    decodes: Sequence[torch.Tensor],
    drawn: torch.Tensor,
    counts: torch.Tensor | None,
    limits: torch.Tensor | None,
    block_size: int,
) -> None:
    at, of_rows, of_decodes = SeatState(*state), StepRows(*rows), Decodes(*decodes)
    seats = len(at.row_seats)
    block = max(32, triton.next_power_of_2(seats))
    _advance_seats_kernel[(1,)](
        *(at, SamplingRows(*parameters), of_rows, SamplingRows(*out), of_decodes, drawn, counts, limits),
        *(seats, len(of_rows.seats), len(of_decodes.ids), len(drawn), of_decodes.tables.stride(0)),
        MOST=drawn.shape[1],
        BLOCK_SIZE=block_size,
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
        for name, t in zip(SamplingRows._fields, table, strict=True):
            dtype = {"top_k": torch.int32, "seeds": torch.int64, "steps": torch.int64}.get(name, torch.float32)
            check_tensor(f"{which}.{name}", t, (size,), dtype=dtype, like=like)
    check_tensor("decodes.ids", decodes.ids, ("D",), dtype=torch.int32, like=like)
    tokens = len(decodes.ids)
    for name, dtype in (("positions", torch.int64), ("slots", torch.int64), ("lengths", torch.int32)):
        check_tensor(f"decodes.{name}", getattr(decodes, name), (tokens,), dtype=dtype, like=like)
    check_tensor("decodes.tables", decodes.tables, (tokens, "M"), dtype=torch.int32, like=like)
    check_tensor("drawn", drawn, ("N", "G"), dtype=torch.int64, like=like)
    require(drawn.shape[0] <= seats, f"drawn must have at most {seats} rows, got {drawn.shape[0]}")
    require(drawn.shape[1] >= 1 and drawn.is_contiguous(), "drawn must be contiguous, with at least one column")


def advance_seats(
    state: SeatState,
    parameters: SamplingRows,
    rows: StepRows,
    out: SamplingRows,
    decodes: Decodes,
    drawn: torch.Tensor,
    *,
    block_size: int,
    counts: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
) -> None:
    """Settle what the step before drew, and derive this step's inputs from the seats, all in place.

    First the seat of each row of the step before gets its last new token, and its position moves on by as many as there
    were. Then each row takes the parameters of its seat (padding: temperature, top_k, min_p, seed and step 0, top_p 1),
    and each decode its token and position, if the host did not know them, and the slot and length that follow.

    To run it twice for the same step changes nothing, whatever has been drawn in between.

    Args:
        state: of S seats.
        parameters: of the seats.
        rows: at most S.
        out: the rows' parameters.
        decodes: D of them.
        drawn: ``[N]`` or ``[N, G]`` int64, N at most S: the new tokens of each row of the step before.
        block_size: tokens of a block.
        counts: ``[N]`` int32, from 1 to G: how many there were; ``None``: one each.
        limits: ``[R]`` int32, at least 1: so many positions of a decode have a slot in its table; what lies beyond is
            computed at the last of them, and not stored. ``None``: they all have.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    drawn = drawn[:, None] if drawn.dim() == 1 else drawn
    _check(state, parameters, rows, out, decodes, drawn)
    require(block_size >= 1, f"block_size must be at least 1, got {block_size}")
    if counts is not None:
        check_tensor("counts", counts, (len(drawn),), dtype=torch.int32, like=drawn)
    if limits is not None:
        check_tensor("limits", limits, (len(rows.seats),), dtype=torch.int32, like=drawn)
    lists = [list(tensors) for tensors in (state, parameters, rows, out, decodes)]
    _advance_seats(*lists, drawn, counts, limits, block_size)


advance_seats_ref = with_reference(advance_seats)
