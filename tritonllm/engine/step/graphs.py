"""Steps as CUDA graphs: one captured pass for each room that a step may need.

A step of a small model is hundreds of short kernels; launched one by one from Python they leave the GPU idle between
them, for the host takes about 1 ms a layer. A graph launches them all at once. Kernels read lengths, slots and block
tables from fixed buffers, so one graph serves any step that its room holds; what a step does not fill is padding
(:func:`~tritonllm.engine.data.step_inputs.place`).

Kinds of rooms, of which those with prompts and those without have memory of their own:

- ``decodes`` sequences alone, from token ids to new tokens: dense sizes. (20 of them take 1.05 s of a start of
  Qwen3-0.6B on an H200.) Steps whose sequences share a prefix launch other kernels, from fewer graphs.
- ``decodes`` sequences alone with drafts to verify, as many of each: the same, for as many sequences as have drafts.
- ``decodes`` sequences alone of which the host restricts some: to hidden states, for few sizes. The draw is launched
  when its masks are there (:mod:`tritonllm.engine.data.control`).
- ``tokens`` of prompts beside them, from token ids to hidden states. The GPU computes faster than the host launches up
  to some thousand tokens, and a small model's largest step: of the prefill in W1 (Qwen3-0.6B, steps of 8192 tokens) an
  H200 was idle for a third. So steps are captured up to the size from which on the GPU takes longer. (All at the start:
  the two large ones of Qwen3-0.6B take 0.07 s, which the first long prompts would wait for.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from tritonllm.engine.cache.layer_marks import Marks
from tritonllm.engine.data.inputs import Batch, StepInbox, make_batch, upload_cascade, upload_one
from tritonllm.engine.data.step import Step
from tritonllm.engine.data.step_inputs import StepRoom, layout_of
from tritonllm.engine.step.common_steps import Need
from tritonllm.engine.step.dummy_step import dummy_step
from tritonllm.engine.step.room_sizes import chunk_capacity, decode_sizes, graph_sizes, late_sizes, padded, shared_sizes
from tritonllm.kernels import CascadePlan
from tritonllm.kernels.attention.cascade import cascade_parts
from tritonllm.layers.regime import Regimes
from tritonllm.layers.segments import EMPTY, Segment, Segments, decodes, verified

Outputs = TypeVar("Outputs")
Work = Callable[[Batch], tuple[torch.Tensor, torch.Tensor | None]]  # -> hidden states, and new tokens if it draws them
Capture = Callable[[Callable[[], Outputs], bool], tuple[torch.cuda.CUDAGraph, Outputs]]


@dataclass(frozen=True)
class GraphLimits:
    """The bounds of the steps that can come.

    Attributes:
        max_num_seqs: the most sequences of a step.
        token_sizes: room for prompt tokens, see :func:`~tritonllm.engine.step.room_sizes.token_sizes`.
        max_blocks: the width of the widest block table.
        block_tokens: how many tokens a block holds, over all ranks.
        drafts: how many drafts each sequence has in a step that verifies some.
        verified: the most sequences of such a step.
        by_shards: ranks can draw from their parts of the logits; steps of decodes alone do, if their rows allow it.
    """

    max_num_seqs: int
    token_sizes: Sequence[int]
    max_blocks: int
    block_tokens: int
    drafts: int = 0
    verified: int = 0
    by_shards: bool = False


class GraphKey(NamedTuple):
    """What a graph is captured for.

    Attributes:
        decodes: room for sequences that decode.
        tokens: room for prompt tokens; 0 for a step of decodes alone.
        max_decode_len: the bound of the lengths' regime, see :mod:`tritonllm.layers.regime`.
        shared: whether some decodes share a prefix.
        drafts: how many drafts each decode has to verify.
        late: whether the graph ends with the hidden states, so that the step is drawn outside, perhaps when the host
            has had its say.
        by_shards: whether each rank draws from its part of the logits.
    """

    decodes: int
    tokens: int
    max_decode_len: int
    shared: bool = False
    drafts: int = 0
    late: bool = False
    by_shards: bool = False

    @property
    def room_key(self) -> "RoomKey":
        return RoomKey(self.decodes, self.tokens, self.drafts)


class RoomKey(NamedTuple):
    """What of a graph's key decides its room."""

    decodes: int
    tokens: int = 0
    drafts: int = 0


