"""Which kernels suit a step's lengths: decided on the host, once a step, from lengths that it knows. No torch.

A launch may not depend on what the device alone knows, and must not depend on capacity where length decides: that 8
sequences of 16,000 keys had tables for 131,072 chose a kernel for few short ones, 12.9 ms a token in place of 7.3. So
the host names a regime by its bound, one of two numbers: decodes of so few keys that latency decides, or all others.
A captured step is captured once for each (the bound is a part of a graph's key), the warm-up visits both, and attention
finds the bound in its metadata. A launch then depends on the bound, the number of sequences and the model, and never on
how wide a step's block table happens to be.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tritonllm.layers.segments import Segments


@dataclass(frozen=True)
class Regimes:
    """The regimes of one engine's steps.

    Attributes:
        short_keys: returns up to how many keys each of so many decodes is short; 0 if they never are.
        max_model_len: the longest sequence that may come.
    """

    short_keys: Callable[[int], int]
    max_model_len: int

    def bound(self, room: Segments, longest: int) -> int:
        """What attention is told of the longest decode: the same number in all steps of a regime.

        Decodes beside prompts count as long: the prompts take so much more time that a second set of captured steps,
        for which the start would wait, does not pay.

        Args:
            room: the segments of a step, or of the captured step that has room for it.
            longest: keys of the longest decode: its length, or the least that it can be where a step in flight decides
                how many tokens it accepts.
        """
        short = self.short_keys(room.decode.sequences)
        return short if room.only_decodes and longest <= short else max(self.max_model_len, short + 1)

    def bounds(self, room: Segments) -> list[int]:
        """All that :meth:`bound` may say of it."""
        return sorted({self.bound(room, longest) for longest in (1, self.max_model_len)})
