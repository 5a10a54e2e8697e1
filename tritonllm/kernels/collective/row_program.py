"""How many threads and registers a program has that handles one row, and waits for programs of other ranks."""

from typing import NamedTuple

import triton

MAX_WARPS = 16
REGISTERS = 65536  # of a processor


class RowProgram(NamedTuple):
    """What the row and the number of ranks decide.

    Attributes:
        columns: how many columns the row has, at least 1.
        size: the number of ranks.
    """

    columns: int
    size: int

    @property
    def block(self) -> int:
        """Elements that it handles at once: the columns, and more."""
        return triton.next_power_of_2(self.columns)

    @property
    def num_warps(self) -> int:
        """16 bytes a thread of 16-bit elements, as few rows want; a long row has several of them."""
        return max(1, min(MAX_WARPS, self.block // 256))

    @property
    def registers(self) -> int:
        """The most that a thread may have. Said to the compiler, which else spills some to fit more programs."""
        return REGISTERS // self._threads

    @property
    def on_processor(self) -> int:
        """How many of these programs run on a processor at the same time."""
        return self._threads // (32 * self.num_warps)

    @property
    def _threads(self) -> int:
        """How many threads run on a processor. Programs wait for those of other ranks, so all must run at the same
        time: there are registers for twice as many where each needs no more than 64."""
        return 1024 if self.block <= 4096 and self.size <= 4 else 512
