"""Drafts by looking back: what followed the last time that the sequence's newest tokens stood in it.

The longest run of tokens counts that ends the sequence and stands in it once more, of equal ones the latest. Its
continuation is proposed, and where that runs into the sequence's end it goes on from its beginning, for then the text
repeats itself. "Prompt lookup decoding": Saxena, 2023; vLLM's ``ngram`` takes the earliest of equal runs.

The tokens of all sequences lie on the device, so a step's drafts need nothing of the host, which may not know the last
tokens yet. One program for each sequence reads its tokens once: 4 bytes a token, 0.5 MB of 131,072.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference

MOST_LOOKUP = 32  # tokens of a run: each is a load for every token of a sequence


@triton.jit(do_not_specialize=["L"])
def _ngram_kernel(
    history_ptr,  # [S, L]
    seats_ptr,  # [B]
    ends_ptr,  # [B]
    counts_ptr,  # [B]
    ids_ptr,  # [B, G + 1]
    drafts_ptr,  # [B, G]
    L,
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
    best = tl.full((), -1, tl.int64)
    if count > 0:
        b_best = tl.full([TILE], -1, tl.int64)
        for first in range(0, end, TILE):
            b_at = first + tl.arange(0, TILE)
            m_same = b_at < end
            b_length = tl.zeros([TILE], tl.int64)
            for back in tl.static_range(LONGEST):
                token = tl.load(p_history + end - back, mask=end >= back, other=-1)
                b_token = tl.load(p_history + b_at - back, mask=m_same & (b_at >= back), other=-2)
                m_same = m_same & (b_token == token)
                b_length += m_same.to(tl.int64)
            b_best = tl.maximum(b_best, tl.where(b_length >= SHORTEST, b_length * L + b_at, -1))
        best = tl.max(b_best)
    b_draft = tl.arange(0, DRAFTS)
    at = best % L  # of -1 it is not used
    m_found = (best >= 0) & (b_draft < count)
    b_token = tl.load(p_history + at + 1 + b_draft % tl.maximum(end - at, 1), mask=m_found, other=-1)
    tl.store(drafts_ptr + seq * G + b_draft, b_token, mask=b_draft < G)
    tl.store(ids_ptr + seq * (G + 1) + 1 + b_draft, tl.maximum(b_token, 0), mask=b_draft < G)


def _reference(
    history: torch.Tensor,
    seats: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    ids: torch.Tensor,
    drafts: torch.Tensor,
    shortest: int,
    longest: int,
) -> None:
    drafts.fill_(-1)
    columns = zip(seats.tolist(), ends.tolist(), counts.tolist(), strict=True)
    for row, (seat, end, count) in enumerate(columns):
        if seat < 0 or end >= history.shape[1] or count <= 0:
            continue
        tokens = history[seat, : end + 1]
        same, length = torch.ones_like(tokens[:end], dtype=torch.bool), torch.zeros_like(tokens[:end])
        for back in range(min(longest, end + 1)):
            same[:back] = False
            same[back:] &= tokens[: max(end - back, 0)] == tokens[end - back]
            length += same
        found = (length >= shortest).nonzero()
        if len(found):
            score = length * (end + 1) + torch.arange(end, device=tokens.device)
            at = int(torch.where(length >= shortest, score, -1).argmax())
            offset = torch.arange(min(count, drafts.shape[1]), device=tokens.device) % (end - at)
            drafts[row, : len(offset)] = tokens[at + 1 + offset]
    ids[:, 1:] = drafts.clamp_min(0)


@register_op(mutates=("ids", "drafts"), reference=_reference)
def _propose_ngrams(
    history: torch.Tensor,
    seats: torch.Tensor,
    ends: torch.Tensor,
    counts: torch.Tensor,
    ids: torch.Tensor,
    drafts: torch.Tensor,
    shortest: int,
    longest: int,
) -> None:
    if len(seats) == 0:
        return
    most = drafts.shape[1]
    _ngram_kernel[(len(seats),)](
        *(history, seats, ends, counts, ids, drafts, history.shape[1]),
        SHORTEST=shortest,
        LONGEST=longest,
        G=most,
        DRAFTS=triton.next_power_of_2(most),
        TILE=1024,
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
) -> None:
    """Propose what may follow B sequences, from the sequences themselves.

    Args:
        history: ``[S, L]`` int32, the tokens of each seat's sequence.
        seats: ``[B]`` int32, where a sequence's tokens are; -1: nothing is proposed.
        ends: ``[B]`` int32, the position of its last token; at L or beyond nothing is proposed.
        counts: ``[B]`` int32, how many drafts it may have.
        ids: ``[B, G + 1]`` int32; of all but the first column written, the drafts, and 0 where there are none.
        drafts: ``[B, G]`` int32, G at least 1, written: the drafts, and -1 behind them.
        shortest, longest: tokens of the runs that are looked for, from 1 to ``MOST_LOOKUP``.

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
    _propose_ngrams(history, seats, ends, counts, ids, drafts, shortest, longest)


propose_ngrams_ref = with_reference(propose_ngrams)
