"""The arrays of a step's inputs, and how they lie in memory.

:class:`StepInputs` is the one place that says what a step's inputs are: their names, their dtypes, what they have one
entry of, and what stands in their padding. The host's arrays, the buffers that captured steps read, the copy from the
one to the other and the steps of the warm-up are all made from it.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from tritonllm.config.sampling_rows import DTYPES, NEUTRAL
from tritonllm.layers.segments import Segment, Segments

ALIGNMENT = 16  # bytes: kernels are compiled for pointers that are multiples of it
MOST_PADDING = 128  # tokens of a chunk that is only padding: its attention's cost grows with their square
Array = TypeVar("Array")  # np.ndarray on the host, torch.Tensor on the device


class Per(enum.Enum):
    """What an array has one entry of. The tokens of a step lie segment by segment, and so do its sequences."""

    TOKEN = enum.auto()
    SEQUENCE = enum.auto()
    DECODE = enum.auto()
    VERIFY = enum.auto()  # each verified sequence
    VERIFY_START = enum.auto()  # each verified sequence, and one more
    CHUNK_START = enum.auto()  # each prompt chunk, and one more
    ROW = enum.auto()  # each sequence that is sampled from
    SEAT = enum.auto()  # each request that may run at once


class Column(NamedTuple):
    """How a field of :class:`StepInputs` is laid out.

    Attributes:
        dtype: the dtype of the array.
        per: what the array has one entry for: a token, a sequence, a row, ...
        padding: the value of the entries behind a step that is smaller than the room for it.
    """

    dtype: np.dtype
    per: Per
    padding: float


def _column(dtype: type, per: Per, padding: float = 0) -> dict[str, Column]:
    return {"column": Column(np.dtype(dtype), per, padding)}


@dataclass(frozen=True)
class StepInputs(Generic[Array]):
    """The inputs of one forward pass and of the draw that follows it.

    Of decodes the host sends what it decides; the device derives the rest from their seats
    (:func:`~tritonllm.kernels.advance_seats`), and so it does of verified sequences, which are decodes with drafts.

    Attributes:
        input_ids: -1 for a decode whose last token only the device knows, and for drafts that the device makes.
        positions: each token's place in its sequence; of decodes derived.
        slot_mapping: where its key and value go; of decodes derived.
        logit_rows: the tokens that are sampled from, in their order; of a verified sequence the first one.
        seats: the seats of the sequences.
        starts: the position of each sequence's first token; -1 for a decode of which only the device knows it.
        limits: how many positions of a decode may get a slot; the device may be further than the host knows.
        seq_lens: keys of a sequence, this step's tokens included; of decodes at least so many, and derived.
        decode_order: the decodes from the longest to the shortest.
        drafts: how many a verified sequence may have.
        verify_starts, cu_seqlens_q: see :class:`~tritonllm.layers.metadata.AttentionMetadata`.
    """

    positions: Array = field(metadata=_column(np.int64, Per.TOKEN))
    slot_mapping: Array = field(metadata=_column(np.int64, Per.TOKEN, padding=-1))
    logit_rows: Array = field(metadata=_column(np.int64, Per.ROW))
    input_ids: Array = field(metadata=_column(np.int32, Per.TOKEN))
    seq_lens: Array = field(metadata=_column(np.int32, Per.SEQUENCE))
    decode_order: Array = field(metadata=_column(np.int32, Per.DECODE))
    drafts: Array = field(metadata=_column(np.int32, Per.VERIFY))
    verify_starts: Array = field(metadata=_column(np.int32, Per.VERIFY_START))
    cu_seqlens_q: Array = field(metadata=_column(np.int32, Per.CHUNK_START))
    seats: Array = field(metadata=_column(np.int32, Per.ROW, padding=-1))
    starts: Array = field(metadata=_column(np.int32, Per.ROW, padding=-1))
    limits: Array = field(metadata=_column(np.int32, Per.ROW, padding=1))


COLUMNS: Mapping[str, Column] = {f.name: f.metadata["column"] for f in fields(StepInputs)}
_arrays_of = attrgetter(*COLUMNS)  # of a step
PARAMETERS: Mapping[str, Column] = {
    name: Column(np.dtype(dtype), Per.SEAT, NEUTRAL.get(name, 0)) for name, dtype in DTYPES.items()
}


class StepRoom(NamedTuple):
    """How much of everything a step has, or a captured step has room for.

    Attributes:
        segments: sequences and tokens.
        rows: sequences that are sampled from.
    """

    segments: Segments
    rows: int

    def count(self, per: Per) -> int:
        """Entries of an array."""
        segments = self.segments
        return {
            Per.TOKEN: segments.tokens,
            Per.SEQUENCE: segments.sequences,
            Per.DECODE: segments.decode.sequences,
            Per.VERIFY: segments.verify.sequences,
            Per.VERIFY_START: segments.verify.sequences + 1,
            Per.CHUNK_START: segments.chunk.sequences + 1,
            Per.ROW: self.rows,
        }[per]


class Span(NamedTuple):
    """Bytes ``start`` to ``end`` (exclusive) of a piece of memory, as numbers of a dtype."""

    start: int
    end: int
    dtype: np.dtype


def spans_of(columns: Mapping[str, Column], counts: Mapping[str, int], begin: int = 0) -> tuple[dict[str, Span], int]:
    """Where arrays with so many entries lie in one piece of memory from ``begin`` on, and where they end."""
    spans = {}
    for name, column in columns.items():
        end = begin + counts[name] * column.dtype.itemsize
        spans[name] = Span(begin, end, column.dtype)
        begin = -(-end // ALIGNMENT) * ALIGNMENT
    return spans, begin


def arrays_in(memory: np.ndarray, spans: Mapping[str, Span]) -> dict[str, np.ndarray]:
    """The arrays in ``memory`` uint8."""
    return {name: memory[at:end].view(dtype) for name, (at, end, dtype) in spans.items()}


class StepLayout:
    """Where the arrays of a step lie in one piece of memory, so that one copy takes them all.

    Attributes:
        spans: where each array of :class:`StepInputs` lies in the memory.
        sent: how many bytes these arrays take, which are sent from the host.
        row_spans: where each column of the rows' sampling parameters lies, which the device makes.
        num_bytes: how many bytes all of them take.
    """

    def __init__(self, room: StepRoom) -> None:
        self.spans, self.sent = spans_of(COLUMNS, {name: room.count(column.per) for name, column in COLUMNS.items()})
        rows = dict.fromkeys(PARAMETERS, room.rows)
        self.row_spans, self.num_bytes = spans_of(PARAMETERS, rows, self.sent)

    def arrays(self, memory: np.ndarray) -> StepInputs[np.ndarray]:
        """What is sent, in ``memory[sent]`` uint8."""
        return StepInputs(**arrays_in(memory, self.spans))


@lru_cache(maxsize=256)  # of captured steps; others come in all sizes
def layout_of(room: StepRoom) -> StepLayout:
    return StepLayout(room)


def place(inputs: StepInputs[np.ndarray], own: StepRoom, into: StepInputs[np.ndarray], room: StepRoom) -> None:
    """Write every element of the arrays of a step that has ``own`` into a ``room`` that holds as much: each segment,
    and padding up to the next.

    The padded prompt tokens are dealt out to chunks that are not there, at least one: they read whatever lies in
    block 0 and store nothing, so every row of the step is an ordinary, finite one. So are padded drafts dealt out. A
    padded decode has length 0.
    """
    have, rows = own
    exact = have == room.segments
    at_once = exact or room.segments.only_decodes  # all segments but one are empty
    for values, out, column in zip(_arrays_of(inputs), _arrays_of(into), COLUMNS.values(), strict=True):
        count = len(values)
        if count == len(out):
            out[:] = values
        elif at_once or column.per not in (Per.TOKEN, Per.SEQUENCE):
            out[:count] = values
            out[count:] = column.padding
        elif column.per is Per.TOKEN:
            _spread(values, out, column.padding, [s.tokens for s in have], [s.tokens for s in room.segments])
        else:
            _spread(values, out, column.padding, [s.sequences for s in have], [s.sequences for s in room.segments])
    if exact:
        return
    n, held = have.decode.sequences, room.segments.decode.sequences
    into.decode_order[n:] = np.arange(n, held)
    _, verify, chunk = room.segments
    if verify.tokens or chunk.tokens:
        into.logit_rows[:rows] = _moved(inputs.logit_rows, have, room.segments)
        lens = into.seq_lens[held:]
        _deal_out(into.verify_starts, lens[: verify.sequences], have.verify, verify)
        _deal_out(into.cu_seqlens_q, lens[verify.sequences :], have.chunk, chunk)


def _spread(values: np.ndarray, out: np.ndarray, padding: float, have: list[int], room: list[int]) -> None:
    """Copy each segment's values, so many, into the room for them, with padding behind."""
    at = begin = 0
    for count, held in zip(have, room, strict=True):
        if held:
            out[begin : begin + count] = values[at : at + count]
            out[begin + count : begin + held] = padding
        at, begin = at + count, begin + held


def _moved(tokens: np.ndarray, have: Segments, room: Segments) -> np.ndarray:
    """Where tokens of a step lie in a larger one."""
    drafts = room.decode.tokens - have.decode.tokens
    chunks = drafts + room.verify.tokens - have.verify.tokens
    behind = tokens >= have.decode.tokens + have.verify.tokens
    return tokens + np.where(behind, chunks, np.where(tokens >= have.decode.tokens, drafts, 0))


def _deal_out(starts: np.ndarray, lens: np.ndarray, have: Segment, room: Segment) -> None:
    """Give the padding's tokens of a segment to as few of the padding's sequences as there should be: kernels take each
    for work of its own (a program of prefill attention, and keys are shared out among those that are left)."""
    count, padding = have.sequences, room.tokens - have.tokens
    wanted = -(-padding // max(1, min(room.longest, MOST_PADDING)))
    used = max(1, min(room.sequences - count, wanted))
    starts[count : count + used] = have.tokens + padding * np.arange(used) // used
    starts[count + used :] = room.tokens
    lens[count:] = np.diff(starts[count:])
