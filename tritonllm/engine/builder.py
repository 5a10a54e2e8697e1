"""From the scheduler's plan to a step as plain data. No torch."""

from collections.abc import Sequence

import numpy as np

from tritonllm.engine.edits import SeatEdits, edits_of
from tritonllm.engine.plan import ScheduledRequest, StepPlan
from tritonllm.engine.pooled_spans import pooled_spans, with_first_tokens
from tritonllm.engine.request import Request
from tritonllm.engine.seats import SeatTable
from tritonllm.engine.shared_prefix import CascadePlanner
from tritonllm.engine.step import PromptSpan, RowMasks, RowProcessors, SeatedRequest, Step, StepInputs


class StepBuilder:
    """Builds the steps of one engine, in the order in which they run.

    Args:
        seats: most requests running at once.
        max_blocks: blocks of the longest sequence.
        block_size: tokens of a block.
        planner: finds what decodes share; ``None`` does not look for it.
        tell_admitted: steps say which requests are new to their seats.
    """

    def __init__(
        self,
        seats: int,
        max_blocks: int,
        block_size: int,
        planner: CascadePlanner | None = None,
        tell_admitted: bool = False,
    ) -> None:
        self._tell_admitted = tell_admitted
        self.seats = SeatTable(seats, max_blocks)
        self._block_size = block_size
        self._planner = planner

    def build(self, plan: StepPlan) -> Step:
        """The step of a plan that is not empty.

        Raises:
            NotImplementedError: it has drafts, for which there is no runner yet.
        """
        if plan.segments.verify.sequences:
            raise NotImplementedError("a step with drafts to verify")
        items, seats, size, n = plan.scheduled, self.seats, self._block_size, plan.segments.decode.sequences
        requests, *columns = zip(*items, strict=True)
        starts, counts, samples, in_flight = map(np.array, columns[:4])
        at = seats.rows(requests)
        admitted = seats.take_admitted()
        ends, lasts = starts + counts, np.cumsum(counts)
        tables = seats.tables[at, : -(-int(ends.max()) // size)]
        input_ids = np.full(plan.num_tokens, -1, dtype=np.int32)
        for i in np.flatnonzero(~in_flight).tolist():  # the others are decodes, and the device knows them
            end = int(lasts[i])
            input_ids[end - items[i].num_tokens : end] = requests[i].token_ids(int(starts[i]), int(ends[i]))
        positions, slots = self._chunk_places(starts[n:], counts[n:], tables[n:], n)
        drawing = requests if samples.all() else [item.request for item in items if item.samples]
        rows, row_ends = at[samples], ends[samples]
        pooled = pooled_spans(items) if seats.pooled else ()
        seq_lens = ends.astype(np.int32)
        inputs = StepInputs(
            positions=positions,
            slot_mapping=slots,
            logit_rows=with_first_tokens(lasts[samples] - 1, pooled),
            input_ids=input_ids,
            seq_lens=seq_lens,
            decode_order=np.argsort(-seq_lens[:n], kind="stable").astype(np.int32),
            verify_starts=np.zeros(1, dtype=np.int32),
            cu_seqlens_q=np.concatenate(([0], np.cumsum(counts[n:]))).astype(np.int32),
            seats=rows.astype(np.int32),
            starts=np.where(in_flight[samples], -1, row_ends - 1).astype(np.int32),
        )
        logprobs = int(seats.logprobs[rows].max(initial=-1))
        edited, new_edits = self._edits(drawing, rows, row_ends)
        controlled = [(row, drawing[row]) for row in _rows_of(seats.controlled, rows)]
        return Step(
            plan.segments,
            inputs,
            tables,
            samples,
            parameters=seats.take_parameters(),
            longest=int(seq_lens[:n].max(initial=0)),
            shared=None if self._planner is None else self._planner.plan(tables[:n], seq_lens[:n]),
            logprobs=None if logprobs < 0 else logprobs,
            whole_logprobs=tuple(_rows_of(seats.whole_logprobs, rows)),
            edited=edited,
            new_edits=new_edits,
            masks=_masks(controlled),
            processors=_processors(controlled),
            admitted=tuple(map(_seated, admitted)) if self._tell_admitted else (),
            prompt_spans=_prompt_spans(items, n),
            pooled=pooled,
        )

    def _chunk_places(
        self, starts: np.ndarray, counts: np.ndarray, tables: np.ndarray, num_decodes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions and slots of all tokens, those of decodes left out: they stand first."""
        size, ends = self._block_size, np.cumsum(counts)
        total = num_decodes + int(counts.sum())
        positions, slots = np.zeros(total, dtype=np.int64), np.full(total, -1, dtype=np.int64)
        if len(counts):
            sequence = np.repeat(np.arange(len(counts)), counts)  # of each token
            mine = np.arange(total - num_decodes) - np.repeat(ends - counts - starts, counts)
            positions[num_decodes:] = mine
            slots[num_decodes:] = tables[sequence, mine // size].astype(np.int64) * size + mine % size
        return positions, slots

    def _edits(
        self, requests: Sequence[Request], rows: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray | None, tuple[SeatEdits, ...]]:
        """The seats of those whose logits this step edits, -1 for the others, and what the device must be told."""
        seats = self.seats
        edited = seats.edits[rows] | (ends < seats.edited_lens[rows])
        if not edited.any():
            return None, ()
        new = np.flatnonzero(edited & ~seats.edits_told[rows])
        seats.edits_told[rows[new]] = True
        told = tuple(edits_of(requests[i], int(rows[i])) for i in new.tolist())
        return np.where(edited, rows, -1).astype(np.int32), told


def _rows_of(some: set[int], rows: np.ndarray) -> list[int]:
    """The rows whose seats are among these."""
    return [row for row, seat in enumerate(rows.tolist()) if seat in some] if some else []


def _masks(controlled: Sequence[tuple[int, Request]]) -> RowMasks | None:
    """What the host lets come next in these rows."""
    found = [
        (row, mask)
        for row, request in controlled
        for control in request.controls
        if (mask := control.mask()) is not None
    ]
    if not found:
        return None
    at, masks = zip(*found, strict=True)
    return RowMasks(np.array(at, dtype=np.int32), np.stack(masks))


def _processors(controlled: Sequence[tuple[int, Request]]) -> tuple[RowProcessors, ...]:
    """The functions that these rows' requests brought."""
    return tuple(
        RowProcessors(
            row,
            request.request_id,
            request.params.logits_processors,
            list(request.prompt_token_ids),
            list(request.output_token_ids),
        )
        for row, request in controlled
        if request.params.logits_processors
    )


def _seated(request: Request) -> SeatedRequest:
    assert request.seat is not None  # it runs
    prompt, output = list(request.prompt_token_ids), list(request.output_token_ids)
    return SeatedRequest(request.seat, request.request_id, request.params, prompt, output)


def _prompt_spans(items: Sequence[ScheduledRequest], num_decodes: int) -> tuple[PromptSpan, ...]:
    """For each chunk whose request asks: the prompt tokens that follow the chunk's own."""
    spans = []
    row = num_decodes
    for item in items[num_decodes:]:
        first, top = item.start + 1, item.request.params.prompt_logprobs
        if top is not None:
            following = item.request.prompt_token_ids[first : first + item.num_tokens]
            if len(following):
                spans.append(PromptSpan(item.request.request_id, first, row, np.array(following, dtype=np.int64), top))
        row += item.num_tokens
    return tuple(spans)
