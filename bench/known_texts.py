"""A drafter of a set acceptance: it knows the texts that come, and errs at a rate. For benchmarks and tests.

``LLM(..., speculative_config={"method": "bench.known_texts:make", "num_speculative_tokens": 4})`` makes one, which
knows nothing. ``drafter_of(llm).know(texts, acceptance)`` tells it what was generated without drafts.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tritonllm.engine.drafters import DraftStep

MOST_TEXTS = 256
BEGINNING = 32  # tokens by which a sequence is recognised; no two texts may begin alike


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
        """See :class:`tritonllm.engine.drafters.Drafter`."""
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
