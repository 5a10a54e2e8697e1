"""Token ids to text, one token at a time, never half a character and never part of a stop string."""

from collections.abc import Sequence
from typing import Any

# Prompt tokens decoded together with the output: some tokenizers write a word differently at the start of a text.
CONTEXT_TOKENS = 5
REPLACEMENT = "�"  # what an incomplete UTF-8 sequence decodes to
# A character is at most 4 bytes, so at most 4 tokens: a longer wait means bytes that are no text, or skipped tokens.
MAX_PENDING = 8


class IncrementalDetokenizer:
    """Follows one output.

    Decoding is not additive (a token may be a third of a character, or drop the space before it), so each step decodes
    a short window twice, without and with the new tokens, and what the second adds is new text. The window moves on
    only when its text ends in a whole character.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: the prompt; its last tokens are the first window.
        skip_special_tokens, spaces_between_special_tokens: as in :class:`SamplingParams`.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
            "clean_up_tokenization_spaces": False,  # its edits reach back into text that is already out
        }
        self._window = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._emitted = len(self._window)  # how many tokens of the window are in the text already
        self.text = ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, **self._options)

    def append(self, token_id: int) -> str:
        """Add one token; returns the text it completes, often that of the token itself, possibly empty."""
        self._window.append(token_id)
        before = self._decode(self._window[: self._emitted])
        after = self._decode(self._window)
        incomplete = len(after) <= len(before) or after.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._emitted < MAX_PENDING:
            return ""
        new = after[len(before) :]
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        self.text += new
        return new


def find_stop(text: str, new_chars: int, stop: Sequence[str]) -> tuple[int, str] | None:
    """The earliest stop string that the last ``new_chars`` characters of ``text`` complete.

    Returns:
        Where it begins, and which; ``None`` if there is none. Of two that begin together, the first in ``stop``.
    """
    best: tuple[int, str] | None = None
    for s in stop:
        at = text.find(s, max(0, len(text) - new_chars - len(s) + 1))
        if at >= 0 and (best is None or at < best[0]):
            best = at, s
    return best
