"""What a narration consists of, before any words: sentences by name, tokens, block tables, candidates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Mark = Literal["old", "new", "cached", "shared", "copied", "loaded"]
Kind = Literal["tokens", "step", "brief", "end", "totals", "reset"]


class Count(int):
    """A number that a sentence may inflect: ``{blocks:block/blocks}`` gives "1 block" and "5 blocks", and with ``~`` in
    front only the word: ``{blocks:~is/are}``."""

    def __format__(self, spec: str) -> str:
        if "/" not in spec:
            return super().__format__(spec)
        one, many = spec.removeprefix("~").split("/")
        word = one if self == 1 else many
        return word if spec.startswith("~") else f"{int(self):,} {word}"


class Share(float):
    """A probability, written in percent: as exact as it takes to see it."""

    def __format__(self, spec: str) -> str:
        percent = 100 * float(self)
        if percent in (0, 100):
            return f"{percent:.0f}%"
        if percent >= 99.95:
            return ">99.9%"
        if percent < 0.001:
            return "<0.001%"
        return f"{percent:.1f}%" if percent >= 0.1 else f"{percent:.2g}%"


@dataclass(frozen=True)
class Said:
    """A sentence of the narration.

    Attributes:
        key: the name of the sentence in a language's words.
        values: what stands at its placeholders: a text, a number, a list of them, or a part that has words itself.
        lesson: whether it explains what the others tell of, and is said once.
    """

    key: str
    values: Mapping[str, Any] = field(default_factory=dict)
    lesson: bool = False


class Piece(NamedTuple):
    """A token: its number, and what it stands for, made visible."""

    token: int
    text: str


@dataclass(frozen=True)
class Pieces:
    """A prompt's tokens, ``left_out`` of them after the first ``head``."""

    pieces: tuple[Piece, ...]
    head: int = 0
    left_out: int = 0


class Cell(NamedTuple):
    """A block in a table, and how it came there."""

    block: int
    mark: Mark


class TableRow(NamedTuple):
    """A sequence's block table, without ``left_out`` blocks after the first ``head``.

    Attributes:
        filled: tokens whose keys and values are in the blocks when the step has run.
        room: how many fit.
    """

    name: str
    cells: tuple[Cell, ...]
    head: int
    left_out: int
    filled: int
    room: int


@dataclass(frozen=True)
class BlockTables:
    rows: tuple[TableRow, ...]


class Bar(NamedTuple):
    """A candidate for the next token.

    Attributes:
        model: the probability that the model gives it.
        final: the probability with which it could be drawn; ``None`` where nobody knows.
        dropped_by: what took that away from it: the name of a stage of :mod:`~tritonllm.teach.narrate.filters`.
        drawn: whether it became the next token.
    """

    piece: Piece
    model: Share
    final: Share | None
    dropped_by: str | None
    drawn: bool


@dataclass(frozen=True)
class Bars:
    bars: tuple[Bar, ...]


Line = Said | Pieces | BlockTables | Bars


@dataclass(frozen=True)
class Act:
    """A part of the narration.

    Attributes:
        kind: what it is about.
        title: the title over it; ``None`` for a line that stands for itself.
        lines: the lines, in their order.
    """

    kind: Kind
    title: Said | None
    lines: tuple[Line, ...]
