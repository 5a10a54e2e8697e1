"""From hidden states to tokens: what of a step comes behind the model.

On several ranks each computes its columns of the logits. If no row wants more than a temperature, each draws from its
columns, and all take the best of these draws (:func:`~tritonllm.kernels.sample_shard`). Where ranks read each other's
memory, each then draws the rows with limits from all columns that can matter, wherever they lie
(:func:`~tritonllm.kernels.sample_limited_shards`). Otherwise the logits are gathered, rank 0 draws, and the others get
its tokens. Of two ranks with Llama-3.1-8B's vocabulary 256 rows gather 131 MB.

No rank overwrites logits that another still reads: it comes to the next ones only behind sums to which the other has
added its part, so behind that one's draw.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from tritonllm.config.sampling_params import ALL
from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.dist.group import Group, share_of
from tritonllm.dist.shared_rows import SharedRows, bytes_of
from tritonllm.engine.data.inputs import Batch, upload
from tritonllm.engine.data.results import LogprobTensors, PooledRows, RunningStep
from tritonllm.engine.data.step import FREE, Restrictions, Step
from tritonllm.engine.drafts.draft_tree import DraftTree
from tritonllm.engine.step.device_seats import TIMES, DeviceSeats
from tritonllm.engine.step.pooler import Pooler
from tritonllm.engine.step.room_sizes import graph_sizes, padded
from tritonllm.engine.step.sampler import Sampler
from tritonllm.kernels import best_of_shards, sample_limited_shards, sample_shard, token_logprobs
from tritonllm.models.decoder import Decoder
from tritonllm.models.interface import CausalLM

PROMPT_LOGPROB_ROWS = 256
MAX_SHARED_BYTES = 512 << 20  # of logits that other ranks read: 1,024 rows of half of Qwen3's vocabulary take 316 MB
WHOLE_LOGPROB_ROWS = 32  # where all of the vocabulary is reported: 28 bytes a token and row


class LaunchedStep(NamedTuple):
    """A step whose layers were launched, on this rank.

    Attributes:
        step: the step that was launched.
        batch: the arrays of the step on the device.
        hidden: the hidden states that it computes, ``[T, hidden]``, or with ``narrowed`` ``[R, hidden]``.
        tokens: the tokens that a graph has drawn; ``None`` if none were drawn yet.
        drafted: the drafts that it verifies (:meth:`DeviceSeats.drafted`); ``None`` if it verifies none.
        narrowed: whether only the rows that are sampled from are wanted.
        captured: whether the step was a graph, so that there may be padding.
    """

    step: Step
    batch: Batch
    hidden: torch.Tensor
    tokens: torch.Tensor | None
    drafted: torch.Tensor | None
    narrowed: bool
    captured: bool


class Outcome(NamedTuple):
    """What a step's tokens are drawn from, and what is made of its other hidden states.

    Attributes:
        hidden: the hidden states of the rows that are sampled from, and of padding.
        prompt_logprobs, pooled: see :class:`~tritonllm.engine.data.results.RunningStep`.
    """

    hidden: torch.Tensor
    prompt_logprobs: Iterable[tuple[str, int, LogprobTensors]]
    pooled: Sequence[PooledRows]


class Drawing:
    """Draws the tokens of steps.

    Args:
        model: the model, which computes the logits.
        seats: hold what is drawn, for the next step.
        sampler: draws the tokens.
        pooler: pools the prompts that are not continued.
        group: the ranks that share the model, or its first stage.
        device: the device that all of this is on.
        tree: the tree that drafts form; ``None`` for a chain.

    Attributes:
        by_shards: whether the ranks can draw from their own columns of the logits.
        finds_limits: whether they can do so for rows with ``top_k``, ``top_p`` or ``min_p``, too.
    """

    def __init__(
        self,
        model: CausalLM,
        seats: DeviceSeats,
        sampler: Sampler,
        pooler: Pooler,
        group: Group,
        device: torch.device,
        tree: DraftTree | None = None,
    ) -> None:
        self._tree, self._pooler = tree, pooler
        self._sampled = graph_sizes(len(seats.drawn))
        self._model, self._seats, self._sampler = model, seats, sampler
        self._group, self._device = group, device
        self.by_shards = isinstance(model, Decoder) and model.first_own_logit is not None
        self._shared = self._share_rows(len(seats.drawn)) if self.by_shards else None
        self.finds_limits = self._shared is not None

    def _share_rows(self, rows: int) -> SharedRows | None:
        """Memory for logits that all ranks read, if they can. Not of several stages: the first one draws for steps of
        which another has the sums, so a rank may be two draws further than another."""
        columns = share_of(self._model.spec.vocab_size, self._group.size)
        draws = isinstance(self._model, Decoder) and self._model.stage.first and self._model.stage.last
        return self._group.share_rows(rows, columns) if draws and bytes_of(rows, columns) <= MAX_SHARED_BYTES else None

    def warm_up(self, hidden: torch.Tensor) -> None:
        """``hidden[R, hidden]`` to logits, through every kernel that sampling from them may need; for warm-up."""
        if self._model.spec.logits:
            logits = self._model.compute_logits(hidden)
            if self._group.leads:
                self._sampler.warm_up(logits)
            if self.by_shards:
                numbers = torch.zeros(len(hidden), dtype=torch.int64, device=self._device)
                ones = torch.ones(len(hidden), dtype=torch.float32, device=self._device)
                self._draw_by_shards(hidden, SamplingRows(ones, numbers.int(), ones, ones, numbers, numbers), numbers)

    def warm_up_drafts(self, hidden: torch.Tensor) -> None:
        """As :meth:`warm_up`, with ``hidden[R (G + 1), hidden]`` of R sequences with G drafts each."""
        logits = self._model.compute_logits(hidden)
        if self._group.leads:
            self._sampler.warm_up_drafts(logits, self._seats.drafts[: len(hidden) // (1 + self._seats.drafts.shape[1])])

    def warm_up_scores(self, tokens: int) -> None:
        """Compute logits of as many rows as so many prompt tokens have at once in :meth:`prompt_logprobs`; for
        warm-up."""
        if self._model.spec.logits:
            rows = min(tokens, PROMPT_LOGPROB_ROWS)
            size = rows, self._model.spec.hidden_size
            self._model.compute_logits(torch.zeros(size, dtype=self._model.dtype, device=self._device))

    def draw_captured(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The tokens of a captured step of decodes, or of drafts to verify, with the hidden states ``[R, hidden]``."""
        verify = batch.metadata.segments.verify
        if batch.by_shards:
            return self._draw_by_shards(hidden, batch.sampling(len(hidden)), self._seats.drawn[: len(hidden)])
        logits, rows = self._model.compute_logits(hidden), verify.sequences or len(hidden)
        if self._group.leads:
            if verify.sequences:
                self._sampler.verify(logits, batch.sampling(rows), self._seats.drafts[:rows])
            else:
                self._sampler.draw(logits, batch.sampling(rows))
        return self._share_drawn(rows, verify.sequences > 0)

    def rows_of(self, step: Step) -> int:
        """Room for the rows that a step is sampled from."""
        return step.num_rows if step.segments.verify.sequences else padded(step.num_rows, self._sampled)

    def _outcome(self, launched: LaunchedStep) -> Outcome:
        step, rows = launched.step, launched.batch.inputs.logit_rows
        hidden = everything = launched.hidden
        verifies = step.segments.verify.sequences > 0
        prompt_logprobs: Iterable[tuple[str, int, LogprobTensors]] = ()
        if launched.captured:
            everything = hidden = hidden if verifies else hidden[: self.rows_of(step)]
        elif step.wants_all:
            prompt_logprobs = self.prompt_logprobs(step, everything)
            hidden = everything[rows]
        elif not (launched.narrowed or verifies or step.all_sampled):
            hidden = everything[rows]
        pooled: Sequence[PooledRows] = ()
        if step.pooled and self._group.leads:
            pooled = self._pooler.pool(step.pooled, hidden, everything if step.wants_all else None)
        return Outcome(hidden, prompt_logprobs, pooled)

    def finish(self, launched: LaunchedStep, late: Restrictions = FREE) -> tuple[RunningStep, torch.Tensor | None]:
        """Start what is left of a step.

        Args:
            late: what the host lets come next, if the step is late.

        Returns:
            The step, and its tokens on the device, if there are some.
        """
        step, batch, _, tokens, drafted, *_ = launched
        rows, drafts = step.num_rows, None
        if tokens is not None and step.plain and not (step.late or step.pooled):  # its graph has drawn all of it
            tokens = tokens[:rows]
            return RunningStep(step.samples, tokens, None, (), self._device, drafted=drafted), tokens
        hidden, prompt_logprobs, pooled = self._outcome(launched)
        logprobs = errors = None
        whole: Iterable[tuple[int, LogprobTensors]] = ()
        if drafted is not None:
            drafts = drafted[TIMES:].view(rows, -1)
        if rows and not step.draws:
            tokens = torch.zeros(rows, dtype=torch.int64, device=self._device)  # nobody reads them
        elif rows and tokens is None and self.by_shards and step.by_shards:
            tokens = self._draw_by_shards(hidden, batch.sampling(rows), self._seats.drawn[:rows])
        elif rows and (tokens is None or step.late or not step.plain):
            logits = self._model.compute_logits(hidden)[: rows if drafts is None else step.segments.tokens]
            if self._group.leads:
                sampling = batch.sampling(rows)
                drawn = (
                    self._sampler.sample(logits, sampling, step, late)
                    if drafts is None
                    else self._sampler.sample_drafts(logits, sampling, drafts, step, late)
                )
                _, logprobs, whole, errors = drawn
            tokens = self._share_drawn(rows, drafts is not None)
        tokens = None if tokens is None else tokens[:rows]
        scores = logprobs, prompt_logprobs
        running = RunningStep(step.samples, tokens, *scores, self._device, whole, errors, pooled, drafted)
        return running, tokens

    def _draw_by_shards(self, hidden: torch.Tensor, sampling: SamplingRows, out: torch.Tensor) -> torch.Tensor:
        """The tokens of rows, on every rank: of rows without limits, and where it ``finds_limits`` of all rows.

        Args:
            hidden: ``[R, hidden]``, and perhaps rows of padding.
            sampling: the sampling parameters of the R rows.
            out: ``[R]`` int64, where the tokens are written; returned.
        """
        assert isinstance(self._model, Decoder)  # its logits lie on several ranks
        first = self._model.first_own_logit
        assert first is not None  # in whole groups
        noise = sampling.temperature, sampling.seeds, sampling.steps
        if self._shared is None:
            logits = self._model.compute_own_logits(hidden)[: len(out)]
            return best_of_shards(self._group.stack(sample_shard(logits, *noise, first=first)), out=out)
        logits = self._model.compute_own_logits(hidden, self._shared.logits[: len(hidden)])[: len(out)]
        shared = self._shared.first(len(out))
        drawn = sample_shard(logits, *noise, first=first, found=shared.found)
        best_of_shards(self._group.stack(drawn), out=out)  # once that is there, all ranks have their logits
        where = {"rank_steps": shared.rank_steps, "vocab": self._model.spec.vocab_size, "out": out}
        return sample_limited_shards(shared.logits, *shared.found, *sampling, **where)

    def _share_drawn(self, rows: int, verified: bool) -> torch.Tensor:
        """What rank 0 has drawn of so many rows, on every rank: the next step reads it there.

        Returns:
            ``[rows]`` int64; of a step that ``verified`` drafts ``[rows, G + 1]``.
        """
        if not verified:
            return self._group.broadcast(self._seats.drawn[:rows])
        verdict = self._seats.verdict
        assert verdict is not None  # there are drafts
        if self._tree is not None:
            self._group.broadcast(self._tree.path[:rows])
        self._group.broadcast(verdict.accepted[:rows])
        return self._group.broadcast(verdict.ids[:rows])

    def prompt_logprobs(self, step: Step, hidden: torch.Tensor) -> Iterator[tuple[str, int, LogprobTensors]]:
        """The log-probabilities of prompt tokens, in parts, each computed when it is asked for."""
        for span in step.prompt_spans:
            rows = hidden[span.row : span.row + len(span.token_ids)]
            (chosen,) = upload([span.token_ids], self._device)
            size = WHOLE_LOGPROB_ROWS if span.top == ALL else PROMPT_LOGPROB_ROWS
            for part, ids in zip(rows.split(size), chosen.split(size), strict=True):
                logits = self._model.compute_logits(part)
                top = logits.shape[1] if span.top == ALL else span.top
                yield span.request_id, span.first, token_logprobs(logits, ids, top)
