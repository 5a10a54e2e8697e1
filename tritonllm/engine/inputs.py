"""A step's inputs on the device: what the model and the sampler read, sent there in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tritonllm.engine.step import ALIGNMENT, COLUMNS, Layout, Room, Step, StepInputs, layout_of, place
from tritonllm.kernels import CascadePlan, plan_cascade
from tritonllm.layers.metadata import AttentionMetadata
from tritonllm.layers.regime import LengthRegime
from tritonllm.layers.segments import Segments

PINNED = 8  # blocks of each size that are kept: what three steps, one running and two on their way, have in flight
TORCH_DTYPES = {column.dtype: torch.from_numpy(np.empty(0, column.dtype)).dtype for column in COLUMNS.values()}


class SamplingInputs(NamedTuple):
    """What `sample` reads of :class:`StepInputs`, in the order of its arguments."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """A step on the device, or the room of a captured one.

    Attributes:
        inputs: the arrays.
        metadata: what attention reads of them.
    """

    inputs: StepInputs[torch.Tensor]
    metadata: AttentionMetadata

    def sampling(self, rows: int) -> SamplingInputs:
        """Those of the first ``rows`` tokens that are sampled from."""
        return SamplingInputs(*(getattr(self.inputs, name)[:rows] for name in SamplingInputs._fields))


def make_batch(
    inputs: StepInputs[torch.Tensor],
    block_tables: torch.Tensor,
    segments: Segments,
    regime: LengthRegime,
    cascade: CascadePlan | None,
) -> Batch:
    """The one place where a step's arrays become attention's metadata."""
    metadata = AttentionMetadata(
        segments=segments,
        slot_mapping=inputs.slot_mapping,
        block_tables=block_tables,
        seq_lens=inputs.seq_lens,
        cu_seqlens_q=inputs.cu_seqlens_q,
        verify_starts=inputs.verify_starts,
        decode_order=inputs.decode_order,
        cascade=cascade,
        regime=regime,
    )
    return Batch(inputs, metadata)


def views(memory: torch.Tensor, layout: Layout) -> StepInputs[torch.Tensor]:
    """The arrays in ``memory[size or more]`` uint8."""
    spans = layout.spans.items()
    return StepInputs(**{name: memory[at:end].view(TORCH_DTYPES[dtype]) for name, (at, end, dtype) in spans})


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


def pack(step: Step, room: Room, device: torch.device) -> torch.Tensor:
    """The arrays of a step, placed in ``room``, in host memory: what one copy takes to the device."""
    layout = layout_of(room)
    host = host_bytes(layout.size, device)
    place(step, layout.arrays(host.numpy()), room)
    return host


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


def upload_cascade(step: Step, block_size: int, device: torch.device) -> CascadePlan | None:
    """Where the decodes' keys are, if they share some."""
    if step.shared is None:
        return None
    n = step.segments.decode.sequences
    (blocks, shares), tables, lens = step.shared, step.block_tables[:n], step.inputs.seq_lens[:n]
    plan = plan_cascade(*(torch.from_numpy(array) for array in (tables, lens, shares)), blocks, block_size)
    return CascadePlan(*upload([part.numpy() for part in plan], device))


def upload_step(step: Step, rows: int, block_size: int, device: torch.device) -> Batch:
    """A step in memory of its own, without waiting for the device.

    Args:
        rows: room for tokens that are sampled from, of which the step's own are the first.
    """
    room = Room(step.segments, rows)
    memory = pack(step, room, device).to(device, non_blocking=True)
    (tables,) = upload([step.block_tables], device)
    inputs = views(memory, layout_of(room))
    return make_batch(inputs, tables, step.segments, step.regime, upload_cascade(step, block_size, device))
