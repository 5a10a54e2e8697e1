"""From the scheduler's plan to a step as plain data. No torch."""

from collections.abc import Sequence

import numpy as np

from tritonllm.engine.data.edits import SeatEdits, edits_of
from tritonllm.engine.data.plan import ScheduledRequest, StepPlan
from tritonllm.engine.data.pooled_spans import move_to_first_tokens, pooled_spans
from tritonllm.engine.data.request import PACKED, Request
from tritonllm.engine.data.step import PromptSpan, SeatedRequest, SeatTokens, SharedPrefix, Step
from tritonllm.engine.data.step_inputs import StepInputs
from tritonllm.engine.step.decode_inputs import DecodeInputs
from tritonllm.engine.step.seats import SeatTable
from tritonllm.engine.step.shared_prefix import CascadePlanner
from tritonllm.layers.segments import Segments, verified


class StepBuilder:
    """Builds the steps of one engine, in the order in which they run.

    Args:
        seats: most requests running at once.
        max_blocks: blocks of the longest sequence.
        block_tokens: tokens of a block, over all ranks.
        planner: finds what decodes share; ``None`` does not look for it.
        tell_admitted: steps say which requests are new to their seats.
        drafts: most drafts of a sequence; 0 if there never are any.
        tell_tokens: steps bring the tokens of requests that are new to their seats.
        tell_past: and the outputs of those that had the seats before.
        finds_limits: ranks draw rows with limits from their parts of the logits.
    """

    def __init__(
        self,
        seats: int,
        max_blocks: int,
        block_tokens: int,
        planner: CascadePlanner | None = None,
        tell_admitted: bool = False,
        drafts: int = 0,
        tell_tokens: bool = False,
        tell_past: bool = False,
        finds_limits: bool = False,
    ) -> None:
        self._before: dict[int, Request] | None = {} if tell_past else None  # who had a seat last
        self._tell_admitted, self._tell_tokens, self._drafts = tell_admitted, tell_tokens, drafts
        self.seats = SeatTable(seats, max_blocks)
        self._block_tokens = block_tokens
        self._planner, self._finds_limits = planner, finds_limits
        self._decodes = DecodeInputs(seats)

    def build(self, plan: StepPlan) -> Step:
        """The step of a plan that is not empty.

        If there are drafts, all sequences of the step are verified, with as many tokens each: those that have fewer
        drafts are padded. So a step has one of few shapes, each of which is captured.

        Raises:
            ValueError: a plan with drafts and with prompt chunks, or with more drafts than there may be.
        """
        items, seats, segments = plan.scheduled, self.seats, plan.segments
        n = segments.decode.sequences
        alone = n == len(items)  # decodes, each of which is sampled from
        requests, first, counts, sampled, in_flight, _ = zip(*items, strict=True)
        at = seats.rows(requests)
        admitted = seats.take_admitted()
        starts = np.array(first)
        samples, ends = (self._decodes.samples(n), starts + 1) if alone else (np.array(sampled), starts + counts)
        if segments.verify.sequences:
            if segments.chunk.sequences or segments.verify.longest > 1 + self._drafts:
                raise ValueError(
                    f"a step with drafts must have no prompt chunks, and at most {self._drafts} of a request"
                )
            segments, n = Segments(verify=verified(len(items), 1 + self._drafts)), 0
            ends = starts + 1
        longest = int(ends.max())
        tables = seats.tables[at, : self._width(requests, longest)]
        pooled = pooled_spans(items) if seats.pooled else ()
        drawing: Sequence[Request] = requests
        if alone:
            rows, row_ends = at, ends
            inputs = self._decodes.make(items, in_flight, ends, at, seats.limits[at])
        else:
            drawing = [item.request for item in items if item.samples]
            rows, row_ends = at[samples], ends[samples]
            inputs = self._inputs(segments, items, (starts, ends, samples, np.array(in_flight)), tables, rows)
            move_to_first_tokens(inputs.logit_rows, pooled)
            longest = int(ends[:n].max(initial=0))
        logprobs = int(seats.logprobs[rows].max(initial=-1)) if seats.reported else -1
        edited, new_edits = self._edits(drawing, rows, row_ends) if seats.edited else (None, ())
        return Step(
            segments,
            inputs,
            tables,
            samples,
            parameters=seats.take_parameters(),
            longest=longest,
            shared=self._shared_prefix(tables[:n], inputs.seq_lens[:n], longest),
            logprobs=None if logprobs < 0 else logprobs,
            whole_logprobs=tuple(_rows_of(seats.whole_logprobs, rows)),
            edited=edited,
            new_edits=new_edits,
            late=any(drawing[row].is_restricted for row in _rows_of(seats.controlled, rows)),
            admitted=tuple(map(_seated, admitted)) if self._tell_admitted else (),
            prompt_spans=_prompt_spans(items, n) if segments.chunk.sequences else (),
            pooled=pooled,
            copies=np.array(plan.copies, dtype=np.int64) if plan.copies else None,
            tokens=tuple(map(self._tokens, admitted)) if self._tell_tokens else (),
            transfers=plan.transfers,
            fills=plan.fills,
            limited=not self._finds_limits and bool(_rows_of(seats.limited, rows)),
        )

    def _width(self, requests: Sequence[Request], longest: int) -> int:
        """Blocks of a sequence that the step may read or write; ``longest``: tokens, as far as the host knows."""
        if not self._drafts:
            return -(-longest // self._block_tokens)
        # the device may be further, and what follows the last draft has no block
        behind = -(-self._drafts // self._block_tokens)
        return min(max(map(_num_blocks, requests)) + behind, self.seats.tables.shape[1])

    def _shared_prefix(self, tables: np.ndarray, seq_lens: np.ndarray, longest: int) -> SharedPrefix | None:
        """The prefix that decodes of at most ``longest`` tokens share; ``None`` if none is planned."""
        if self._planner is None or not self._planner.may_plan(len(tables), longest):
            return None
        return self._planner.plan(tables, seq_lens)

    def _tokens(self, request: Request) -> SeatTokens:
        seat, past = request.seat, None
        assert seat is not None  # it runs
        if self._before is not None:
            before = self._before.get(seat)
            if before is not None and before.status.is_finished:
                past = np.array(before.output_token_ids, dtype=np.int32)
            self._before[seat] = request
        return SeatTokens(seat, np.array(request.token_ids(0, request.num_tokens), dtype=np.int32), past)

    def _inputs(
        self,
        segments: Segments,
        items: Sequence[ScheduledRequest],
        columns: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        tables: np.ndarray,
        rows: np.ndarray,
    ) -> StepInputs[np.ndarray]:
        """The input arrays of a step.

        Args:
            items: the sequences of the step, each with its part of it.
            columns: for each sequence, where it starts and ends (exclusive, without drafts), whether it is sampled
                from, and whether only the device knows its last token.
            tables: the sequences' block tables.
            rows: the seats of the sequences that are sampled from.
        """
        starts, ends, samples, in_flight = columns
        n, each = segments.decode.sequences, max(1, segments.verify.longest)
        counts = (ends - starts) * each
        lasts = np.cumsum(counts)
        input_ids = np.full(segments.tokens, -1, dtype=np.int32)
        known = np.flatnonzero(~in_flight).tolist()  # the others are decodes, and the device knows them
        decodes = [i for i in known if i < n]
        if decodes:
            input_ids[decodes] = [items[i].request.token(items[i].start) for i in decodes]
        for i in known[len(decodes) :]:
            item, end = items[i], int(lasts[i])
            if each == 1:
                packed = item.request.packed(int(starts[i]), int(ends[i]))
                input_ids[end - item.num_tokens : end] = np.frombuffer(packed, dtype=PACKED)
            else:
                input_ids[end - each] = item.request.token_ids(int(starts[i]), int(ends[i]))[0]
        verify = segments.verify.sequences
        chunk = slice(n + verify, None)
        positions, slots = self._chunk_places(starts[chunk], counts[chunk], tables[chunk], n + verify * each)
        seq_lens = (ends + each - 1).astype(np.int32)
        return StepInputs(
            positions=positions,
            slot_mapping=slots,
            logit_rows=lasts[samples] - each,
            input_ids=input_ids,
            seq_lens=seq_lens,
            decode_order=np.argsort(-seq_lens[:n], kind="stable").astype(np.int32),
            drafts=np.array([item.drafts for item in items[n : n + verify]], dtype=np.int32),
            verify_starts=np.arange(verify + 1, dtype=np.int32) * np.int32(each),
            cu_seqlens_q=np.concatenate(([0], np.cumsum(counts[chunk]))).astype(np.int32),
            seats=rows.astype(np.int32),
            starts=np.where(in_flight[samples], -1, ends[samples] - 1).astype(np.int32),
            limits=self.seats.limits[rows],
        )

    def _chunk_places(
        self, starts: np.ndarray, counts: np.ndarray, tables: np.ndarray, num_decodes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Positions and slots of all tokens, those of decodes left out: they stand first."""
        size, ends = self._block_tokens, np.cumsum(counts)
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
        edited = ends < seats.edited_lens[rows]
        if not edited.any():
            return None, ()
        new = np.flatnonzero(edited & ~seats.edits_told[rows])
        seats.edits_told[rows[new]] = True
        told = tuple(edits_of(requests[i], int(rows[i])) for i in new.tolist())
        return np.where(edited, rows, -1).astype(np.int32), told


def _num_blocks(request: Request) -> int:
    return len(request.block_ids)


def _rows_of(some: set[int], rows: np.ndarray) -> list[int]:
    """The rows whose seats are among these."""
    return [row for row, seat in enumerate(rows.tolist()) if seat in some] if some else []


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
        if top is not None and item.request.reports_prompt:
            following = item.request.prompt_token_ids[first : first + item.num_tokens]
            if len(following):
                spans.append(PromptSpan(item.request.request_id, first, row, np.array(following, dtype=np.int64), top))
        row += item.num_tokens
    return tuple(spans)
