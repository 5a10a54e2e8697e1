"""An answer as blocks, one after the other: thoughts, text, calls. That is how ``/v1/responses`` and ``/v1/messages``
send it."""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

from tritonllm.engine.data.outputs import CompletionOutput
from tritonllm.serve.api.answering import Outputs
from tritonllm.serve.api.replies import Usage
from tritonllm.serve.api.turn import ChatTurn
from tritonllm.serve.parsing.pieces import Piece, Reasoning, ToolCallBegin

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of an answer: a thought, text for the user, or a call of a tool.

    Args:
        kind: what ``text`` is: a thought, text for the user, or the arguments of a call.
        name, call_id: the name of the tool that is called, and the id of the call.
    """

    kind: Kind
    text: str = ""
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    index: int
    block: Block


@dataclass(frozen=True, slots=True)
class More:
    index: int
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class End:
    index: int
    block: Block


Change = Begin | More | End


@dataclass
class Blocks:
    """Puts the parts of an answer together as they come.

    Args:
        new_call_id: makes the id of a call of a function.
    """

    new_call_id: Callable[[str], str]
    all: list[Block] = field(default_factory=list)
    _open: bool = False

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def add(self, pieces: Iterable[Piece]) -> list[Change]:
        """What the pieces, which follow those before, change."""
        changes: list[Change] = []
        for piece in pieces:
            if isinstance(piece, ToolCallBegin):
                changes += self._begin(Block("call", name=piece.name, call_id=self.new_call_id(piece.name)))
                continue
            if isinstance(piece, Reasoning):
                kind: Kind = "reasoning"
            else:
                kind = "call" if hasattr(piece, "index") else "text"
            if not self._open or self.all[-1].kind != kind:
                changes += self._begin(Block(kind))
            self.all[-1].text += piece.text
            changes.append(More(len(self.all) - 1, self.all[-1], piece.text))
        return changes

    def _begin(self, block: Block) -> list[Change]:
        changes = self.close()
        self._open = True
        self.all.append(block)
        return [*changes, Begin(len(self.all) - 1, replace(block))]  # without what comes later

    def close(self) -> list[Change]:
        """The end of the last block."""
        was_open, self._open = self._open, False
        return [End(len(self.all) - 1, self.all[-1])] if was_open else []


async def follow(
    turn: ChatTurn, outputs: Outputs, usage: Usage, blocks: Blocks
) -> AsyncGenerator[tuple[list[Change], CompletionOutput], None]:
    """What each output of one answer changes, with that output; the last one is finished. ``usage`` counts along."""
    reader = turn.new_reader()
    async with aclosing(outputs):
        async for index, output in outputs:
            usage.add(index, output)
            (completion,) = output.outputs
            changes = blocks.add(reader.feed(completion.text))
            if completion.finished():
                changes += [*blocks.add(reader.finish()), *blocks.close()]
            yield changes, completion
