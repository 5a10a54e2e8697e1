"""Where a rank receives what the others send: its inbox, a piece of its GPU's memory that all ranks write to.

Data is its own signal. An element that has not come yet is a negative zero, which nobody sends: who waits reads until
there is none left, so there are no flags, no barriers and no fences, and a sum takes as long as one write to another
GPU. (The Lamport protocol of NVIDIA's TensorRT-LLM, "Speed up Inference with Custom AllReduce", 2024; the sentinel is
theirs, too. NCCL's LL protocol sends a flag with each word instead.)

A program, number p of a launch, exchanges only with the programs of that number on the other ranks, through places of
their own, of which there are two sets; ``turns[p]`` says which one it takes, and it changes to the other with each
launch. What a program has read it empties at once. That suffices:

- A rank that is in launch n has received from all ranks in launch n - 1, so all have begun that one, and so have ended
  launch n - 2: each of them has emptied the places that launch n writes to.
- A rank can be ahead of another by one launch, whose places are those of the other set.

A rank's own part never travels. Its place in its own inbox, which would be free, is for a sum that it has made itself,
as the place of another rank is for a part or a sum from that one: a row has either parts or a sum to receive.

``tests/kernels/collective/test_inbox.py`` checks this in all orders in which ranks can take their steps. Launches must
not overlap on one rank (they are on one stream), and all ranks must launch the same sums.
"""

from typing import NamedTuple

import torch
import triton

from tritonllm.kernels.collective.row_program import RowProgram

# Bytes of one set of places, at most, where they are more than one a program; half an inbox. More rows than fit take
# several launches, of which each begins with an idle link and ends with one: 67 MB on two H200s take 217 us by 32 MiB,
# 199 by 128 and 196 by 512; 134 MB on four take 826, 734 and 699. This is what 8,192 rows of 4,096 of two ranks need.
CAPACITY = 160 << 20
ROWS = 8192  # of one launch, which have places if CAPACITY allows it: few steps have more
EMPTY = {2: -(2**15), 4: -(2**31)}  # a negative zero, as an integer of so many bytes


class InboxLayout(NamedTuple):
    """How an inbox is divided; the same on all ranks. In elements: ``[2, programs, slots, size, width]``, one place for
    what each rank sends of a row.

    Attributes:
        columns: how many columns a row has.
        dtype: the dtype of its elements; 16 or 32 bits.
        size: number of ranks.
        programs: how many programs a launch has at most. All of them fit on the GPU at once.
        slots: how many rows a program has room for.
    """

    columns: int
    dtype: torch.dtype
    size: int
    programs: int
    slots: int

    @property
    def width(self) -> int:
        """Elements from one row to the next: aligned for the widest loads."""
        return triton.cdiv(self.columns, 16) * 16

    @property
    def rows(self) -> int:
        """The most of one launch."""
        return self.programs * self.slots

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """How many bytes an inbox takes."""
        return 2 * self.rows * self.size * self.width * self.dtype.itemsize

    @property
    def program(self) -> RowProgram:
        """What handles a row."""
        return RowProgram(self.columns, self.size)

    @property
    def ahead(self) -> int:
        """Rows that a program sends before it waits for the first. One: the link is busy while it adds up, and the
        ranks stay close to each other. (64 MiB on two H100s: 225 us with none, 219 with one, 236 with two, 270 with
        four.) None where that would spill registers."""
        return int(self.program.block <= 8192 and self.size <= 4)


class PeerInbox(NamedTuple):
    """A rank's inbox, and the way to those of the others.

    Attributes:
        layout: the layout of all inboxes.
        rank: the rank whose inbox this is.
        links: ``[size + 1]`` int64, addresses: of each rank's inbox (``nbytes`` bytes, of which all elements are
            negative zeros at first), and of an int32 that is not zero once nobody shall wait any more. It may be in
            pinned memory of the host.
        turns: ``[programs]`` int32, zeros at first.
    """

    layout: InboxLayout
    rank: int
    links: torch.Tensor
    turns: torch.Tensor


def layout_for(columns: int, dtype: torch.dtype, size: int, processors: int) -> InboxLayout:
    """The layout for sums of ``[rows, columns]``.

    Args:
        processors: how many multiprocessors the GPU has.

    Raises:
        ValueError: the dtype is neither of 16 nor of 32 bits, or a row is too long for one program.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
    if not 1 <= columns <= 1 << 15:
        raise ValueError(f"columns must be from 1 to {1 << 15}, got {columns}")
    programs = processors * RowProgram(columns, size).on_processor
    fit = CAPACITY // (programs * size * columns * dtype.itemsize)
    slots = max(1, min(fit, triton.cdiv(ROWS, programs)))
    return InboxLayout(columns, dtype, size, programs, slots)
