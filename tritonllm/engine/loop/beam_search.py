"""Beam search: the most likely continuations of a prompt, followed side by side.

It is the search of transformers (``generate(num_beams=...)``): of all continuations of the beams by one token the best
few times ``beam_width`` are looked at. The best that do not end go on; those that end, if they are among the first
``beam_width``, compete for the result (:class:`BeamSearchParams` says how and until when).

The beams are sequences of one request, siblings (:mod:`tritonllm.engine.schedule.gang`). A step gives each of them the
most likely next tokens. Once all have theirs, :class:`BeamSearch` decides, and the block tables follow: a beam with one
successor goes on in its place, another one forks, and the fork takes the place of a beam that has none. So no keys are
copied but those of a last block that is filled in part. The host has to know a step's results before it plans the next
one of a search; other requests are planned ahead as ever.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams
from tritonllm.engine.data.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.data.results import TokenLogprobs
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.text.detokenizer import IncrementalDetokenizer, TokenTexts
from tritonllm.engine.text.input_processor import InputProcessor, TokenizedPrompt
from tritonllm.engine.text.output_processor import RequestState, SequenceOutput


class Scores(NamedTuple):
    """The most likely next tokens of a sequence, best first, with their log-probabilities."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


NOTHING = Scores((), ())


@dataclass(eq=False, slots=True)  # a frozen one takes thrice as long to make
class Hypothesis:
    """A continuation of the prompt: its last token, what it continues, and the sum of its log-probabilities. It never
    changes.

    Attributes:
        scores: what its last token was chosen from.
    """

    parent: "Hypothesis | None" = None
    token: int = -1
    total: float = 0.0
    length: int = 0
    scores: Scores = NOTHING

    def path(self) -> list["Hypothesis"]:
        """The hypothesis of each of its tokens, in their order."""
        path, at = [], self
        while at.parent is not None:
            path.append(at)
            at = at.parent
        return path[::-1]


class BeamSearch:
    """Decides which hypotheses go on. Knows neither sequences nor blocks.

    Args:
        params: how to search.
        ends: tokens that end a hypothesis.
        most: new tokens at which one ends in any case.

    Attributes:
        running: hypotheses that go on, best first; none once the search is over.
        finished: the best that have ended, with their scores, best first.
    """

    def __init__(self, params: BeamSearchParams, ends: frozenset[int], most: int) -> None:
        self.params, self.ends, self.most = params, ends, most
        self.running = [Hypothesis()]
        self.finished: list[tuple[float, Hypothesis]] = []

    @staticmethod
    def candidates(beam_width: int, ends: frozenset[int]) -> int:
        """Continuations to look at: so many that ``beam_width`` of them go on, whichever end."""
        return max(2, 1 + len(ends)) * beam_width

    def advance(self, scores: Sequence[Scores]) -> list[int]:
        """Go on by one token.

        Args:
            scores: for each running hypothesis, its :meth:`candidates` most likely next tokens; equally many for all.

        Returns:
            For each of the new running hypotheses which of the old ones it continues; none if the search is over.
        """
        width, length = self.params.beam_width, self.running[0].length + 1
        parents, running, ended = list[int](), list[Hypothesis](), list[tuple[float, Hypothesis]]()
        for place, (total, parent, token) in enumerate(self._best(scores)):
            if place >= width == len(running):
                break
            ends = token in self.ends or length == self.most
            if ends and place >= width:
                continue
            new = Hypothesis(self.running[parent], token, total, length, scores[parent])
            if ends:
                ended.append((total / length**self.params.length_penalty, new))
            else:
                parents.append(parent)
                running.append(new)
        if ended:
            self.finished = sorted(self.finished + ended, key=lambda entry: -entry[0])[:width]
        if self._is_over(running, length):
            parents, running = [], []
        self.running = running
        return parents

    def _best(self, scores: Sequence[Scores]) -> Iterator[tuple[float, int, int]]:
        """The best continuations, the best first: their totals, which hypotheses they continue, and their tokens.

        Those of each hypothesis are in order, so only the first ones that are left are compared. Few are asked for: to
        sort all of them takes twice as long.
        """
        before = self.running
        heads = [hypothesis.total + mine.logprobs[0] for hypothesis, mine in zip(before, scores, strict=False)]
        taken = [0] * len(heads)
        for _ in range(self.candidates(self.params.beam_width, self.ends)):
            total = max(heads)
            parent = heads.index(total)  # among equals the first
            (tokens, logprobs), at = scores[parent], taken[parent]
            yield total, parent, tokens[at]
            taken[parent] = at = at + 1
            heads[parent] = before[parent].total + logprobs[at] if at < len(logprobs) else -math.inf

    def _is_over(self, running: Sequence[Hypothesis], length: int) -> bool:
        if not running:
            return True
        if len(self.finished) < self.params.beam_width:
            return False
        stopping, penalty = self.params.early_stopping, self.params.length_penalty
        if stopping is True or self.params.beam_width == 1:
            return True
        reached = self.most if stopping == "never" and penalty > 0 else length
        return running[0].total / reached**penalty <= self.finished[-1][0]


