"""What stands in an exercise where the learner's work goes, and how its check says what is wrong."""

from typing import Any


class Unfilled(Exception):
    """A hole was reached."""


class Wrong(Exception):
    """The exercise runs, but its result is not right; the message tells the learner how it shows."""


def hole(what: str) -> Any:
    """Stands for an expression that is to be written: ``what`` it is.

    Raises:
        Unfilled: always.
    """
    raise Unfilled(what)
