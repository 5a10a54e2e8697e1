"""A step's plan as arrays: built on the host once a step, sent to the device in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tritonllm.engine.scheduler import ScheduledRequest, StepPlan
from tritonllm.engine.seats import SeatTable
from tritonllm.engine.shared_prefix import CascadePlanner
from tritonllm.kernels import CascadePlan
from tritonllm.layers.metadata import AttentionMetadata

ALIGNMENT = 16  # bytes: kernels are compiled for pointers that are multiples of it
PINNED = 8  # blocks of each size that are kept: what three steps, one running and two on their way, have in flight


@dataclass(frozen=True)
class HostBatch:
    """Inputs of one forward pass over T tokens of B sequences, R of which get a new token, in host memory.

    Attributes:
        input_ids: ``[T]`` int32; -1 - i stands for the token that row i of the step before draws.
        positions, slot_mapping: ``[T]`` int64.
        block_tables: ``[B, M]`` int32.
        seq_lens: ``[B]`` int32.
        cu_seqlens_q: ``[B - num_decodes + 1]`` int32.
        logit_rows: ``[R]`` int64, the tokens whose logits are sampled from.
        temperature, top_p, min_p: ``[R]`` float32.
        top_k: ``[R]`` int32.
        seeds, steps: ``[R]`` int64; a request's seed and the index of the token it is about to get.
        num_decodes, max_seqlen_q: see :class:`AttentionMetadata`.
        cascade: what the decodes share, in host memory; ``None`` if it does not pay.
        sampled: the R items of the plan that get a token, in the order of the rows.
        plain: the draw alone serves all of them: no logits are edited or reported.
        whole: the hidden states of all tokens are wanted, for prompt log-probabilities.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    logit_rows: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    steps: np.ndarray
    num_decodes: int
    max_seqlen_q: int
    cascade: CascadePlan | None
    sampled: Sequence[ScheduledRequest]
    plain: bool
    whole: bool

    @property
    def decode_order(self) -> np.ndarray:
        """``[num_decodes]`` int32, see :class:`AttentionMetadata`."""
        return np.argsort(-self.seq_lens[: self.num_decodes], kind="stable").astype(np.int32)


def empty_batch() -> HostBatch:
    """Nothing to compute."""
    int64, int32, float32 = (np.empty(0, dtype=dtype) for dtype in (np.int64, np.int32, np.float32))
    return HostBatch(
        input_ids=int32,
        positions=int64,
        slot_mapping=int64,
        block_tables=np.empty((0, 0), dtype=np.int32),
        seq_lens=int32,
        cu_seqlens_q=np.zeros(1, dtype=np.int32),
        logit_rows=int64,
        temperature=float32,
        top_k=int32,
        top_p=float32,
        min_p=float32,
        seeds=int64,
        steps=int64,
        num_decodes=0,
        max_seqlen_q=0,
        cascade=None,
        sampled=(),
        plain=True,
        whole=False,
    )


@dataclass(frozen=True)
class SamplingInputs:
    """What the sampling kernels read, on the device; see :class:`HostBatch`."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """What the model reads of a :class:`HostBatch`, on the device."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata


