"""A step's plan as device tensors, built once per step with asynchronous copies from pinned memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tritonllm.engine.request import Request
from tritonllm.engine.scheduler import StepPlan
from tritonllm.engine.shared_prefix import CascadePlanner
from tritonllm.kernels import CascadePlan
from tritonllm.layers.metadata import AttentionMetadata


@dataclass(frozen=True)
class SamplingBatch:
    """What the sampler needs of the R requests that get a token in this step.

    Attributes:
        requests: in the order of the rows.
        temperature, top_p, min_p: ``[R]`` float32; temperature 0 is greedy.
        top_k: ``[R]`` int32; 0 keeps all.
        seeds, steps: ``[R]`` int64; a request's seed and the index of the token it is about to get.
    """

    requests: Sequence[Request]
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass over T tokens.

    Attributes:
        input_ids: ``[T]`` int32.
        positions: ``[T]`` int64.
        logit_rows: ``[R]`` int64, the tokens whose logits are sampled from.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    logit_rows: torch.Tensor
    sampling: SamplingBatch


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def slots_of(block_ids: Sequence[int], start: int, count: int, block_size: int) -> np.ndarray:
    """Cache slots of ``count`` tokens of a sequence from position ``start``, int64."""
    positions = np.arange(start, start + count, dtype=np.int64)
    blocks = np.asarray(block_ids[start // block_size : -(-(start + count) // block_size)], dtype=np.int64)
    return blocks[positions // block_size - start // block_size] * block_size + positions % block_size


def sampling_batch(requests: Sequence[Request], device: torch.device) -> SamplingBatch:
    params = [request.params for request in requests]

    def column(values: list, dtype: type) -> torch.Tensor:
        return to_device(np.array(values, dtype=dtype), device)

    return SamplingBatch(
        requests=requests,
        temperature=column([0.0 if p.greedy else p.temperature for p in params], np.float32),
        top_k=column([max(p.top_k, 0) for p in params], np.int32),
        top_p=column([p.top_p for p in params], np.float32),
        min_p=column([p.min_p for p in params], np.float32),
        seeds=column([request.seed for request in requests], np.int64),
        steps=column([len(request.output_token_ids) for request in requests], np.int64),
    )


def build_batch(plan: StepPlan, block_size: int, device: torch.device, planner: CascadePlanner | None = None) -> Batch:
    """Device tensors of ``plan``: decodes first, as the plan orders them.

    Args:
        planner: finds what the decodes share; ``None`` does not look for it.
    """
    items = plan.scheduled
    ids = np.empty(plan.num_tokens, dtype=np.int32)
    positions = np.empty(plan.num_tokens, dtype=np.int64)
    slots = np.empty(plan.num_tokens, dtype=np.int64)
    seq_lens = np.empty(len(items), dtype=np.int32)
    width = max(-(-(item.start + item.num_tokens) // block_size) for item in items)
    tables = np.zeros((len(items), width), dtype=np.int32)
    sampled: list[Request] = []
    logit_rows = []
    at = 0
    for row, item in enumerate(items):
        request, end = item.request, item.start + item.num_tokens
        span = slice(at, at + item.num_tokens)
        ids[span] = request.token_ids(item.start, end)
        positions[span] = np.arange(item.start, end)
        slots[span] = slots_of(request.block_ids, item.start, item.num_tokens, block_size)
        seq_lens[row] = end
        used = -(-end // block_size)
        tables[row, :used] = request.block_ids[:used]
        at += item.num_tokens
        if item.samples:
            sampled.append(request)
            logit_rows.append(at - 1)
    n = plan.num_decodes
    cascade = None if planner is None else planner.plan(tables[:n], seq_lens[:n])
    chunks = [item.num_tokens for item in items[n:]]
    cu_seqlens_q = np.concatenate(([0], np.cumsum(chunks))).astype(np.int32)
    metadata = AttentionMetadata(
        slot_mapping=to_device(slots, device),
        block_tables=to_device(tables, device),
        seq_lens=to_device(seq_lens, device),
        cu_seqlens_q=to_device(cu_seqlens_q, device),
        num_decodes=n,
        max_seqlen_q=max(chunks, default=0),
        cascade=None if cascade is None else CascadePlan(*(to_device(t.numpy(), device) for t in cascade)),
    )
    return Batch(
        input_ids=to_device(ids, device),
        positions=to_device(positions, device),
        metadata=metadata,
        logit_rows=to_device(np.array(logit_rows, dtype=np.int64), device),
        sampling=sampling_batch(sampled, device),
    )
