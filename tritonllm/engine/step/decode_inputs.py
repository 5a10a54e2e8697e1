"""The arrays of steps of decodes alone, which are most steps. No torch.

They are what :class:`~tritonllm.engine.step.builder.StepBuilder` would make of them beside a prompt. But the device
derives most of what it needs of a decode, so most of these arrays are the same in all steps of as many decodes, and a
small step's host time is that of the numpy calls that it takes, about 1 us each.
"""

from collections.abc import Sequence

import numpy as np

from tritonllm.engine.data.plan import ScheduledRequest
from tritonllm.engine.data.step_inputs import StepInputs


class DecodeInputs:
    """Makes the input arrays of decodes.

    Args:
        most: how many decodes a step may have.
    """

    def __init__(self, most: int) -> None:
        self._places = _fixed(np.zeros(most, dtype=np.int64))
        self._slots = _fixed(np.full(most, -1, dtype=np.int64))
        self._rows = _fixed(np.arange(most, dtype=np.int64))
        self._unknown = _fixed(np.full(most, -1, dtype=np.int32))
        self._first = _fixed(np.zeros(1, dtype=np.int32))
        self._yes = _fixed(np.ones(most, dtype=bool))

    def samples(self, count: int) -> np.ndarray:
        """``[count]`` bool: all are sampled from."""
        return self._yes[:count]

    def make(
        self,
        items: Sequence[ScheduledRequest],
        in_flight: Sequence[bool],
        ends: np.ndarray,
        seats: np.ndarray,
        limits: np.ndarray,
    ) -> StepInputs[np.ndarray]:
        """The arrays of so many decodes; some of them are of other steps, too, and cannot be written to.

        Args:
            items: the decodes.
            in_flight: for each decode, whether only the device knows its last token.
            ends, seats: for each decode its length and its seat, int64.
            limits: for each decode, how many of its positions may get a slot, int32.
        """
        n = len(items)
        input_ids = starts = self._unknown[:n]
        if not all(in_flight):
            ids = [
                -1 if flies else item.request.token(item.start) for item, flies in zip(items, in_flight, strict=True)
            ]
            input_ids = np.array(ids, dtype=np.int32)
            starts = np.where(in_flight, -1, ends - 1).astype(np.int32)
        seq_lens = ends.astype(np.int32)
        return StepInputs(
            positions=self._places[:n],
            slot_mapping=self._slots[:n],
            logit_rows=self._rows[:n],
            input_ids=input_ids,
            seq_lens=seq_lens,
            decode_order=np.argsort(-seq_lens, kind="stable").astype(np.int32),
            drafts=self._unknown[:0],
            verify_starts=self._first,
            cu_seqlens_q=self._first,
            seats=seats.astype(np.int32),
            starts=starts,
            limits=limits,
        )


def _fixed(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
