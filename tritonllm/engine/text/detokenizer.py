"""Token ids to text, one token at a time, never half a character and never part of a stop string."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

REPLACEMENT = "�"  # what bytes decode to that are no character, or not yet
CONTEXT_TOKENS = 4  # of the prompt, at least
# Of a character of 4 bytes 3 may be there. Tokenizers write them as one U+FFFD or as one for each.
MOST_UNFINISHED = 3
UNFINISHED = REPLACEMENT * MOST_UNFINISHED
# Tokens that end in U+FFFD, one after the other, are decoded together. Of so many these first and last ones are enough:
# the first tell that a run of bytes is no text, the last hold the character that may be unfinished.
MOST_PENDING, FIRST, LAST = 16, 5, 8


def backend_of(tokenizer: Any) -> Any:
    """The ``tokenizers.Tokenizer`` that decodes for a transformers tokenizer; ``None`` if it decodes otherwise."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast  # imported with the tokenizer already

    kind = type(tokenizer)
    plain = isinstance(tokenizer, PreTrainedTokenizerFast) and kind.decode is PreTrainedTokenizerBase.decode
    plain = plain and kind._decode is PreTrainedTokenizerFast._decode and "decode" not in vars(tokenizer)
    return tokenizer.backend_tokenizer if plain else None


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
    """The bytes that a token stands for. Part of a character has no text, so that the token's name has to tell.

    Args:
        tokenizer: a transformers tokenizer; ``None``: there is none.
        text: the text of the token by itself.
    """
    if tokenizer is not None and REPLACEMENT in text:
        name = tokenizer.convert_ids_to_tokens(token)
        if isinstance(name, bytes):  # as tiktoken has them
            return name
        name = str(name)
        if byte := ONE_BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        if SHOWN_AS.keys() >= set(name):
            return bytes(SHOWN_AS[character] for character in name)
    return text.encode()


def decoder_of(
    tokenizer: Any, *, skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
) -> Callable[[list[int]], str]:
    """What ``tokenizer.decode`` gives, but for its clean-up, whose edits reach back into text that is already out.

    Transformers takes 3.1 us for a token, the tokenizer behind it 0.7.
    """
    if (backend := backend_of(tokenizer)) is not None:
        return partial(backend.decode, skip_special_tokens=skip_special_tokens)
    return lambda ids: tokenizer.decode(
        ids,
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
        clean_up_tokenization_spaces=False,
    )


