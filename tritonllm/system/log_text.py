"""Lines of a log, each of them one of ours: what a client sends can neither begin another nor write to a terminal."""

import logging
from types import TracebackType

OTHERS = ("uvicorn", "asyncio")  # loggers of what a server stands on, which may quote a client, too
MOST_CHARACTERS = 1000  # of a text that is quoted


def printable(text: str) -> str:
    """The text with line breaks, control characters (ANSI's sequences begin with one) and what turns the direction of
    writing as their escapes, and no longer than a log should quote."""
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}... ({len(text)} characters)"
    return _escaped(text)


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class OneLineFormatter(logging.Formatter):
    """Writes each message as one line, and a traceback below it, indented.

    Messages quote what comes from outside in more places than would be remembered one by one.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(ei).split("\n"))

    def formatStack(self, stack_info: str) -> str:
        return "\n".join(f"  {_escaped(line)}" for line in super().formatStack(stack_info).split("\n"))
