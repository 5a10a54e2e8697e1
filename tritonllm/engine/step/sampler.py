"""Logits to token ids: what requests ask of the distribution, the draw, and log-probabilities.

Nothing here waits for the device. Results stay there until a :class:`~tritonllm.engine.data.results.RunningStep` is
read.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.engine.data.edits import MAX_BAD_WORD, MAX_ENTRIES, SeatEdits
from tritonllm.engine.data.inputs import upload
from tritonllm.engine.data.results import LogprobTensors
from tritonllm.engine.data.step import FREE, Restrictions, RowMasks, Step
from tritonllm.engine.drafts.draft_tree import DraftTree
from tritonllm.engine.step.processors import BatchProcessors, Errors, apply_to_rows
from tritonllm.engine.step.token_masks import upload_masks
from tritonllm.kernels import TokenMasks, rejection_sample, rejection_sample_tree, sample, token_logprobs
from tritonllm.kernels.sampling.edits import ALWAYS, Entry, LogitEdits, count_tokens, make_logit_edits, write_seat
from tritonllm.kernels.sampling.sample import drawn_log_weights
from tritonllm.kernels.sampling.seats import Verdict


class Drawn(NamedTuple):
    """What a step drew.

    Attributes:
        tokens: ``[R]`` int64, or ``[R, G]`` of a step with drafts, -1 behind those of a row; valid until the next draw.
        logprobs: log-probabilities under the model's own distribution, before edits, or under the one that was drawn
            from, if a request wants them.
        errors: what went wrong in requests' processors, by request id.
        whole: rows whose requests want the whole vocabulary, with those. Each is computed when it is asked for, before
            the next draw: one row takes 28 bytes a token of the vocabulary, and 256 at once would take a gigabyte.
    """

    tokens: torch.Tensor
    logprobs: LogprobTensors | None
    whole: Iterable[tuple[int, LogprobTensors]]
    errors: Errors


class Sampler:
    """Draws tokens, and keeps the edits of each seat on the device.

    Args:
        drawn: ``[seats]`` int64, where drawn token ids are written.
        vocab: the size of the vocabulary.
        processors: logits processors, which change the logits of whole steps.
        verdict: where the verdicts of steps with drafts are written; ``None`` if there never are any.
        tree: the tree that drafts form; ``None`` for a chain.
        reports_processed: log-probabilities are those of the distribution that is drawn from
            (``logprobs_mode="processed_logprobs"``); there are no drafts.
    """

    def __init__(
        self,
        drawn: torch.Tensor,
        vocab: int,
        processors: BatchProcessors | None = None,
        verdict: Verdict | None = None,
        tree: DraftTree | None = None,
        *,
        reports_processed: bool = False,
    ) -> None:
        self._reports_processed = reports_processed
        self._processors, self._tree = processors, tree
        self._drawn = drawn
        self._verdict = verdict
        rows = len(drawn) if verdict is None else verdict.ids.numel()
        self._workspace = torch.zeros(rows, dtype=torch.int32, device=drawn.device)
        self._no_rows = torch.full((len(drawn),), -1, dtype=torch.int32, device=drawn.device)
        self._rows = torch.arange(len(drawn), device=drawn.device)
        self._size = len(drawn), vocab
        self._state: LogitEdits | None = None

    def draw(self, logits: torch.Tensor, inputs: SamplingRows, masks: TokenMasks | None = None) -> torch.Tensor:
        """One token for each row of ``logits[R, V]`` float32 -> ``[R]`` int64, valid until the next draw. Can be
        captured in a graph."""
        return sample(logits, *inputs, masks=masks, workspace=self._workspace, out=self._drawn[: len(logits)])

    def _masks(self, masks: RowMasks | None, rows: int) -> TokenMasks | None:
        """The masks of ``rows`` rows, on the device; ``None`` if no row has one."""
        return None if masks is None else upload_masks(masks, rows, self._size[1], self._drawn.device)

    def _no_masks(self, rows: int) -> TokenMasks:
        """Masks of no row. Draws with edits always have masks, perhaps these: so they are compiled once, not twice."""
        return TokenMasks(self._no_rows[:rows], self._no_rows.new_empty(0, -(-self._size[1] // 32)))

    def verify(self, logits: torch.Tensor, inputs: SamplingRows, drafts: torch.Tensor) -> torch.Tensor:
        """The tokens of R rows with ``drafts[R, G]`` from ``logits[R (G + 1), V]`` float32 -> ``[R, G + 1]`` int64, -1
        behind those of a row, valid until the next time. Can be captured in a graph.

        A row draws at each place what it would have drawn without drafts, and a draft is accepted where it is that
        token. Drafts that were not drawn themselves are so accepted as often as any method allows.
        """
        assert self._verdict is not None  # there are drafts
        rows = len(drafts)
        out = self._verdict.ids[:rows], self._verdict.accepted[:rows]
        given = inputs._asdict() | {"workspace": self._workspace}
        logits = logits.view(rows, -1, logits.shape[1])
        if self._tree is not None:
            parents = self._tree.parents.expand(rows, -1)
            return rejection_sample_tree(drafts, parents, logits, **given, out=(*out, self._tree.path[:rows]))[0]
        return rejection_sample(drafts, None, logits, **given, out=out)[0]

    def sample_drafts(
        self, logits: torch.Tensor, inputs: SamplingRows, drafts: torch.Tensor, step: Step, late: Restrictions = FREE
    ) -> Drawn:
        """:meth:`verify`, whatever the R requests of a step ask for."""
        errors: Errors = {}
        batch = self._wanting(step)
        if step.edited is not None or late != FREE or batch is not None:
            tokens = self._verify_one_by_one(logits, inputs, drafts, step, late, errors)
        else:
            tokens = self.verify(logits, inputs, drafts)
        each = tokens.shape[1]
        flat = tokens.flatten()
        if self._tree is not None and step.logprobs is not None:
            logits = self._tree.rows_of(logits, len(tokens))
        logprobs = None if step.logprobs is None else token_logprobs(logits, flat.clamp_min(0), step.logprobs)
        vocab = logits.shape[1]
        firsts = [i * each for i in step.whole_logprobs]  # such requests have no drafts
        whole = ((i, token_logprobs(logits[i : i + 1], flat[i : i + 1], vocab)) for i in firsts)
        return Drawn(tokens, logprobs, whole, errors)

    def _verify_one_by_one(
        self,
        logits: torch.Tensor,
        inputs: SamplingRows,
        drafts: torch.Tensor,
        step: Step,
        late: Restrictions,
        errors: Errors,
    ) -> torch.Tensor:
        """What changes a token's logits depends on the tokens before it. So each row goes on, a token at a time, as
        long as its drafts are the tokens that it draws."""
        assert self._verdict is not None  # there are drafts
        rows, batch, tree = len(drafts), self._wanting(step), self._tree
        ids, accepted = self._verdict.ids[:rows], self._verdict.accepted[:rows]
        at = None  # which of a row's logits; of a chain those of the place
        if tree is not None:
            ids.fill_(-1)  # a tree may be less deep than there are columns
            at = tree.begin(rows)
        goes_on = torch.ones(rows, dtype=torch.bool, device=logits.device)
        accepted.fill_(-1)
        edits = seats = None
        if step.edited is not None:
            edits = self._told(step.new_edits)
            (seats,) = upload([step.edited], logits.device)
        for place in range((drafts.shape[1] if tree is None else tree.depth) + 1):
            of_rows = logits.view(rows, -1, logits.shape[1])
            # changes are made in place
            mine = of_rows[:, place].clone() if at is None else of_rows[self._rows[:rows], at]
            now = inputs._replace(steps=inputs.steps + place)
            if place == 0:  # requests with functions or masks of their own have no drafts
                errors |= apply_to_rows(mine, late.processors)
            if batch is not None:
                errors |= batch.apply(mine, now.steps, step, goes_on)
            more = {"masks": self._masks(late.masks, rows) if place == 0 else None, "workspace": self._workspace}
            if edits is None or seats is None:
                tokens = sample(mine, *now, **more)
            else:
                seats = torch.where(goes_on, seats, -1)
                more |= {"masks": more["masks"] or self._no_masks(rows), "edits": edits, "seats": seats}
                tokens = sample(mine, *now, **more)
                count_tokens(edits, seats, tokens)
            if batch is not None:
                batch.count(tokens, step, goes_on)
            ids[:, place] = torch.where(goes_on, tokens, -1)
            accepted += goes_on
            if tree is not None and at is not None:
                at, goes_on = tree.follow(place, at, tokens, drafts, goes_on)
            elif place < drafts.shape[1]:
                goes_on = goes_on & (tokens == drafts[:, place])
        return ids

    def _wanting(self, step: Step) -> BatchProcessors | None:
        """The processors of whole steps, if this one wants them."""
        return self._processors if self._processors is not None and self._processors.wanted(step) else None

    def sample(self, logits: torch.Tensor, inputs: SamplingRows, step: Step, late: Restrictions = FREE) -> Drawn:
        """One token for each row, whatever its request asks for.

        Args:
            logits: ``[R, V]`` float32; rows of requests that change them are overwritten.
            step: the step that the R rows belong to.
            late: the restrictions of the rows, which the host has just found.
        """
        batch = self._wanting(step)
        changed = step.edited is not None or late != FREE or batch is not None
        reports, processed = step.logprobs is not None, self._reports_processed
        raw = logits.clone() if changed and reports and not processed else logits  # changes are made in place
        errors = apply_to_rows(logits, late.processors)
        if batch is not None:
            errors |= batch.apply(logits, inputs.steps, step)
        masks = self._masks(late.masks, len(logits))  # in the draw, so that no processor allows what it bans
        edits = None if step.edited is None else self._told(step.new_edits)
        seats = None if step.edited is None else upload([step.edited], logits.device)[0]
        if reports and processed:
            raw = drawn_log_weights(logits, inputs, edits, seats, masks, limited=step.limited)
        if edits is not None and seats is not None:
            more = {"masks": masks or self._no_masks(len(logits)), "workspace": self._workspace}
            out = self._drawn[: len(logits)]
            tokens = sample(logits, *inputs, edits=edits, seats=seats, out=out, **more)
            count_tokens(edits, seats, tokens)
        else:
            tokens = self.draw(logits, inputs, masks)
        if batch is not None:
            batch.count(tokens, step)
        logprobs = None if step.logprobs is None else token_logprobs(raw, tokens, step.logprobs)
        vocab = logits.shape[1]
        whole = ((i, token_logprobs(raw[i : i + 1], tokens[i : i + 1], vocab)) for i in step.whole_logprobs)
        return Drawn(tokens, logprobs, whole, errors)

    def _told(self, new: tuple[SeatEdits, ...]) -> LogitEdits:
        """The state of all seats, these ones written. It takes no memory before a request needs it (then 2.25 bytes a
        seat and token)."""
        if self._state is None:
            self._state = _make_state(*self._size, self._drawn.device)
        for edits in new:
            entries = [
                Entry(entry.token, entry.value, ALWAYS if entry.until is None else entry.until, entry.after)
                for entry in edits.entries
            ]
            write_seat(
                self._state,
                edits.seat,
                prompt=edits.prompt,
                output=edits.output,
                repetition=edits.repetition,
                frequency=edits.frequency,
                presence=edits.presence,
                entries=entries,
                allowed=edits.allowed,
            )
        return self._state

    def warm_up(self, logits: torch.Tensor) -> None:
        """Run every kernel that a request may need on ``logits[R, V]``; changes nothing."""
        n, device = len(logits), logits.device
        index = torch.zeros(n, dtype=torch.int64, device=device)
        seats = torch.full((n,), -1, dtype=torch.int32, device=device)
        ones = torch.ones(n, dtype=torch.float32, device=device)
        edits = _make_state(1, logits.shape[1], device)
        limits = ones, seats + 51, 0.9 * ones, 0.1 * ones
        masks = {"masks": self._no_masks(n)}
        for more in ({}, masks, {"edits": edits, "seats": seats} | masks):
            tokens = sample(logits, *limits, index, index, workspace=self._workspace, **more)
        count_tokens(edits, seats, tokens)
        for top in (0, 5):
            token_logprobs(logits, tokens, top)

    def warm_up_drafts(self, logits: torch.Tensor, drafts: torch.Tensor) -> None:
        """Run every kernel that R requests with ``drafts[R, G]`` may need on ``logits[R (G + 1), V]``."""
        n, device = len(drafts), logits.device
        index = torch.zeros(n, dtype=torch.int64, device=device)
        ones = torch.ones(n, dtype=torch.float32, device=device)
        top_k = torch.zeros(n, dtype=torch.int32, device=device)
        self.verify(logits, SamplingRows(ones, top_k, ones, 0 * ones, index, index), drafts)
        self.warm_up(logits.view(n, -1, logits.shape[1])[:, 0].contiguous())
        for top in (0, 5):
            token_logprobs(logits, torch.zeros(len(logits), dtype=torch.int64, device=device), top)


def _make_state(seats: int, vocab: int, device: torch.device) -> LogitEdits:
    return make_logit_edits(seats, vocab, entries=MAX_ENTRIES, longest=MAX_BAD_WORD - 1, device=device)
