"""A step as plain data: arrays and numbers that another process can run. No torch, no request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.engine.data.copy_batches import Fills, Transfers
from tritonllm.engine.data.edits import SeatEdits
from tritonllm.engine.data.pooled_spans import PooledSpan
from tritonllm.engine.data.step_inputs import StepInputs, StepRoom
from tritonllm.layers.segments import Segments


class SharedPrefix(NamedTuple):
    """Leading blocks that decodes have in common.

    Attributes:
        blocks: how many blocks they have in common.
        shares: ``[D]`` bool, which of the D decodes have them.
    """

    blocks: int
    shares: np.ndarray


class RowMasks(NamedTuple):
    """Tokens that may come next, of N of a step's rows.

    Attributes:
        rows: ``[N]`` int32.
        words: ``[N, ceil(V / 32)]`` int32: bit ``t % 32`` of word ``t // 32`` is of token t.
    """

    rows: np.ndarray
    words: np.ndarray


class RowProcessors(NamedTuple):
    """A request's own functions that change its logits.

    Attributes:
        row: the request's row among those of the step.
        request_id: the id of the request.
        functions: the functions, to call one after the other.
        prompt, output: the request's prompt and output token ids so far.
    """

    row: int
    request_id: str
    functions: Sequence[Callable[..., Any]]
    prompt: list[int]
    output: list[int]


class Restrictions(NamedTuple):
    """What the host lets come next in some rows of a step, which it knows when the results of the step before are in.

    Attributes:
        masks: bit masks of the rows whose next token is restricted; ``None`` if there are none.
        processors: functions of requests that change their logits.
    """

    masks: RowMasks | None = None
    processors: tuple[RowProcessors, ...] = ()


FREE = Restrictions()


class SeatedRequest(NamedTuple):
    """What processors of whole batches are told of a request that takes a seat, with its tokens so far."""

    seat: int
    request_id: str
    params: SamplingParams
    prompt: list[int]
    output: list[int]


class SeatTokens(NamedTuple):
    """The tokens of a request that takes a seat, for drafters that look back.

    Attributes:
        seat: the seat that the request takes.
        token_ids: the request's token ids, int32.
        past: the output of the request that had the seat before, if that has ended and the drafter remembers it.
    """

    seat: int
    token_ids: np.ndarray
    past: np.ndarray | None = None


class PromptSpan(NamedTuple):
    """Prompt tokens whose log-probabilities a request wants of this step.

    Attributes:
        request_id: the id of the request.
        first: the position of the first of these tokens in the prompt.
        row: the index of the step's token that predicts the first; the next token predicts the next one.
        token_ids: the ids of these prompt tokens.
        top: how many of the most likely tokens to report beside each; ``ALL`` for the whole vocabulary.
    """

    request_id: str
    first: int
    row: int
    token_ids: np.ndarray
    top: int


# What only the rank that draws needs of a step, and what the others have in its place.
OF_THE_FIRST: dict[str, Any] = {
    "admitted": (),
    "edited": None,
    "new_edits": (),
    "logprobs": None,
    "whole_logprobs": (),
}


@dataclass(frozen=True)
class Step:
    """What a device must know to run a step of B sequences and T tokens, of which R sequences are sampled from.

    Attributes:
        segments: how many sequences and tokens are decodes, verified sequences and chunks of prompts.
        inputs: the input arrays of the step, on the host.
        block_tables: ``[B, M]`` int32.
        samples: ``[B]`` bool, which sequences the rows belong to, in their order.
        parameters: what sampling wants of all seats, if a request is new to one.
        longest: keys of the longest decode, or the least that it can have where a step in flight decides; 0 for none.
        shared: what the decodes share; ``None`` if it does not pay.
        logprobs: how many of the most likely tokens to report with each new one; ``None`` if nobody asks.
        whole_logprobs: the rows that want the whole vocabulary.
        edited: ``[R]`` int32, the seats of those whose logits are edited, -1 for the others; ``None`` for nobody.
        new_edits: edits of logits that seats must be told of before the step.
        late: the host may have a say in some rows' tokens, and has it when the step is drawn (:class:`Restrictions`).
        admitted: requests that are new to their seats, if processors of whole batches want to know.
        prompt_spans: prompt tokens to report on.
        pooled: the tokens of prompts that are pooled.
        copies: ``[N, 2]`` int64, blocks and those that they are copied to before anything is written; ``None`` for
            none.
        tokens: the token ids of requests that are new to their seats, if a drafter wants to know.
        transfers: copies between the cache and the host's memory, before anything else; ``None`` for none.
        fills: blocks that are copied to the host's memory while the step computes them; ``None`` for none.
        limited: some rows draw from a part of the vocabulary only (``top_k``, ``top_p``, ``min_p``), or may, and ranks
            would need the whole row to find it.
        redrawn: what a captured step draws does not hold, for a reason that the step does not hold: processors of whole
            batches, or what only rank 0 is told.
    """

    segments: Segments
    inputs: StepInputs[np.ndarray]
    block_tables: np.ndarray
    samples: np.ndarray
    parameters: SamplingRows[np.ndarray] | None = None
    longest: int = 0
    shared: SharedPrefix | None = None
    logprobs: int | None = None
    whole_logprobs: tuple[int, ...] = ()
    edited: np.ndarray | None = None
    new_edits: tuple[SeatEdits, ...] = ()
    late: bool = False
    admitted: tuple[SeatedRequest, ...] = ()
    prompt_spans: tuple[PromptSpan, ...] = ()
    pooled: tuple[PooledSpan, ...] = ()
    copies: np.ndarray | None = None
    tokens: tuple[SeatTokens, ...] = ()
    transfers: Transfers | None = None
    fills: Fills | None = None
    limited: bool = True
    redrawn: bool = False

    def for_followers(self) -> "Step":
        """The step without what only the rank that draws needs."""
        return replace(self, redrawn=not self.plain, **OF_THE_FIRST)

    @property
    def wants_all(self) -> bool:
        """Hidden states of all its tokens are wanted, not only of those that are sampled from."""
        return bool(self.prompt_spans) or not all(span.in_row for span in self.pooled)

    @property
    def draws(self) -> bool:
        """Some of its rows become tokens; of the others only the hidden states are wanted."""
        return self.num_rows > (sum(span.row >= 0 for span in self.pooled) if self.pooled else 0)

    @property
    def num_rows(self) -> int:
        """R, the sequences that are sampled from."""
        return len(self.inputs.logit_rows)

    @property
    def room(self) -> StepRoom:
        """How much of everything it has, and so the least room that holds it."""
        return StepRoom(self.segments, self.num_rows)

    @property
    def all_sampled(self) -> bool:
        """The rows are the tokens, in their order. (Not so if some rows are of one token.)"""
        rows = self.inputs.logit_rows
        return len(rows) == self.segments.tokens and bool((rows == np.arange(len(rows))).all())

    @property
    def narrows(self) -> bool:
        """Unless it is captured, only the rows that are sampled from are computed to the end."""
        if self.wants_all or self.all_sampled or self.segments.verify.sequences:  # of drafts every token is sampled
            return False
        return self.num_rows < self.segments.tokens  # else many continuations of few tokens: the start has seen these

    @property
    def plain(self) -> bool:
        """The draw alone serves all of them: logits are neither edited nor reported."""
        return self.edited is None and self.logprobs is None and not self.redrawn

    @property
    def by_shards(self) -> bool:
        """Whether each rank's part of the logits suffices for its part of the draw: no row asks for more than a
        temperature and limits that ranks can find, and the tokens are not known to be restricted."""
        return self.plain and not (self.limited or self.late or self.segments.verify.sequences)