def build_batch(plan: StepPlan, seats: SeatTable, block_size: int, planner: CascadePlanner | None = None) -> HostBatch:
    """The arrays of a plan that is not empty: decodes first, as the plan orders them.

    Args:
        seats: of the runner; told which rows this step will draw.
        planner: finds what the decodes share; ``None`` does not look for it.
    """
    items, n = plan.scheduled, plan.num_decodes
    requests, *columns = zip(*items, strict=True)
    starts, counts, samples, in_flight = map(np.array, columns)
    rows = seats.rows(requests)
    ends = starts + counts
    tables = seats.tables[rows, : -(-int(ends.max()) // block_size)]

    last_tokens = np.cumsum(counts)
    sequence = np.repeat(np.arange(len(items)), counts)  # of each token
    positions = np.arange(plan.num_tokens) - np.repeat(last_tokens - counts - starts, counts)
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    input_ids = np.empty(plan.num_tokens, dtype=np.int32)
    for i in np.flatnonzero(~in_flight).tolist():
        end = int(last_tokens[i])
        input_ids[end - items[i].num_tokens : end] = requests[i].token_ids(int(starts[i]), int(ends[i]))
    pending = np.flatnonzero(in_flight)  # all are decodes, and were sampled from in the step before
    input_ids[pending] = -1 - seats.drawn[rows[pending]]

    sampled = items if samples.all() else [item for item in items if item.samples]
    at = rows[samples]
    seats.drawn[at] = np.arange(len(at))
    steps = ends[samples] - seats.prompt_lens[at]
    seq_lens = ends.astype(np.int32)
    chunks = counts[n:]
    return HostBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots,
        block_tables=tables,
        seq_lens=seq_lens,
        cu_seqlens_q=np.concatenate(([0], np.cumsum(chunks))).astype(np.int32),
        logit_rows=last_tokens[samples] - 1,
        temperature=seats.temperature[at],
        top_k=seats.top_k[at],
        top_p=seats.top_p[at],
        min_p=seats.min_p[at],
        seeds=seats.seeds[at],
        steps=steps,
        num_decodes=n,
        max_seqlen_q=int(chunks.max(initial=0)),
        cascade=None if planner is None else planner.plan(tables[:n], seq_lens[:n]),
        sampled=sampled,
        plain=not (seats.special[at] | (steps < seats.min_tokens[at])).any(),
        whole=any(item.request.params.prompt_logprobs is not None for item in items[n:]),
    )


def reserve_pinned() -> None:
    """Let torch's allocator of pinned memory have blocks of every size, up to 1 MB, that a step sends or receives.

    When it has none it asks the driver, which waits for all that the device is doing, and then the device waits for
    the host: 20 ms of a step in the first run of W1.
    """
    blocks = [torch.empty(1 << bits, dtype=torch.uint8, pin_memory=True) for bits in range(21) for _ in range(PINNED)]
    del blocks  # freed blocks stay with the allocator, which gives them out again by size, a power of two


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy contiguous arrays to the device in one transfer, without waiting for it."""
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    spans = [slice(start, start + array.nbytes) for start, array in zip([0, *ends], arrays, strict=False)]
    pinned = host.numpy()
    for span, array in zip(spans, arrays, strict=True):
        pinned[span] = array.reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[span].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for span, array in zip(spans, arrays, strict=True)
    ]


def upload_cascade(plan: CascadePlan | None, device: torch.device) -> CascadePlan | None:
    return None if plan is None else CascadePlan(*upload([part.numpy() for part in plan], device))


def upload_batch(batch: HostBatch, device: torch.device) -> Batch:
    """What the model reads, without waiting for the device."""
    names = ("input_ids", "positions", "slot_mapping", "block_tables", "seq_lens", "cu_seqlens_q", "decode_order")
    ids, positions, slots, tables, lengths, starts, order = upload([getattr(batch, name) for name in names], device)
    metadata = AttentionMetadata(
        slot_mapping=slots,
        block_tables=tables,
        seq_lens=lengths,
        cu_seqlens_q=starts,
        num_decodes=batch.num_decodes,
        max_seqlen_q=batch.max_seqlen_q,
        decode_order=order,
        cascade=upload_cascade(batch.cascade, device),
    )
    return Batch(ids, positions, metadata)


def upload_sampling(batch: HostBatch, device: torch.device, rows: int) -> tuple[torch.Tensor, SamplingInputs]:
    """Tokens whose hidden states are to be sampled from ``[rows]`` int64, beyond the R wanted ones the first; and what
    sampling reads."""
    wanted = np.zeros(rows, dtype=np.int64)
    wanted[: len(batch.logit_rows)] = batch.logit_rows
    at, *inputs = upload([wanted, *(getattr(batch, name) for name in SamplingInputs.__dataclass_fields__)], device)
    return at, SamplingInputs(*inputs)
