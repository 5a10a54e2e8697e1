"""Token ids to text, one token at a time, never half a character and never part of a stop string."""

import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

# Prompt tokens decoded together with the output: some tokenizers write a word differently at the start of a text.
CONTEXT_TOKENS = 5
REPLACEMENT = "�"  # what an incomplete UTF-8 sequence decodes to
# A character is at most 4 bytes, so at most 4 tokens: a longer wait means bytes that are no text, or skipped tokens.
MAX_PENDING = 8


def backend_of(tokenizer: Any) -> Any:
    """The ``tokenizers.Tokenizer`` that decodes for a transformers tokenizer; ``None`` if it decodes otherwise."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast  # imported with the tokenizer already

    kind = type(tokenizer)
    plain = isinstance(tokenizer, PreTrainedTokenizerFast) and kind.decode is PreTrainedTokenizerBase.decode
    return tokenizer.backend_tokenizer if plain and kind._decode is PreTrainedTokenizerFast._decode else None


def _shown_as() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary's names.

    Printable characters of Latin-1 stand for their own bytes, and those from 256 on for the others (Radford et al.,
    "Language Models are Unsupervised Multitask Learners", 2019).
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


SHOWN_AS = _shown_as()
ONE_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # how SentencePiece names a token of a byte


def bytes_of(tokenizer: Any, token: int, text: str) -> bytes:
    """What a token stands for. Part of a character has no text, so that its name has to tell.

    Args:
        tokenizer: a transformers tokenizer; ``None``: there is none.
        text: of the token by itself.
    """
    if tokenizer is not None and REPLACEMENT in text:
        name = str(tokenizer.convert_ids_to_tokens(token))
        if byte := ONE_BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        if SHOWN_AS.keys() >= set(name):
            return bytes(SHOWN_AS[character] for character in name)
    return text.encode()


class Words:
    """The text of each token by itself, decoded once: transformers takes 3.1 us for one, the tokenizer behind it 0.7.

    Args:
        tokenizer: a transformers tokenizer; ``None``: tokens have no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._known.get(token)
        if text is None:
            text = self._known[token] = self._decode([token])
        return text

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        cleans = getattr(self._tokenizer, "clean_up_tokenization_spaces", True)  # which transformers does itself
        backend = None if cleans else backend_of(self._tokenizer)
        return self._tokenizer.decode if backend is None else partial(backend.decode, skip_special_tokens=False)


class IncrementalDetokenizer:
    """Follows one output.

    Decoding is not additive (a token may be a third of a character, or drop the space before it), so each step decodes
    a short window twice, without and with the new tokens, and what the second adds is new text. The window moves on
    only when its text ends in a whole character. ``tokenizers.DecodeStream`` does the same in 1.6 us a token, where two
    decodes take 13 (one core of an EPYC). On bytes that are no text it waits for ever; there this class decodes itself.

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
        self._backend = backend_of(tokenizer)
        self._stream: Any = None  # of the backend; made anew where it gave up
        self.text = ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, **self._options)

    def append(self, token_id: int) -> str:
        """Add one token; returns the text it completes, often that of the token itself, possibly empty."""
        new = self._streamed(token_id)
        self._window.append(token_id)
        if new == "" and len(self._window) - self._emitted < MAX_PENDING:
            return ""
        if not new:
            self._stream, new = None, self._decoded()
            if new is None:
                return ""
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        self.text += new
        return new

    def _streamed(self, token_id: int) -> str | None:
        """What ``DecodeStream`` says the token completes; ``None`` if it cannot tell."""
        if self._backend is None:
            return None
        if self._stream is None:
            if len(self._window) > self._emitted or self._decode(self._window).endswith(REPLACEMENT):
                return None  # it would take the beginning of a character for new text
            from tokenizers.decoders import DecodeStream  # imported with the tokenizer already

            skip = self._options["skip_special_tokens"]
            self._stream = DecodeStream(ids=self._window, skip_special_tokens=skip)
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception as error:  # tokenizers raises no narrower one
            if type(error) is not Exception:
                raise
            return None  # a decoder whose texts do not begin alike

    def _decoded(self) -> str | None:
        """The text that the window adds; ``None`` if it may still become a character."""
        before = self._decode(self._window[: self._emitted])
        after = self._decode(self._window)
        incomplete = len(after) <= len(before) or after.endswith(REPLACEMENT)
        if incomplete and len(self._window) - self._emitted < MAX_PENDING:
            return None
        return after[len(before) :]


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
