"""How families of models write thoughts; with gpt-oss's format, which holds calls, too."""

import re
from collections.abc import Callable
from functools import partial

from tritonllm.serve.parsing.pieces import Arguments, Content, Piece, Reasoning, ToolCallBegin
from tritonllm.serve.parsing.source import PieceSource, Steps

START, END = "<think>", "</think>"


def think(text: PieceSource, inside: bool) -> Steps[None]:
    """``<think>...</think>`` and then the answer: Qwen3, DeepSeek. Whitespace around both tags is nobody's.

    Args:
        inside: the thought has begun already, in the prompt.
    """
    text.mark()
    begun = yield from text.accept(START)
    if not begun and not inside:
        return
    yield from text.skip()
    rest, marker = yield from text.run(Reasoning, END)
    if marker:
        yield from text.skip()
    elif rest.strip():
        yield Reasoning(rest)


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