class Beam(SequenceOutput):
    """One of a search's sequences: what it outputs, and what its next token waits for
    (:class:`~tritonllm.engine.data.control.Control`)."""

    waits = True

    def __init__(self, index: int, request: Request, decide: Callable[[], None]) -> None:
        super().__init__(index, request, tokenizer=None)
        self._decide = decide
        self.scores = NOTHING

    def extend(self, tokens: Sequence[int], scores: TokenLogprobs | None, row: int) -> None:
        """Keep what the next token may be, and not what it would be for this sequence alone."""
        assert scores is not None  # its parameters ask for them
        self.scores = Scores(scores.token_ids[row][1:], scores.logprobs[row][1:])
        del self.request.output_token_ids[-len(tokens) :]
        status = self.request.status  # one that has lost its blocks since comes to this point again
        self.request.held = status is RequestStatus.RUNNING or status.is_finished

    def restricts(self, pending: int) -> bool:
        return False

    def take(self, tokens: Sequence[int]) -> None:
        self._decide()

    def mask(self) -> np.ndarray | None:
        return None

    def forced(self) -> Sequence[int]:
        return ()


@dataclass(kw_only=True)
class BeamState(RequestState):
    """A user's beam search.

    Attributes:
        search: the search, which says which hypotheses go on.
        places: the sequence of each hypothesis, by its index; all sequences are the prompt before the first is there.
        scheduler: lets sequences fork.
        words: the texts of candidates: there are many of them, and few different ones.
    """

    search: BeamSearch
    scheduler: Scheduler
    tokenizer: Any
    words: TokenTexts
    beams: list[Beam] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def decide(self) -> None:
        """Choose the next tokens if all sequences have theirs scored, and let the sequences go on or end."""
        for beam in self.beams:
            if not beam.request.held:
                return
        requests = [beam.request for beam in self.beams]
        parents = self.search.advance([self.beams[place].scores for place in self.places or [0]])
        if not parents:
            for request in requests:
                self.scheduler.abort(request.request_id)
            return
        wanted = [self.places[parent] for parent in parents] if self.places else list(range(len(parents)))
        unused = [place for place in range(len(requests)) if place not in wanted]
        self.places = []
        for parent, hypothesis in zip(wanted, self.search.running, strict=True):
            place = parent if parent not in self.places else unused.pop()
            self.places.append(place)
            request = requests[place]
            if place == parent:
                request.output_token_ids.append(hypothesis.token)
            else:  # behind its parent, which has gone on itself
                self.scheduler.fork(requests[parent], request)
                request.output_token_ids[:] = requests[parent].output_token_ids
                request.output_token_ids[-1] = hypothesis.token
            request.held = False

    def output(self) -> RequestOutput | PoolingRequestOutput | None:
        output = super().output()
        if isinstance(output, RequestOutput) and not self.search.running and self.error is None:
            best = [hypothesis for _, hypothesis in self.search.finished]
            known: dict[Hypothesis | None, dict[int, Logprob]] = {}
            output.outputs = [self._completion(index, hypothesis, known) for index, hypothesis in enumerate(best)]
        return output

    def _completion(
        self, index: int, hypothesis: Hypothesis, known: dict[Hypothesis | None, dict[int, Logprob]]
    ) -> CompletionOutput:
        """The output of one hypothesis that the search has found.

        Args:
            known: the log-probabilities of what may follow a hypothesis. Those that are found have most of their tokens
                in common: of 16 searches of 256 tokens these are 131,000 entries, which take 0.44 s to make.
        """
        path = hypothesis.path()
        stopped = hypothesis.token in self.search.ends
        return CompletionOutput(
            index=index,
            text=self._text([at.token for at in path], stopped),
            token_ids=[at.token for at in path],
            cumulative_logprob=hypothesis.total,
            logprobs=[self._logprobs(at, known) for at in path],
            finish_reason="stop" if stopped else "length",
        )

    def _text(self, tokens: Sequence[int], stopped: bool) -> str:
        if self.tokenizer is None:
            return ""
        follower = IncrementalDetokenizer(self.tokenizer, self.prompt_token_ids)
        for token in tokens[: len(tokens) - stopped]:
            follower.append(token)
        follower.finish()
        kept = stopped and self.search.params.include_stop_str_in_output
        return follower.text + (self.tokenizer.decode([tokens[-1]]) if kept else "")

    def _logprobs(self, at: Hypothesis, known: dict[Hypothesis | None, dict[int, Logprob]]) -> dict[int, Logprob]:
        """The log-probabilities that a hypothesis's last token was chosen from."""
        if at.parent not in known:
            pairs = enumerate(zip(*at.scores, strict=True), start=1)
            known[at.parent] = {token: Logprob(value, rank, self.words(token)) for rank, (token, value) in pairs}
        return known[at.parent].copy()