class GraphCapture:
    """Captures graphs; those of a kind share memory: only the outputs of the one that was replayed last are valid.

    ``torch.cuda.graph`` hands the allocator's free memory back to the driver before each capture, which took 41 ms for
    each of the 29 graphs of a start of Qwen3-0.6B. Graphs of one pool and stream use each other's memory anyway.

    Args:
        rehearsal: see :class:`~tritonllm.models.interface.CausalLM`; inside the block a model runs one layer of each
            kind.
        device: a CUDA device.
        threads: whether other threads call CUDA meanwhile: NCCL's, which asks whether the collectives before have
            ended.
    """

    def __init__(
        self,
        rehearsal: Callable[[], AbstractContextManager[None]],
        device: torch.device,
        *,
        threads: bool = False,
    ) -> None:
        self._rehearsal = rehearsal
        self._device = device
        self._mode = "thread_local" if threads else "global"  # whose forbidden calls break a capture
        self._kinds = [(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)) for _ in range(2)]

    def __call__(self, work: Callable[[], Outputs], with_prompts: bool) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """Run ``work`` once with one layer of each kind, for what a capture must not do (loading kernels); capture it.

        Returns:
            the graph, and what ``work`` returned: tensors that each replay writes.
        """
        with self._rehearsal():
            work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        pool, stream = self._kinds[with_prompts]
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode=self._mode)
            try:
                outputs = work()
            finally:
                graph.capture_end()
        return graph, outputs


@dataclass(frozen=True)
class Captured:
    """A graph, the batch that it reads, and what a replay of it writes.

    Attributes:
        hidden: the hidden states that a replay writes: of a step of decodes alone one row for each, and one for each of
            its drafts; else the rows that are sampled from.
        tokens: the token of each sequence that is drawn; ``None`` if the graph does not draw.
        marks: says where the step's layers end; ``None`` if nobody asks.
    """

    graph: torch.cuda.CUDAGraph
    batch: Batch
    hidden: torch.Tensor
    tokens: torch.Tensor | None
    marks: Marks | None = None


