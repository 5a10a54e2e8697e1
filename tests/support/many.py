"""A list that says how long it is and fails if it is looked at, for tests of limits: they come before any work."""

from typing import Any, NoReturn


class Many(list[Any]):
    """Args:
    count: of the entries, which are not there.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def _looked_at(self, *_: Any) -> NoReturn:
        raise AssertionError("it was looked at before it was counted")

    __iter__ = __getitem__ = __contains__ = _looked_at
