"""What the device keeps of the requests that run, by seat, from step to step."""

import numpy as np
import torch

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.engine.data.inputs import Batch, host_bytes, views
from tritonllm.engine.data.step_inputs import PARAMETERS, arrays_in, spans_of
from tritonllm.engine.drafts.drafters import DraftStep
from tritonllm.kernels import advance_seats
from tritonllm.kernels.sampling.seats import Decodes, SeatState, StepRows, Verdict

TIMES = 4  # int32 numbers before the drafts, which cross to the host with them


class DeviceSeats:
    """Last tokens, positions and sampling parameters of the seats, and what the last step drew.

    Args:
        seats: most requests running at once.
        block_tokens: tokens of a block, over all ranks.
        device: where they are.
        most_drafts: most drafts of a sequence; 0 if there never are any.
        history: how many tokens of each sequence are kept, for a drafter that looks back.

    Attributes:
        drawn: ``[seats]`` int64, the token of each row of the step that ran last.
        verdict: the tokens of each row of a step that verified drafts; ``None`` if none ever does.
        drafts: ``[seats, most_drafts]`` int32, the drafts that such a step verified, -1 behind them.
        times: ``[2]`` int64, of :func:`~tritonllm.kernels.speculative.clock.note_time`: what drafting has taken.
        history: ``[seats, history]`` int32, or ``None``.
    """

    def __init__(
        self, seats: int, block_tokens: int, device: torch.device, *, most_drafts: int = 0, history: int = 0
    ) -> None:
        self._block_tokens = block_tokens
        self._device = device
        self.drawn = torch.zeros(seats, dtype=torch.int64, device=device)
        self._drafted = torch.full((TIMES + seats * most_drafts,), -1, dtype=torch.int32, device=device)
        self.drafts = self._drafted[TIMES:].view(seats, most_drafts)
        self.times = self._drafted[:TIMES].view(torch.int64)
        self.times.zero_()
        self.verdict: Verdict | None = None
        if most_drafts:
            columns = torch.full((seats, most_drafts + 2), -1, dtype=torch.int64, device=device)
            self.verdict = Verdict(columns[:, 1:].contiguous(), columns[:, 0].contiguous())
        self.history = torch.zeros(seats, history, dtype=torch.int32, device=device) if history else None
        empty = torch.full((3, seats), -1, dtype=torch.int32, device=device)
        self._state = SeatState(*empty.unbind())
        self._spans, size = spans_of(PARAMETERS, dict.fromkeys(PARAMETERS, seats))
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._parameters = SamplingRows(**views(self._memory, self._spans))

    def tell(self, parameters: SamplingRows[np.ndarray]) -> None:
        """Take the parameters of all seats, in one copy, without waiting for it."""
        host = host_bytes(len(self._memory), self._device)
        for name, array in arrays_in(host.numpy(), self._spans).items():
            array[:] = getattr(parameters, name)
        self._memory.copy_(host, non_blocking=True)

    def tell_tokens(self, seat: int, tokens: torch.Tensor) -> None:
        """Take the tokens ``[N]`` int32 of a request that is new to a seat: behind the launch of its first step, which
        still settles what the seat's last request drew."""
        if self.history is not None:
            self.history[seat, : len(tokens)].copy_(tokens[: self.history.shape[1]])

    def draft_step(self, batch: Batch) -> DraftStep:
        """What a drafter is told of a step that verifies drafts of all its sequences, once it is settled."""
        inputs, count = batch.inputs, batch.metadata.segments.verify.sequences
        drafts = self.drafts[:count]
        return DraftStep(
            history=drafts[:, :0] if self.history is None else self.history,
            seats=inputs.seats,
            ends=inputs.starts,
            counts=inputs.drafts,
            ids=inputs.input_ids.view(count, -1),
            drafts=drafts,
            positions=inputs.positions.view(count, -1),
            sampling=batch.sampling(count),
            metadata=batch.metadata,
        )

    def set_aside(self) -> None:
        """Forget whose the rows of the step before are: :meth:`settle` says it when they are drawn, steps later."""
        self._state.row_seats.fill_(-1)

    def settle(self, seats: torch.Tensor) -> None:
        """Take in what was just drawn of rows that have been set aside.

        Args:
            seats: ``[seats]`` int32, whose the rows are; -1 for nobody's.
        """
        none, places = seats[:0], torch.empty(0, dtype=torch.int64, device=self._device)
        advance_seats(
            self._state._replace(row_seats=seats),
            self._parameters,
            StepRows(none, none, places),
            self._parameters.each(lambda column: column[:0]),
            Decodes(none, places, places, none, none.view(0, 1)),
            self.drawn,
            block_tokens=self._block_tokens,
            verdict=self.verdict,
            history=self.history,
        )

    def drafted(self, rows: int) -> torch.Tensor:
        """What a step with drafts of so many rows reports of them, for one copy: see :class:`RunningStep`."""
        return self._drafted[: TIMES + rows * self.drafts.shape[1]]

    def advance(self, batch: Batch) -> None:
        """Settle what the step before drew, and write into the batch what follows from its seats.

        Attention may read lengths and slots while the kernel before it still runs (``settled``). It may, for between it
        and this launch stands the embedding, an ordinary one that waits for the end of this.
        """
        inputs, metadata = batch.inputs, batch.metadata
        decode, verify, _ = metadata.segments
        n, count = decode.tokens + verify.tokens, decode.sequences + verify.sequences
        if not len(inputs.seats) and not n:
            return
        rows = StepRows(inputs.seats, inputs.starts, inputs.logit_rows)
        places = inputs.positions[:n], inputs.slot_mapping[:n], inputs.seq_lens[:count]
        decodes = Decodes(inputs.input_ids[:n], *places, metadata.block_tables[:count])
        advance_seats(
            *(self._state, self._parameters, rows, batch.rows, decodes, self.drawn),
            block_tokens=self._block_tokens,
            verdict=self.verdict,
            history=self.history,
            limits=None if self.verdict is None else inputs.limits,
            drafts=inputs.drafts if verify.sequences else None,
        )
