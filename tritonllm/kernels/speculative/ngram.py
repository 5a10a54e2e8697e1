"""Drafts by looking back: what followed the last time that the sequence's newest tokens stood in it.

The longest run of tokens counts that ends the sequence and stands in it once more, of equal ones the latest. Its
continuation is proposed, and where that runs into the sequence's end it goes on from its beginning, for then the text
repeats itself. "Prompt lookup decoding": Saxena, 2023; vLLM's ``ngram`` takes the earliest of equal runs.

Texts of other sequences may be searched too, where an equally long run in the sequence itself is not found: what past
requests were given is often what the next one gets ("SuffixDecoding": Oliaro et al., 2024, which builds suffix trees of
it and proposes what followed most often; here it is what followed last).

The tokens of all sequences lie on the device, so a step's drafts need nothing of the host, which may not know the last
tokens yet. One program for each sequence reads its tokens once: 4 bytes a token, 0.5 MB of 131,072.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference

MOST_LOOKUP = 32  # tokens of a run: each is a load for every token of a sequence


@triton.jit
def _same(p_text, b_at, p_last, last, back: tl.constexpr, m_at):
    """Whether the tokens so many places before ``b_at`` equal the one so many before the sequence's last."""
    token = tl.load(p_last - back, mask=last >= back, other=-2)
    return tl.load(p_text + b_at - back, mask=m_at & (b_at >= back), other=-3) == token


@triton.jit
def _longest_run(p_text, length, p_last, last, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, TILE: tl.constexpr):
    """The longest run among ``length`` tokens that equals the last tokens of a sequence, those at ``p_last`` and before
    it; of equally long ones the latest. Returns its number of tokens and its last one's place; -1 for none."""
    b_best = tl.full([TILE], -1, tl.int64)
    for first in range(0, length, TILE):
        b_at = first + tl.arange(0, TILE)
        b_tokens = tl.zeros([TILE], tl.int32)
        m_same = b_at < length
        # Each comparison waits for the one before. Two leave nothing of most tiles.
        for back in tl.static_range(min(2, LONGEST)):
            m_same = m_same & _same(p_text, b_at, p_last, last, back, m_same)
            b_tokens += m_same.to(tl.int32)
        if tl.max(m_same.to(tl.int32)) > 0:
            for back in tl.static_range(2, LONGEST):
                m_same = m_same & _same(p_text, b_at, p_last, last, back, m_same)
                b_tokens += m_same.to(tl.int32)
        b_best = tl.maximum(b_best, tl.where(b_tokens >= SHORTEST, (b_tokens.to(tl.int64) << 32) + b_at, -1))
    best = tl.max(b_best)
    return (best >> 32).to(tl.int32), best.to(tl.int32)


@triton.jit(do_not_specialize=["L", "P"])
def _ngram_kernel(
    history_ptr,  # [S, L]
    seats_ptr,  # [B]
    ends_ptr,  # [B]
    counts_ptr,  # [B]
    past_ptr,  # [P] or None
    ids_ptr,  # [B, G + 1]
    drafts_ptr,  # [B, G]
    L,
    P,
    factor,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    G: tl.constexpr,
    DRAFTS: tl.constexpr,  # at least G
    TILE: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats_ptr + seq).to(tl.int64)
    end = tl.load(ends_ptr + seq)
    count = tl.where((seat >= 0) & (end < L), tl.load(counts_ptr + seq), 0)
    p_history = history_ptr + tl.maximum(seat, 0) * L
    b_draft = tl.arange(0, DRAFTS)
    b_token = tl.full([DRAFTS], -1, tl.int32)
    if count > 0:
        tokens, at = _longest_run(p_history, end, p_history + end, end, SHORTEST, LONGEST, TILE)
        b_token = tl.load(p_history + at + 1 + b_draft % tl.maximum(end - at, 1), mask=tokens > 0, other=-1)
        if past_ptr is not None:
            others, place = _longest_run(past_ptr, P - 1, p_history + end, end, SHORTEST, LONGEST, TILE)
            b_place = place + 1 + b_draft
            b_other = tl.load(past_ptr + b_place, mask=(others > tokens) & (b_place < P), other=-1)
            b_token = tl.where(others > tokens, b_other, b_token)
            tokens = tl.maximum(tokens, others)
        if factor > 0:
            count = tl.minimum(count, (tokens.to(tl.float32) * factor).to(tl.int32))
        b_token = tl.where(b_draft < count, b_token, -1)
        ends_at = tl.min(tl.where(b_token < 0, b_draft, DRAFTS))  # a text of the past ends there
        b_token = tl.where(b_draft < ends_at, b_token, -1)
    tl.store(drafts_ptr + seq * G + b_draft, b_token, mask=b_draft < G)
    tl.store(ids_ptr + seq * (G + 1) + 1 + b_draft, tl.maximum(b_token, 0), mask=b_draft < G)


