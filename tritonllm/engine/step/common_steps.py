"""What a step needs, and what the steps of all engines that take them together need (:mod:`tritonllm.dist.lockstep`).

Engines that share experts exchange the rows of a step, for which all must have equally much room. A captured step has
as much room as it has tokens, so all replay a graph of the same room: the smallest that holds what each of them needs.
If one of them cannot replay any, none does, and the room is what the largest step needs. Whoever has less to do pads,
which costs no time: it would wait for the others anyway, and padding is sent nowhere. No torch.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tritonllm.engine.data.step import Step


class Need(NamedTuple):
    """What decides which captured step holds a step.

    Attributes:
        decodes: how many sequences decode.
        tokens: how many tokens of prompts the step computes.
        chunks: how many sequences these tokens belong to.
        late: whether the step ends with the hidden states, and is drawn when the host has had its say.
        eager: whether no captured step can hold it.
        rows: how many tokens the step has, or rows that are sampled from, if these are more.
    """

    decodes: int = 0
    tokens: int = 0
    chunks: int = 0
    late: bool = False
    eager: bool = False
    rows: int = 0

    @classmethod
    def of(cls, step: Step, rows: int = 0) -> "Need":
        """The need of a step that is captured if there is room. Steps with drafts have rooms of their own.

        Args:
            rows: how many rows are sampled from, with padding.
        """
        decode, verify, chunk = step.segments
        eager = bool(verify.sequences or (chunk.tokens and (step.wants_all or step.shared is not None)))
        return cls(decode.sequences, chunk.tokens, chunk.sequences, step.late, eager, max(rows, step.segments.tokens))

    @classmethod
    def of_all(cls, needs: Iterable["Need"]) -> "Need":
        """The least that is enough for each of them."""
        return cls(*map(max, zip(*needs, strict=True)))


def room_for_rows(rows: int, most: int) -> int:
    """Room for the rows of a step that is not captured: a power of two, for which kernels are there since the start.

    Args:
        most: rows of the largest step.
    """
    return min(most, 1 << max(0, rows - 1).bit_length())
