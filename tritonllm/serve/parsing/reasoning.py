"""How families of models write thoughts; with gpt-oss's format, which holds calls, too."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tritonllm.serve.parsing.pieces import Arguments, Content, Piece, Reasoning, ToolCallBegin
from tritonllm.serve.parsing.source import PieceSource, Steps


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a family of models writes a thought, before its answer.

    Args:
        begin, end: the tags.
        begins: whether an answer begins with a thought where the prompt has not ended it: templates leave the first tag
            to the model, which may leave it out.
        opened: texts with which the prompt may end, besides ``begin``, if it has begun the thought.
        around: tags around the answer, which are no part of it.
        calls: texts that begin calls and so end a thought, too.
    """

    begin: str = "<think>"
    end: str = "</think>"
    begins: bool = False
    opened: tuple[str, ...] = ()
    around: tuple[str, str] | None = None
    calls: tuple[str, ...] = ()

    def is_inside(self, prompt: str) -> bool:
        """Whether the prompt has begun a thought."""
        prompt = prompt.rstrip()
        return not prompt.endswith(self.end) if self.begins else prompt.endswith((self.begin, *self.opened))


def think(text: PieceSource, form: Thoughts, inside: bool) -> Steps[None]:
    """A thought between tags and then the answer. Whitespace around the tags is nobody's.

    Args:
        form: the tags.
        inside: the thought has begun already, in the prompt.
    """
    if inside or (yield from text.ahead(form.begin))[1]:
        yield from text.accept(form.begin)
        yield from text.skip()
        rest, marker = yield from text.run(Reasoning, form.end, *form.calls)
        if not marker and rest.strip():
            yield Reasoning(rest)
        elif marker == form.end:
            yield from text.skip()
        else:
            text.text = marker + text.text
    if form.around is None:
        return
    begin, end = form.around
    if (yield from text.accept(begin)):
        yield from text.skip()
        rest, marker = yield from text.run(Content, end)
        if marker:
            yield from text.skip()
        elif rest.strip():
            yield Content(rest)


_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


def harmony(text: PieceSource) -> Steps[None]:
    """gpt-oss: messages ``<|channel|>NAME<|message|>...<|end|>``. The channel ``analysis`` holds thoughts, a message
    with a recipient (``to=functions.NAME``) is a call. The format is that of OpenAI's harmony guide; its own library
    reads token ids and fetches a vocabulary from the network at its first use, so it is not taken here."""
    calls = thoughts = 0
    while True:
        text.mark()
        if not (yield from text.skip()):
            return
        header = yield from text.until("<|message|>")
        if header is None:  # not in this format
            yield Content(text.taken)
            return
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        make: Callable[[str], Piece] = Content
        if recipient is not None:
            yield ToolCallBegin(calls, recipient[1].removeprefix("functions."))
            make = partial(Arguments, calls)
            calls += 1
        elif channel is not None and channel[1] == "analysis":
            if thoughts:
                yield Reasoning("\n")
            make = Reasoning
            thoughts += 1
        rest, marker = yield from text.run(make, *_ENDS, trim=False)
        if not marker and rest:
            yield make(rest)
