"""Tokens that can be read: what a token stands for, with blanks and line ends made visible."""

from collections.abc import Sequence
from typing import Any

from tritonllm.engine.text.detokenizer import REPLACEMENT
from tritonllm.teach.narrate.acts import Piece, Pieces

VISIBLE = {" ": "·", "\n": "↵", "\t": "⇥"}
SHOWN, TAIL = 32, 6  # of a prompt's tokens; and of these the last


def visible(text: str) -> str:
    """The text on one line, with nothing in it that a terminal would obey."""
    return "".join(
        VISIBLE.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode("ascii")) for c in text
    )


class TokenReader:
    """Makes readable texts of token ids.

    Args:
        tokenizer: the tokenizer of the model; ``None`` if there is none: a token is then its number.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def piece(self, token: int) -> Piece:
        return Piece(token, self._text(token))

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"#{token}"
        text = str(self._tokenizer.decode([token]))
        if REPLACEMENT in text:  # a part of a character; some tokenizers name its byte
            name = str(self._tokenizer.convert_ids_to_tokens(token))
            text = name if name.startswith("<0x") else REPLACEMENT
        return visible(text) or "∅"

    def text(self, tokens: Sequence[int]) -> str:
        """What several tokens say together, in quotes."""
        if self._tokenizer is None:
            return " ".join(f"#{token}" for token in tokens)
        return f"“{visible(str(self._tokenizer.decode(list(tokens))))}”"

    def pieces(self, tokens: Sequence[int]) -> Pieces:
        """All, or the first and last ones of many."""
        if len(tokens) <= SHOWN:
            return Pieces(tuple(map(self.piece, tokens)))
        head = SHOWN - TAIL
        kept = [*tokens[:head], *tokens[-TAIL:]]
        return Pieces(tuple(map(self.piece, kept)), head, len(tokens) - SHOWN)
