"""What a reader finds in the text of an answer, in pieces that can be sent at once."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The model speaks to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of a tool begins, the ``index``-th of the answer; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, which are JSON."""

    index: int
    text: str


Piece = Reasoning | Content | ToolCallBegin | Arguments


class AnswerReader(Protocol):
    """Reads one answer. However its text is cut, the pieces together say the same."""

    def feed(self, text: str) -> list[Piece]:
        """What more text brings; what may still turn out to be something else comes later."""
        ...

    def finish(self) -> list[Piece]:
        """What was kept back; nothing may be fed afterwards."""
        ...


@dataclass
class ToolCall:
    """A whole call of a tool."""

    name: str
    arguments: str = ""


@dataclass
class ParsedAnswer:
    """An answer, put together from its pieces."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> "ParsedAnswer":
        for piece in pieces:
            if isinstance(piece, Reasoning):
                self.reasoning += piece.text
            elif isinstance(piece, Content):
                self.content += piece.text
            elif isinstance(piece, ToolCallBegin):
                self.calls.append(ToolCall(piece.name))
            else:
                self.calls[piece.index].arguments += piece.text
        return self


class Plain:
    """Reads nothing out of the text."""

    def feed(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class ReaderChain:
    """What the first reader takes for content, the second one reads."""

    def __init__(self, first: AnswerReader, second: AnswerReader) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Piece]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Piece]:
        return self._pass_on(self._first.finish()) + self._second.finish()

    def _pass_on(self, pieces: list[Piece]) -> list[Piece]:
        passed: list[Piece] = []
        for piece in pieces:
            passed += self._second.feed(piece.text) if isinstance(piece, Content) else [piece]
        return passed


class FilteredReader:
    """Leaves out the pieces that ``keep`` refuses."""

    def __init__(self, reader: AnswerReader, keep: Callable[[Piece], bool]) -> None:
        self._reader, self._keep = reader, keep

    def feed(self, text: str) -> list[Piece]:
        return [piece for piece in self._reader.feed(text) if self._keep(piece)]

    def finish(self) -> list[Piece]:
        return [piece for piece in self._reader.finish() if self._keep(piece)]


def read(reader: AnswerReader, *texts: str) -> ParsedAnswer:
    """The whole answer whose text comes in these parts."""
    answer = ParsedAnswer()
    for text in texts:
        answer.add(reader.feed(text))
    return answer.add(reader.finish())