class TokenTexts:
    """The text of each token as it is within a text, decoded once. (At the beginning some have a space less.)

    Args:
        tokenizer: a transformers tokenizer; ``None``: tokens have no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = None if tokenizer is None else decoder_of(tokenizer)
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str | None:
        if self._decode is None:
            return None
        text = self._known.get(token)
        if text is None:
            first, both = self._decode([token]), self._decode([token, token])
            text = self._known[token] = both[len(first) :] if both.startswith(first) else first
        return text


def _tells_nothing(token_id: int) -> str | None:
    return None


class IncrementalDetokenizer:
    """Follows one output, whose text is what ``tokenizer.decode`` of prompt and output has behind that of the prompt.

    Decoding is not additive (a token may be a third of a character, or drop the space before it), so each token is
    decoded behind those whose text came last. The text ends where a character may be unfinished; :meth:`finish` adds
    what is left of it.

    - If the prompt ends in a part of a character and the output completes it, the character belongs to the output.
    - Byte-fallback decoders make of a run of bytes a U+FFFD for each as soon as one of them is no text. Characters of
      the run before that one are out already and stay.

    ``tokenizers.DecodeStream`` says what most tokens add, in 0.5 us, where two decodes take 1.3 (the demo model's
    tokenizer). It says nothing as long as tokens end inside of a character, and on bytes that are no text; there this
    class decodes itself, as it does for tokenizers that have none of the library's behind them.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: the prompt.
        skip_special_tokens, spaces_between_special_tokens: as in :class:`SamplingParams`.

    Attributes:
        text: the text so far.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._backend, self._skip = backend_of(tokenizer), skip_special_tokens
        self._decode = decoder_of(
            tokenizer,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._context: list[int] = []  # the last tokens whose text is out
        self._before: str | None = ""  # what they decode to, if that is known
        self._pending: list[int] = []  # those behind them
        self._shown = 0  # characters of their text that are out
        self._length = 0  # of all of it, when it was last looked at
        self._of_prompt = 0  # so many U+FFFD to come are the prompt's, unless they become characters
        self.text = ""
        behind = self._take_context(prompt_token_ids)
        self._step = self._new_step()
        for token in behind:
            self.append(token)
        self._of_prompt, self.text = len(self._rest()), ""

    def append(self, token_id: int) -> str:
        """Add one token; returns the text it completes, often that of the token itself, possibly empty."""
        try:
            new = self._step(token_id)
        except Exception as error:  # tokenizers raises no narrower one
            if type(error) is not Exception:
                raise
            new, self._step = None, _tells_nothing  # the token makes something else of the bytes before it
        self._pending.append(token_id)
        if new and (new != " " or self._decode(self._pending)):  # see :meth:`_move_on`
            if self._shown:
                new, self._shown = new[self._shown :], 0
            self._context, self._before, self._pending = self._pending, None, []
        else:
            new = self._decoded()
        if self._of_prompt:
            return self._out(new)
        self.text += new
        return new

    def finish(self) -> str:
        """The output ends here. Returns what was kept back, as it might have become a character."""
        rest = self._rest()
        self._shown += len(rest)
        return self._out(rest)

    def _rest(self) -> str:
        """What is not out of the pending tokens' text."""
        return self._added(self._decode(self._pending))[self._shown :] if self._pending else ""

    def _new_step(self) -> Callable[[int], str | None]:
        """What to ask the library: what the pending tokens and one more add; ``None`` if it does not know."""
        if self._backend is None or (self._before or "").endswith(REPLACEMENT):  # it would add this once more
            return _tells_nothing
        from tokenizers.decoders import DecodeStream  # imported with the tokenizer already

        return partial(DecodeStream(ids=self._context, skip_special_tokens=self._skip).step, self._backend)

    def _decoded(self) -> str:
        """What the last token completes."""
        alone, waits = self._decode(self._pending), len(self._pending) < MOST_PENDING
        if waits and alone and alone in UNFINISHED:  # most often
            added, parts = alone, len(alone)
        else:
            added = self._added(alone)
            most = MOST_UNFINISHED + (not self._context)  # and a byte that was a space and is dropped
            parts = min(len(added) - len(added.rstrip(REPLACEMENT)), most)
        if len(self._pending) > 1 and len(added) < self._length:  # each byte was a U+FFFD, together they are one
            added, parts = self._added(alone), 0
        self._length = len(added)
        new = added[self._shown : len(added) - parts]
        self._shown += len(new)
        if added and not parts:
            self._move_on(alone)
        elif not waits:
            del self._pending[FIRST:-LAST]
            self._length = len(self._added(self._decode(self._pending)))
            self._shown = max(0, self._length - parts)
            self._step = _tells_nothing  # the stream would take all of them
        return new

    def _added(self, alone: str) -> str:
        """The text of the pending tokens, which is ``alone`` without those before them."""
        if self._before is None:
            self._before = self._decode(self._context)
        text, before = self._decode(self._context + self._pending), self._before
        added = text[len(before) :]
        # else they are bytes that make something else of those before them, whose text is out
        begins = text.startswith(before) and not (before.endswith(REPLACEMENT) and added.startswith(REPLACEMENT))
        return added if begins else alone

    def _move_on(self, alone: str) -> None:
        """The pending tokens become the context. It has text: a decoder that drops the first space drops no other."""
        tokens, start, before = self._context + self._pending, len(self._context), alone
        while not before and start:
            start -= 1
            before = self._decode(tokens[start:])
            if before.startswith(REPLACEMENT) and start:  # it begins inside of a character
                before = ""
        self._context, self._before, self._pending, self._shown = tokens[start:], before, [], 0
        self._step = self._new_step()

    def _take_context(self, prompt: Sequence[int]) -> Sequence[int]:
        """Find a short context at the prompt's end that has whole characters; returns the tokens behind it."""
        end, size, before = len(prompt), CONTEXT_TOKENS, ""
        while end:
            # a part of a character may have skipped tokens within
            for cut, more in product(range(LAST), range(MOST_UNFINISHED + 1)):
                tokens = list(prompt[max(0, end - cut - size - more) : max(0, end - cut)])
                before = self._decode(tokens)
                if not before:  # special tokens, which are skipped
                    break
                if REPLACEMENT not in (before[0], before[-1]):
                    self._context, self._before = tokens, before
                    return prompt[end - cut :]
            if size >= end or (before and size > CONTEXT_TOKENS):  # all tokens end inside of a character
                break
            size *= 4
        return prompt[-LAST:]

    def _out(self, new: str) -> str:
        """Add new text, but what the prompt has of it."""
        while self._of_prompt and new.startswith(REPLACEMENT):
            new, self._of_prompt = new[1:], self._of_prompt - 1
        if new:
            self._of_prompt = 0
        self.text += new
        return new


def find_stop(
    text: str, new_chars: int, stop: Sequence[str], begin: int = 0, end: int | None = None
) -> tuple[int, str] | None:
    """The earliest stop string that the last ``new_chars`` characters of ``text``, or of its part from ``begin`` to
    ``end``, complete.

    Returns:
        Where it begins, and which; ``None`` if there is none. Of two that begin together, the first in ``stop``.
    """
    best: tuple[int, str] | None = None
    end = len(text) if end is None else end
    for s in stop:
        at = text.find(s, max(begin, end - new_chars - len(s) + 1), end)
        if at >= 0 and (best is None or at < best[0]):
            best = at, s
    return best
