"""A drafter of a set acceptance: it knows the texts that come, and errs at a rate. For benchmarks and tests.

``LLM(..., speculative_config={"method": "bench.known_texts:make", "num_speculative_tokens": 4})`` makes one, which
knows nothing. ``drafter_of(llm).know(texts, acceptance)`` tells it what was generated without drafts.

On a GPU it is one launch: as thirty operations of torch it took 80 us of each step that it was to measure.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonllm.engine.drafts.drafters import DraftStep

MOST_TEXTS = 256
BEGINNING = 32  # tokens by which a sequence is recognised; no two texts may begin alike


@triton.jit(do_not_specialize=["length"])
def _propose_kernel(
    history_ptr,  # [S, L]
    seats_ptr,  # [B]; so ends and counts
    ends_ptr,
    counts_ptr,
    ids_ptr,  # [B, G + 1]
    drafts_ptr,  # [B, G]
    texts_ptr,  # [TEXTS, length]
    errs_ptr,  # [TEXTS, length] uint8
    length,
    vocab,
    stride_history,
    stride_ids,
    stride_drafts,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,  # at least DRAFTS
    KNOWN: tl.constexpr,
    TEXTS: tl.constexpr,
):
    """One program: the drafts of one sequence."""
    row = tl.program_id(0)
    seat, end, count = tl.load(seats_ptr + row), tl.load(ends_ptr + row), tl.load(counts_ptr + row)
    b_at, b_text, b_draft = tl.arange(0, KNOWN), tl.arange(0, TEXTS), tl.arange(0, BLOCK)
    m_at = (b_at <= end) & (b_at < length)  # the others are not generated yet
    b_mine = tl.load(history_ptr + tl.maximum(seat, 0).to(tl.int64) * stride_history + b_at, mask=m_at, other=0)
    p_text = texts_ptr + b_text[:, None].to(tl.int64) * length + b_at[None, :]
    b_other = (tl.load(p_text, mask=m_at[None, :], other=0) != b_mine[None, :]) & m_at[None, :]
    found = tl.min(tl.where(tl.max(b_other.to(tl.int32), 1) == 0, b_text, TEXTS), 0)
    b_place = end + 1 + b_draft
    m_draft = (b_draft < count) & (b_place < length) & (seat >= 0) & (found < TEXTS) & (b_draft < DRAFTS)
    at = found.to(tl.int64) * length
    b_token = tl.load(texts_ptr + at + b_place, mask=m_draft, other=-1)
    b_errs = tl.load(errs_ptr + at + b_place, mask=m_draft, other=0) != 0
    b_token = tl.where(b_errs & (b_token >= 0), (b_token + 1) % vocab, b_token)
    tl.store(drafts_ptr + row * stride_drafts + b_draft, b_token, mask=b_draft < DRAFTS)
    tl.store(ids_ptr + row * stride_ids + 1 + b_draft, tl.maximum(b_token, 0), mask=b_draft < DRAFTS)


class KnownTexts:
    """On the device, without the host: all of it can be captured.

    Args:
        max_model_len: the longest text.
        vocab_size: of the model.
        device: where steps run.
    """

    remembers = False

    def __init__(self, max_model_len: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._texts = torch.full((MOST_TEXTS, max_model_len), -1, dtype=torch.int32, device=device)
        self._errs = torch.ones(MOST_TEXTS, max_model_len, dtype=torch.bool, device=device)

    def know(self, texts: Sequence[Sequence[int]], acceptance: float, seed: int = 0) -> None:
        """Draft from these texts, prompts included.

        Args:
            acceptance: the part of their tokens that is drafted right; which these are the seed decides.

        Raises:
            ValueError: too many texts, or two that begin alike.
        """
        if len(texts) > MOST_TEXTS or len({tuple(text[:BEGINNING]) for text in texts}) < len(texts):
            raise ValueError(f"texts must be at most {MOST_TEXTS}, and differ in their first {BEGINNING} tokens")
        rows = torch.full(self._texts.shape, -1, dtype=torch.int32)
        for row, text in enumerate(texts):
            rows[row, : len(text)] = torch.tensor(text[: rows.shape[1]], dtype=torch.int32)
        generator = torch.Generator().manual_seed(seed)
        self._errs.copy_(torch.rand(rows.shape, generator=generator) >= acceptance)
        self._texts.copy_(rows)

    def remember(self, output: torch.Tensor) -> None:
        """It does not."""

    def propose(self, step: DraftStep) -> None:
        """See :class:`tritonllm.engine.drafts.drafters.Drafter`."""
        if step.drafts.is_cuda:
            self.launch(step)
        else:
            self.propose_in_torch(step)

    def launch(self, step: DraftStep) -> None:
        """:meth:`propose`, by the kernel."""
        history, seats, ends, counts, ids, drafts = step[:6]
        texts, errs = self._texts, self._errs.view(torch.uint8)
        _propose_kernel[(len(seats),)](
            *(history, seats, ends, counts, ids, drafts, texts, errs, texts.shape[1], self._vocab),
            *(history.stride(0), ids.stride(0), drafts.stride(0)),
            DRAFTS=drafts.shape[1],
            BLOCK=triton.next_power_of_2(drafts.shape[1]),
            KNOWN=BEGINNING,
            TEXTS=MOST_TEXTS,
        )

    def propose_in_torch(self, step: DraftStep) -> None:
        """:meth:`propose`, in plain torch."""
        history, seats, ends, counts, ids, drafts = step[:6]
        length = self._texts.shape[1]
        known = min(BEGINNING, length)
        offset = torch.arange(drafts.shape[1], device=drafts.device)
        mine = history[seats.clamp_min(0).long(), :known]
        behind = (torch.arange(known, device=drafts.device) > ends[:, None]).unsqueeze(1)  # not generated yet
        same = ((mine[:, None] == self._texts[None, :, :known]) | behind).all(-1)
        row = same.int().argmax(1)
        place = ends[:, None].long() + 1 + offset
        inside = place.clamp_max(length - 1)
        tokens, errs = self._texts[row[:, None], inside], self._errs[row[:, None], inside]
        wanted = (offset < counts[:, None]) & (seats >= 0)[:, None] & same.any(1)[:, None] & (place < length)
        wrong = (tokens + 1) % self._vocab
        drafts.copy_(torch.where(wanted & (tokens >= 0), torch.where(errs, wrong, tokens), -1))
        ids[:, 1:].copy_(drafts.clamp_min(0))


def make(max_model_len: int, vocab_size: int, device: torch.device) -> KnownTexts:
    """What ``speculative_config`` names."""
    return KnownTexts(max_model_len, vocab_size, device)


def drafter_of(llm: Any) -> KnownTexts:
    """Of an ``LLM`` that was made with it."""
    drafter: KnownTexts = llm.engine._runner.drafts.drafter
    return drafter