def beam_state(
    inputs: InputProcessor,
    scheduler: Scheduler,
    request_id: str,
    prompt: Prompt | TokenizedPrompt,
    params: BeamSearchParams,
    *,
    priority: int,
    arrival: int,
) -> BeamState:
    """A search that is about to begin.

    Raises:
        ValueError: a bad prompt, or a search that is too wide or too long for this engine.
    """
    ends = frozenset() if params.ignore_eos else inputs.eos_token_ids
    candidates = BeamSearch.candidates(params.beam_width, ends)
    _check_candidates(params, candidates, inputs.vocab_size)
    wishes = inputs.take_params(_sampling_params(params, candidates), of_user=False)
    tokenized = inputs.tokenize(prompt)
    requests = inputs.requests(request_id, tokenized, wishes, priority, arrival)
    length, longest = len(tokenized.token_ids), requests[0].max_total_tokens
    _check_room(scheduler, params.beam_width, length, longest)
    state = BeamState(
        request_id,
        tokenized.text,
        tokenized.token_ids,
        wishes,
        sequences=[],
        metrics=RequestMetrics(arrival_time=time.monotonic()),
        search=BeamSearch(params, ends, longest - length),
        scheduler=scheduler,
        tokenizer=inputs.tokenizer,
        words=inputs.words,
    )
    state.beams = [Beam(index, request, state.decide) for index, request in enumerate(requests)]
    for beam in state.beams:
        beam.request.controls = (beam,)
    state.sequences = [*state.beams]
    return state


def beam_search_output(output: RequestOutput, tokenizer: Any, *, keep_end: bool) -> BeamSearchOutput:
    """The output of a beam search in vLLM's form: a sequence is the prompt and its continuation.

    Args:
        keep_end: the text keeps the end-of-sequence token.
    """
    found = []
    for one in output.outputs:
        tokens = [*output.prompt_token_ids, *one.token_ids]
        shown = tokens[:-1] if one.finish_reason == "stop" and not keep_end else tokens
        sequence = BeamSearchSequence(
            tokens,
            list(one.logprobs or ()),
            cum_logprob=one.cumulative_logprob or 0.0,
            text=None if tokenizer is None else tokenizer.decode(shown),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
        )
        found.append(sequence)
    return BeamSearchOutput(found)


def _sampling_params(params: BeamSearchParams, candidates: int) -> SamplingParams:
    """What a search's sequences ask for."""
    return SamplingParams(
        n=params.beam_width,
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=True,
        logprobs=candidates,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _check_candidates(params: BeamSearchParams, candidates: int, vocab_size: int) -> None:
    """Check that a search of this width can have all the log-probabilities that it looks at.

    Raises:
        ValueError: a search that looks at so many continuations is too wide.
    """
    most = min(vocab_size, MAX_LOGPROBS)
    if candidates > most:
        raise ValueError(
            f"beam_width={params.beam_width} looks at the {candidates} most likely tokens, and at most {most} can be "
            f"had: use at most {most * params.beam_width // candidates}"
        )


def _check_room(scheduler: Scheduler, beam_width: int, length: int, longest: int) -> None:
    """Whether so many sequences of a prompt of ``length`` tokens can all run at once until they are ``longest``.

    Raises:
        ValueError: they cannot.
    """
    size, blocks, seats = scheduler.block_tokens, scheduler.pool.num_blocks, scheduler.config.max_num_seqs
    shared = length // size
    needed = shared + beam_width * (-(-longest // size) - shared + 1)
    if beam_width > seats:
        raise ValueError(f"beam_width={beam_width} needs max_num_seqs of at least as many, not {seats}")
    if needed > blocks:
        raise ValueError(
            f"beam_width={beam_width} and max_tokens={longest - length} after a prompt of {length} tokens may need "
            f"{needed} blocks of {size} tokens, but num_blocks is {blocks}: lower beam_width or max_tokens, or raise "
            "num_blocks"
        )
