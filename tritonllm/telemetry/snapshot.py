"""What a dashboard shows at one moment, as plain data that can travel as JSON."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RequestState = Literal["waiting", "prefill", "decode", "verify", "preempted", "ended"]
# Of a cell of the grid: what most of its blocks are.
FREE, CACHED, USED, SHARED = ".", "c", "u", "s"
MOST_ROWS, MOST_CELLS, MOST_STEPS = 1000, 20_000, 512  # that anybody may ask for


@dataclass(frozen=True, slots=True)
class View:
    """How much a screen has room for.

    Args:
        first_row, rows: which requests, in the order of the list.
        cells: how many cells the grid has; more blocks are binned.
        steps: how many of the last steps.

    Raises:
        ValueError: a number is out of its range.
    """

    first_row: int = 0
    rows: int = 20
    cells: int = 400
    steps: int = 80

    def __post_init__(self) -> None:
        limits = {"first_row": (0, 10**9), "rows": (0, MOST_ROWS), "cells": (1, MOST_CELLS), "steps": (0, MOST_STEPS)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{name} must be an integer from {least} to {most}, got {value!r}")


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A request, as a line of the dashboard's list.

    Attributes:
        number: the place in the order of arrival, since the dashboard follows; it chooses the colour.
        sequences: how many the request has (``n``).
        computed_tokens: how many tokens were computed of a prompt, or of what is computed again.
        total_tokens: how many tokens have to be computed before the next new token.
        output_tokens: how many tokens all its sequences together have generated.
        most_output_tokens: how many tokens they have at most when they end; ``None``: nobody said.
        cached_tokens: how many tokens of its prompt the prefix cache had.
        preemptions: how often its sequences lost their blocks.
        blocks: how many blocks its sequences hold, shared ones counted once.
        reason: how the request ended, if it has.
    """

    request_id: str
    number: int
    state: RequestState
    sequences: int
    prompt_tokens: int
    computed_tokens: int
    total_tokens: int
    output_tokens: int
    most_output_tokens: int | None
    cached_tokens: int
    preemptions: int
    blocks: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StepColumn:
    """Tokens that a step computed: of sequences with one new token, of those with drafts, and of prompts."""

    step: int
    decode: int
    verify: int
    prefill: int
    preempted: int = 0

    @property
    def tokens(self) -> int:
        return self.decode + self.verify + self.prefill


@dataclass(frozen=True, slots=True)
class Cells:
    """The KV pool, in the order of its blocks.

    Attributes:
        blocks_per_cell: how many blocks stand in each cell; the last one may have fewer.
        kinds: for each cell what most of its blocks are: free, cached and free, used, or shared by several sequences.
        owners: the number of the request that has most of a cell's blocks; -1: nobody has any.
    """

    blocks_per_cell: int
    kinds: str
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals, and the load; ``None`` is not known.

    Attributes:
        query_tokens, hit_tokens: prompt tokens that were looked up in the prefix cache, and those that it had.
        used_blocks, shared_blocks: blocks with a user, and those with several.
        cached_blocks: blocks without a user whose contents can still be found.
        evicted_blocks: blocks whose cached contents were given up.
        drafts, accepted: guesses that were verified, and those that were right.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    num_blocks: int | None = None
    used_blocks: int = 0
    shared_blocks: int | None = None
    cached_blocks: int | None = None
    evicted_blocks: int | None = None
    drafts: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of an engine.

    Attributes:
        requests: the requests of the view; ``num_requests`` are in the list.
        steps: the last steps, oldest first.
        cells: ``None``: nobody told.
        used_part: the used part of the KV cache, 0 to 1.
        tokens_per_second, prompt_tokens_per_second: generated tokens, and computed tokens of prompts, of the last
            seconds.
        admission_end: why the last step took nobody else from the queue; empty before the first.
        note: what a person should know beside: what is missing and why.
    """

    counters: Counters = Counters()
    requests: tuple[RequestLine, ...] | None = ()
    num_requests: int = 0
    first_row: int = 0
    steps: tuple[StepColumn, ...] | None = ()
    cells: Cells | None = None
    used_part: float = 0.0
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    admission_end: str = ""
    note: str = field(default="")


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    return dataclasses.asdict(snapshot)


def from_json(values: Mapping[str, Any]) -> Snapshot:
    """Read a snapshot from what :func:`to_json` has made of one.

    Raises:
        ValueError: it is not a snapshot, or one of another version.
    """
    try:
        requests, steps, cells = values["requests"], values["steps"], values["cells"]
        return Snapshot(
            **{
                **values,
                "counters": Counters(**values["counters"]),
                "requests": None if requests is None else tuple(RequestLine(**line) for line in requests),
                "steps": None if steps is None else tuple(StepColumn(**column) for column in steps),
                "cells": None if cells is None else Cells(**{**cells, "owners": tuple(cells["owners"])}),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no snapshot of this version: {error}") from error
