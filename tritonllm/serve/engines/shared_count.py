"""A number that several processes count up and down together."""

from collections.abc import MutableSequence


class SharedCount:
    """A count over several processes. Each process counts in a place of its own, so none waits for another. Two that
    compare the total with a limit at the same time may both go on where there was room for one.

    Args:
        places: a place for each process, in memory that they share; by default there is only this process.
        mine: the index of this process's place.
    """

    def __init__(self, places: MutableSequence[int] | None = None, mine: int = 0) -> None:
        self._places: MutableSequence[int] = [0] if places is None else places
        self._mine = mine

    @property
    def total(self) -> int:
        return sum(self._places)

    def add(self, change: int) -> None:
        self._places[self._mine] += change