class StepGraphs:
    """Captured steps, which all read the same buffers.

    Args:
        work: the functions that are captured.
        limits: the bounds of steps.
        device: a CUDA device.
        may_share: returns whether a step of so many decodes can come with a shared prefix.
        regimes: the regimes of the lengths that steps can have.
        capture: captures a function as a graph.
        mark: makes the object that says where the layers of a step with prompts end; ``None``: nobody asks.
    """

    def __init__(
        self,
        work: Work,
        limits: GraphLimits,
        device: torch.device,
        may_share: Callable[[int], bool],
        regimes: Regimes,
        capture: Capture,
        mark: Callable[[], Marks] | None = None,
    ) -> None:
        self._mark = mark
        self._work, self._limits, self._device, self._capture_graph = work, limits, device, capture
        self._regimes = regimes
        self._sizes = graph_sizes(limits.max_num_seqs)
        longest = limits.max_blocks * limits.block_tokens
        fit = [tokens for tokens in limits.token_sizes if tokens <= chunk_capacity(tokens) * longest]  # if all padding
        alone = [RoomKey(size) for size in self._sizes]
        self._beside = [RoomKey(size, tokens) for tokens in fit for size in decode_sizes(limits.max_num_seqs, tokens)]
        self._verified = graph_sizes(limits.verified) if limits.drafts else []
        with_drafts = [RoomKey(size, drafts=limits.drafts) for size in self._verified]
        self._rooms = {key: self._room(*key) for key in (*alone, *with_drafts, *self._beside)}
        rooms = self._rooms.values()
        self._memory = torch.zeros(max(layout_of(room).num_bytes for room in rooms), dtype=torch.uint8, device=device)
        self._inboxes = {key: StepInbox(room, self._memory) for key, room in self._rooms.items()}
        most = max(room.segments.sequences for room in rooms)
        self._tables = torch.zeros(most, limits.max_blocks, dtype=torch.int32, device=device)
        self._loaded: tuple[tuple[int, ...], bytes] | None = None  # what the tables hold of a step without prompts
        self._graphs: dict[GraphKey, Captured] = {}
        self._late = late_sizes(limits.max_num_seqs)
        self._shared = [size for size in shared_sizes(limits.max_num_seqs) if may_share(size)]
        self._plans = self._make_plans(sorted({*self._shared, *filter(may_share, self._late)}))
        late = [RoomKey(size) for size in self._late]
        nothing = dummy_step(0, [], rows=0, width=0)
        for kind in (with_drafts, alone, late, self._beside):
            for room_key in reversed(kind):  # the largest first: the others then fit into its memory
                for key in self._keys(room_key, kind is late):
                    self._load(nothing, key)
                    self._graphs[key] = self._capture(key)

    def __len__(self) -> int:
        return len(self._graphs)

    def _keys(self, room_key: RoomKey, late: bool) -> Iterator[GraphKey]:
        """The keys of a room's graphs that are captured at the start."""
        decodes, tokens, drafts = room_key
        alone = not (tokens or drafts)
        may_share = alone and decodes in self._plans and decodes in (self._late if late else self._shared)
        for bound in self._regimes.bounds(self._rooms[room_key].segments):
            for shared in (False, True) if may_share else (False,):
                key = GraphKey(decodes, tokens, bound, shared, drafts, late)
                yield key
                if alone and not late and self._limits.by_shards:
                    yield key._replace(by_shards=True)

    def _room(self, sequences: int, tokens: int, drafts: int) -> StepRoom:
        if drafts:
            return StepRoom(Segments(verify=verified(sequences, 1 + drafts)), sequences)
        if not tokens:
            return StepRoom(Segments(decodes(sequences)), sequences)
        longest = min(tokens, self._limits.max_blocks * self._limits.block_tokens)
        chunk = Segment(chunk_capacity(tokens), tokens, longest)
        rows = padded(min(sequences + chunk.sequences, self._sizes[-1]), self._sizes)
        return StepRoom(Segments(decodes(sequences), EMPTY, chunk), rows)

    def _make_plans(self, sizes: Sequence[int]) -> dict[int, CascadePlan]:
        """The buffers of plans for so many sequences, sharing nothing yet."""
        if not sizes:
            return {}
        count, width = max(sizes), self._tables.shape[1]
        suffixes, lens = self._tables.new_zeros(count, width), self._tables.new_zeros(count)
        shares = torch.zeros(count, dtype=torch.bool, device=self._device)
        plans = {}
        for size in sizes:
            parts = cascade_parts(size)
            plans[size] = CascadePlan(
                prefix_tables=lens.new_zeros(parts, -(-width // parts)),
                prefix_lens=lens.new_zeros(parts),
                prefix_cu_seqlens=torch.arange(parts + 1, dtype=torch.int32, device=self._device) * size,
                suffix_tables=suffixes[:size],
                suffix_lens=lens[:size],
                shares=shares[:size],
            )
        return plans

    def _capture(self, key: GraphKey) -> Captured:
        """Capture a step on what is in the buffers."""
        room = self._rooms[key.room_key]
        tables = self._tables[: room.segments.sequences]
        plan = self._plans[key.decodes] if key.shared else None
        batch = make_batch(self._memory, room, tables, key.max_decode_len, plan, not key.late, key.by_shards)
        marks = None if self._mark is None or not key.tokens else self._mark()
        if marks is not None:
            batch = batch.telling(marks.note)
        graph, (hidden, tokens) = self._capture_graph(lambda: self._work(batch), key.tokens > 0)
        return Captured(graph, batch, hidden, tokens, marks)

    def key_for(self, step: Step, need: Need | None = None) -> GraphKey | None:
        """The smallest room that holds a step; ``None`` if there is none, if a step with prompts shares keys, or if the
        hidden states of all its tokens are wanted.

        Args:
            need: what the room must hold, if that is more than the step.
        """
        verify = step.segments.verify
        if verify.sequences:
            fits = verify.longest == 1 + self._limits.drafts and step.segments.tokens == verify.tokens
            fits = fits and verify.sequences <= self._limits.verified
            if not fits:
                return None
            return self._key(RoomKey(padded(verify.sequences, self._verified), drafts=self._limits.drafts), step)
        need = need or Need.of(step)
        if not need.tokens:
            return None if need.eager else self._key_of_decodes(need, step)
        if need.eager:
            return None
        longest = self._limits.max_blocks * self._limits.block_tokens
        for sequences, tokens, _ in self._beside:
            free = chunk_capacity(tokens) - need.chunks
            fits = need.decodes <= sequences and need.tokens <= tokens
            if fits and free > 0 and tokens - need.tokens <= free * longest:
                return self._key(RoomKey(sequences, tokens), step)
        return None

    def _key_of_decodes(self, need: Need, step: Step) -> GraphKey:
        """A step that is late, or whose logits are edited or reported, is drawn outside of its graph. So one of the
        second kind, too, takes a graph that does not draw, where that has no more padding."""
        sizes = self._sizes if step.shared is None else self._shared
        size, late = padded(need.decodes, self._late if need.late else sizes), padded(need.decodes, self._late)
        without = step.late or (not step.plain and size == late)
        return self._key(RoomKey(late if without else size), step, without)

    def _key(self, room_key: RoomKey, step: Step, late: bool = False) -> GraphKey:
        decodes, tokens, drafts = room_key
        bound = self._regimes.bound(self._rooms[room_key].segments, step.longest)
        alone = step.segments.only_decodes
        by_shards = self._limits.by_shards and alone and step.by_shards
        return GraphKey(decodes, tokens, bound, step.shared is not None, drafts, late, by_shards)

    def load(self, step: Step, key: GraphKey) -> Captured:
        """Fill the buffers for a graph. What its replay writes is valid until the next one's. Of hidden states and
        tokens the step's own are the first.

        Args:
            key: what :meth:`key_for` said.
        """
        self._load(step, key)
        return self._graphs[key]

    def _load(self, step: Step, key: GraphKey) -> None:
        self._inboxes[key.room_key].send(step)
        self._load_tables(step, self._rooms[key.room_key].segments)
        new = upload_cascade(step, self._limits.block_tokens, self._device, key.decodes)
        if new is not None:
            mine = self._plans[key.decodes]
            new = new._replace(prefix_cu_seqlens=mine.prefix_cu_seqlens)  # its own counts the padding
            for buffer, values in zip(mine, new, strict=True):
                _fill(buffer, values)

    def _load_tables(self, step: Step, captured: Segments) -> None:
        """Rows and columns beyond these keep what they had: no length reaches there. But padded prompt tokens read
        block 0."""
        tables, have = step.block_tables, step.segments
        alone = not have.chunk.tokens and not captured.chunk.tokens
        mine = (tables.shape, tables.tobytes()) if alone else None
        if alone and mine == self._loaded:  # most steps of a small batch: no block has been filled
            return
        self._loaded = None  # until they are on their way: an exception (Ctrl-C) may come between
        there = upload_one(tables, self._device)
        n, width = have.decode.sequences + have.verify.sequences, tables.shape[1]
        self._tables[:n, :width].copy_(there[:n])
        if alone:
            self._loaded = mine
            return
        begin = captured.decode.sequences
        end = begin + have.chunk.sequences
        self._tables[begin:end, :width].copy_(there[n:])
        self._tables[end : captured.sequences].zero_()


def _fill(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` into the first rows and columns of ``buffer``, and zeros into its other rows."""
    buffer[tuple(slice(length) for length in values.shape)].copy_(values)
    if len(values) < len(buffer):
        buffer[len(values) :].zero_()
