"""A step's inputs on the device: what the model and the sampler read, sent there in one copy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.engine.data.step import SharedPrefix, Step
from tritonllm.engine.data.step_inputs import (
    ALIGNMENT,
    COLUMNS,
    PARAMETERS,
    Span,
    StepInputs,
    StepRoom,
    layout_of,
    place,
)
from tritonllm.kernels import CascadePlan
from tritonllm.kernels.attention.cascade import cascade_parts
from tritonllm.layers.metadata import AttentionMetadata

PINNED = 8  # blocks of each size that are kept: what three steps, one running and two on their way, have in flight
TORCH_DTYPES = {
    c.dtype: torch.from_numpy(np.empty(0, c.dtype)).dtype for c in (*COLUMNS.values(), *PARAMETERS.values())
}


@dataclass(frozen=True)
class Batch:
    """A step on the device, or the room of a captured one.

    Attributes:
        inputs: the input arrays of the step, on the device.
        sent: ``[N]`` uint8, the memory in which they lie.
        rows: what sampling wants, of each sequence that is sampled from; made from the seats.
        metadata: what attention reads of the arrays.
        draws: a captured step of decodes alone goes on to the tokens.
        by_shards: each rank draws from its part of the logits (:class:`~tritonllm.engine.step.drawing.Drawing`).
    """

    inputs: StepInputs[torch.Tensor]
    sent: torch.Tensor
    rows: SamplingRows
    metadata: AttentionMetadata
    draws: bool = True
    by_shards: bool = False

    def sampling(self, rows: int) -> SamplingRows:
        """The sampling parameters of the first ``rows`` sequences that are sampled from."""
        return self.rows.each(lambda column: column[:rows])

    def telling(self, stored: Callable[[int], None]) -> "Batch":
        """This batch, with a function that is called when each layer is launched (see
        :class:`~tritonllm.layers.metadata.AttentionMetadata`)."""
        return replace(self, metadata=replace(self.metadata, stored=stored))

    def exchanging(self, rows: int) -> "Batch":
        """This batch, with room for ``rows`` rows of each rank in its exchanges with other ranks; unchanged if 0."""
        return replace(self, metadata=replace(self.metadata, exchange_rows=rows)) if rows else self


def make_batch(
    memory: torch.Tensor,
    room: StepRoom,
    block_tables: torch.Tensor,
    max_decode_len: int | None,
    cascade: CascadePlan | None,
    draws: bool = True,
    by_shards: bool = False,
) -> Batch:
    """The one place where a step's arrays, in ``memory`` uint8, become attention's metadata."""
    layout = layout_of(room)
    inputs = StepInputs(**views(memory, layout.spans))
    metadata = AttentionMetadata(
        segments=room.segments,
        slot_mapping=inputs.slot_mapping,
        block_tables=block_tables,
        seq_lens=inputs.seq_lens,
        cu_seqlens_q=inputs.cu_seqlens_q,
        verify_starts=inputs.verify_starts,
        decode_order=inputs.decode_order,
        cascade=cascade,
        max_decode_len=max_decode_len,
        row_marks=inputs.seats,
    )
    return Batch(
        inputs, memory[: layout.sent], SamplingRows(**views(memory, layout.row_spans)), metadata, draws, by_shards
    )


def views(memory: torch.Tensor, spans: Mapping[str, Span]) -> dict[str, torch.Tensor]:
    """The arrays in ``memory`` uint8."""
    return {name: memory[at:end].view(TORCH_DTYPES[dtype]) for name, (at, end, dtype) in spans.items()}


def reserve_pinned() -> None:
    """Let torch's allocator of pinned memory have blocks of every size, up to 1 MB, that a step sends or receives.

    When it has none it asks the driver, which waits for all that the device is doing, and then the device waits for
    the host: 20 ms of a step in the first run of W1.
    """
    blocks = [torch.empty(1 << bits, dtype=torch.uint8, pin_memory=True) for bits in range(21) for _ in range(PINNED)]
    del blocks  # freed blocks stay with the allocator, which gives them out again by size, a power of two


def host_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Host memory ``[size]`` uint8, from which ``device`` can copy while the host goes on."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class StepInbox:
    """What a room holds of a step, on the device, and where the host puts it together.

    Args:
        room: the room that it has for steps.
        memory: uint8, of which it takes the first bytes (:class:`~tritonllm.engine.data.step_inputs.StepLayout`).
    """

    def __init__(self, room: StepRoom, memory: torch.Tensor) -> None:
        layout = layout_of(room)
        self._room, self._there = room, memory[: layout.sent]
        self._here = np.empty(layout.sent, dtype=np.uint8)
        self._arrays = layout.arrays(self._here)

    def send(self, step: Step) -> None:
        """Place a step's arrays in the room, in one copy, without waiting for it.

        It is put together in the same memory as the steps before, whose views would take longer to make than to fill.
        The copy begins in memory of its own, since those of the steps before may still be on their way.
        """
        place(step.inputs, step.room, self._arrays, self._room)
        host = host_bytes(len(self._here), self._there.device)
        host.numpy()[:] = self._here
        self._there.copy_(host, non_blocking=True)


def upload_one(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """:func:`upload` one array, contiguous or not, in half the time."""
    host = torch.empty(array.shape, dtype=TORCH_DTYPES[array.dtype], pin_memory=device.type == "cuda")
    host.numpy()[...] = array
    return host.to(device, non_blocking=True)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy contiguous arrays to the device in one transfer, without waiting for it."""
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    host = host_bytes(ends[-1], device)
    spans = [slice(start, start + array.nbytes) for start, array in zip([0, *ends], arrays, strict=False)]
    pinned = host.numpy()
    for span, array in zip(spans, arrays, strict=True):
        pinned[span] = array.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[span].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for span, array in zip(spans, arrays, strict=True)
    ]


