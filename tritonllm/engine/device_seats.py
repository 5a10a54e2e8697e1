"""What the device keeps of the requests that run, by seat, from step to step."""

import torch

from tritonllm.engine.inputs import Batch, host_bytes, views
from tritonllm.engine.step import PARAMETERS, SamplingParameters, arrays_in, spans_of
from tritonllm.kernels import advance_seats
from tritonllm.kernels.sampling.seat_state import Decodes, SamplingRows, SeatState, StepRows


class DeviceSeats:
    """Last tokens, positions and sampling parameters of the seats, and what the last step drew.

    Args:
        seats: most requests running at once.
        block_size: tokens of a block.
        device: where they are.

    Attributes:
        drawn: ``[seats]`` int64, the token of each row of the step that ran last.
    """

    def __init__(self, seats: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self.drawn = torch.zeros(seats, dtype=torch.int64, device=device)
        empty = torch.full((3, seats), -1, dtype=torch.int32, device=device)
        self._state = SeatState(*empty.unbind())
        self._spans, size = spans_of(PARAMETERS, dict.fromkeys(PARAMETERS, seats))
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._parameters = SamplingRows(**views(self._memory, self._spans))

    def tell(self, parameters: SamplingParameters) -> None:
        """Take the parameters of all seats, in one copy, without waiting for it."""
        host = host_bytes(len(self._memory), self._device)
        for name, array in arrays_in(host.numpy(), self._spans).items():
            array[:] = getattr(parameters, name)
        self._memory.copy_(host, non_blocking=True)

    def advance(self, batch: Batch) -> None:
        """Settle what the step before drew, and write into the batch what follows from its seats.

        Attention may read lengths and slots while the kernel before it still runs (``settled``). It may, for between it
        and this launch stands the embedding, an ordinary one that waits for the end of this.
        """
        inputs, metadata = batch.inputs, batch.metadata
        n = metadata.segments.decode.tokens
        if not len(inputs.seats) and not n:
            return
        rows = StepRows(inputs.seats, inputs.starts, inputs.logit_rows)
        places = inputs.positions[:n], inputs.slot_mapping[:n], inputs.seq_lens[:n]
        decodes = Decodes(inputs.input_ids[:n], *places, metadata.block_tables[:n])
        size = self._block_size
        advance_seats(self._state, self._parameters, rows, batch.rows, decodes, self.drawn, block_size=size)
