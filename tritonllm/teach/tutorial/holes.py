"""What stands in an exercise where the learner's work goes, and how its check says what is wrong.

An exercise is its solution with holes. In the solution's file a comment stands above the lines that are left to the
learner, ``# exercise: the line that stands there instead``, and one behind them, ``# until here``.
"""

import re
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


# Where the learner's lines begin, the line of the exercise, the lines of the solution, and where they end.
LEFT = re.compile(r"^( *)# exercise: (.*\n)((?:.*\n)*?) *# until here\n", re.MULTILINE)


def filled(text: str) -> str:
    """The solution, without the comments that tell where the holes are."""
    return LEFT.sub(r"\3", text)


def with_holes(text: str) -> str:
    """The exercise of a solution's file, with the import of :func:`hole`."""
    head, code = LEFT.sub(r"\1\2", text).split("\n\n\n", 1)  # behind the docstring and other imports
    return f"{head}\n\nfrom {__name__} import hole\n\n\n{code}"