def _longest_run_ref(text: torch.Tensor, last: torch.Tensor, shortest: int, longest: int) -> tuple[int, int]:
    """:func:`_longest_run` of the tokens ``last``; places that the kernel leaves out are left out of ``text``."""
    same, length = torch.ones_like(text, dtype=torch.bool), torch.zeros_like(text, dtype=torch.int64)
    for back in range(min(longest, len(last))):
        same[:back] = False
        same[back:] &= text[: max(len(text) - back, 0)] == last[-1 - back]
        length += same
    score = torch.where(length >= shortest, (length << 32) + torch.arange(len(text), device=text.device), -1)
    best = int(score.max()) if len(text) else -1
    return best >> 32, best & 0xFFFFFFFF


def _reference(
    history: torch.Tensor,
    seats: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    past: torch.Tensor | None,
    ids: torch.Tensor,
    drafts: torch.Tensor,
    shortest: int,
    longest: int,
    factor: float,
) -> None:
    drafts.fill_(-1)
    columns = zip(seats.tolist(), ends.tolist(), counts.tolist(), strict=True)
    for row, (seat, end, count) in enumerate(columns):
        if seat < 0 or end >= history.shape[1] or count <= 0:
            continue
        last = history[seat, : end + 1]
        found, at = _longest_run_ref(last[:-1], last, shortest, longest)
        others, place = -1, 0
        if past is not None:
            others, place = _longest_run_ref(past[:-1], last, shortest, longest)
        tokens = max(found, others)
        count = min(count, drafts.shape[1], int(tokens * factor) if factor > 0 else count)
        if tokens < 0 or count <= 0:
            continue
        offset = torch.arange(count, device=last.device)
        if others > found:
            assert past is not None
            proposed = past[place + 1 : place + 1 + count]
        else:
            proposed = last[at + 1 + offset % (end - at)]
        whole = (proposed >= 0).long().cumprod(0).bool()
        drafts[row, : len(proposed)] = torch.where(whole, proposed, -1)
    ids[:, 1:] = drafts.clamp_min(0)


@register_op(mutates=("ids", "drafts"), reference=_reference)
def _propose_ngrams(
    history: torch.Tensor,
    seats: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    past: torch.Tensor | None,
    ids: torch.Tensor,
    drafts: torch.Tensor,
    shortest: int,
    longest: int,
    factor: float,
) -> None:
    if len(seats) == 0:
        return
    most = drafts.shape[1]
    _ngram_kernel[(len(seats),)](
        *(history, seats, ends, counts, past, ids, drafts, history.shape[1]),
        *(0 if past is None else len(past), factor),
        SHORTEST=shortest,
        LONGEST=longest,
        G=most,
        DRAFTS=triton.next_power_of_2(most),
        TILE=4096,
        num_warps=8,
    )


def propose_ngrams(
    history: torch.Tensor,
    seats: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    ids: torch.Tensor,
    drafts: torch.Tensor,
    *,
    shortest: int,
    longest: int,
    past: torch.Tensor | None = None,
    factor: float = 0.0,
) -> None:
    """Propose what may follow B sequences, from the sequences themselves and from others.

    Args:
        history: ``[S, L]`` int32, the tokens of each seat's sequence.
        seats: ``[B]`` int32, where a sequence's tokens are; -1: nothing is proposed.
        ends: ``[B]`` int32, the position of its last token; at L or beyond nothing is proposed.
        counts: ``[B]`` int32, how many drafts it may have.
        ids: ``[B, G + 1]`` int32; of all but the first column written, the drafts, and 0 where there are none.
        drafts: ``[B, G]`` int32, G at least 1, written: the drafts, and -1 behind them.
        shortest, longest: tokens of the runs that are looked for, from 1 to ``MOST_LOOKUP``.
        past: ``[P]`` int32, tokens of other texts with -1 between them, P at least 1. They count where their run is
            longer than any in the sequence itself.
        factor: how many drafts there may be for each token of the run that was found; 0 for no such limit.

    Raises:
        ValueError: a wrong shape, dtype, device or length.
    """
    check_tensor("history", history, ("S", "L"), dtype=torch.int32)
    check_tensor("seats", seats, ("B",), dtype=torch.int32, like=history)
    count = len(seats)
    for name, column in (("ends", ends), ("counts", counts)):
        check_tensor(name, column, (count,), dtype=torch.int32, like=history)
    check_tensor("drafts", drafts, (count, "G"), dtype=torch.int32, like=history)
    check_tensor("ids", ids, (count, drafts.shape[1] + 1), dtype=torch.int32, like=history)
    require(drafts.shape[1] >= 1, "drafts must have at least one column, got none")
    for name, tensor in (("history", history), ("ids", ids), ("drafts", drafts)):
        require(tensor.is_contiguous(), f"{name} must be contiguous")
    fits = 1 <= shortest <= longest <= MOST_LOOKUP
    require(fits, f"shortest and longest must be from 1 to {MOST_LOOKUP} in this order, got {shortest} and {longest}")
    if past is not None:
        check_tensor("past", past, ("P",), dtype=torch.int32, like=history)
        require(len(past) >= 1 and past.is_contiguous(), "past must be contiguous, with at least one token")
    require(factor >= 0, f"factor must be at least 0, got {factor}")
    _propose_ngrams(history, seats, ends, counts, past, ids, drafts, shortest, longest, factor)


propose_ngrams_ref = with_reference(propose_ngrams)
