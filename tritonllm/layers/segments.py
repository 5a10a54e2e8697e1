"""A step's sequences in three segments, by what attention does with them. No torch.

They lie one after the other, in this order, and so do their tokens:

- decode: one token each, sampled from;
- verify: a last token and the drafts behind it, each of which is sampled from;
- chunk: a part of a prompt, of which at most the last token is sampled from.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """The sequences and tokens of one kind in a step.

    Attributes:
        sequences: how many sequences there are.
        tokens: how many tokens all of them have together.
        longest: no sequence has more tokens in the step.
    """

    sequences: int = 0
    tokens: int = 0
    longest: int = 0


EMPTY = Segment()


@dataclass(frozen=True, slots=True)
class Segments:
    """What a step holds, or has room for."""

    decode: Segment = EMPTY
    verify: Segment = EMPTY
    chunk: Segment = EMPTY

    def __iter__(self) -> Iterator[Segment]:
        yield self.decode
        yield self.verify
        yield self.chunk

    @property
    def sequences(self) -> int:
        return self.decode.sequences + self.verify.sequences + self.chunk.sequences

    @property
    def tokens(self) -> int:
        return self.decode.tokens + self.verify.tokens + self.chunk.tokens

    @property
    def only_decodes(self) -> bool:
        """Whether every token belongs to a decode."""
        return not (self.verify.tokens or self.chunk.tokens)


def decodes(count: int) -> Segment:
    return Segment(count, count, 1) if count else EMPTY


def verified(count: int, tokens: int) -> Segment:
    """Sequences of so many tokens each: the last known one and drafts."""
    return Segment(count, count * tokens, tokens) if count else EMPTY