def upload_cascade(step: Step, block_tokens: int, device: torch.device, room: int = 0) -> CascadePlan | None:
    """Where the decodes' keys are, if they share some.

    Args:
        block_tokens: how many tokens a block holds; no ranks split its keys where some are shared.
        room: how many decodes the memory that the plan goes to has room for, if they are more.
    """
    if step.shared is None:
        return None
    n = step.segments.decode.sequences
    parts = cascade_parts(max(n, room))
    arrays = cascade_arrays(step.shared, step.block_tables[:n], step.inputs.seq_lens[:n], block_tokens, parts)
    return CascadePlan(*upload(arrays, device))


def cascade_arrays(
    shared: SharedPrefix, tables: np.ndarray, seq_lens: np.ndarray, block_tokens: int, parts: int
) -> tuple[np.ndarray, ...]:
    """What :func:`~tritonllm.kernels.plan_cascade` makes of ``tables[B, M]`` and ``seq_lens[B]``, without torch; with
    the shared keys in so many ``parts``.

    torch divides tables of 256 x 140 among its threads, which wait for each other: on two busy cores one plan of a
    hundred takes over 4 ms with torch, and 0.15 ms so (at the median 0.08 and 0.06).
    """
    (blocks, shares), (batch, width) = shared, tables.shape
    each = -(-blocks // parts)
    prefix = np.zeros(parts * each, dtype=np.int32)
    prefix[:blocks] = tables[shares.argmax(), :blocks]
    before = np.arange(parts, dtype=np.int32) * (each * block_tokens)
    suffix, own = tables.copy(), width - blocks
    suffix[shares, :own] = tables[shares, blocks:]
    suffix[shares, own:] = 0
    return (
        prefix.reshape(parts, each),
        np.clip(blocks * block_tokens - before, 0, each * block_tokens).astype(np.int32),
        np.arange(parts + 1, dtype=np.int32) * np.int32(batch),
        suffix,
        seq_lens - shares.astype(np.int32) * np.int32(blocks * block_tokens),
        shares,
    )


def upload_step(
    step: Step, rows: int, block_tokens: int, device: torch.device, max_decode_len: int | None = None
) -> Batch:
    """A step in memory of its own, without waiting for the device.

    Args:
        rows: room for sequences that are sampled from, of which the step's own are the first.
        block_tokens: tokens of a block, over all ranks.
        max_decode_len: see :class:`~tritonllm.layers.metadata.AttentionMetadata`.
    """
    room = StepRoom(step.segments, rows)
    memory = torch.empty(layout_of(room).num_bytes, dtype=torch.uint8, device=device)
    StepInbox(room, memory).send(step)
    tables = upload_one(step.block_tables, device)
    return make_batch(memory, room, tables, max_decode_len, upload_cascade(step, block_tokens, device))
