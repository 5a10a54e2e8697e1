"""What somebody who takes an x-ray wants to see."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wishes:
    """What is to be shown.

    Attributes:
        steps: numbers of the steps, from 1; ``None``: the first with prompt tokens and the first without.
        attention: a layer, a head (``None``: the mean of all) and a file.
        lens: a position, which may count from the end, and a file.
        to_stderr: stdout has something else to say.
    """

    steps: tuple[int, ...] | None = None
    attention: tuple[int, int | None, Path] | None = None
    lens: tuple[int, Path] | None = None
    to_stderr: bool = False
