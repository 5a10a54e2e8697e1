"""Decode steps as CUDA graphs: one captured forward pass per batch size, replayed with new inputs.

A decode step of a small model is hundreds of short kernels; launched one by one from Python they leave the GPU idle
between them. A graph launches them all at once. Lengths, slots and block tables are read by the kernels from fixed
buffers, so one graph serves any lengths at its batch size; a smaller batch runs padded (slot -1, length 0).
"""

from collections.abc import Callable

import torch

from tritonllm.engine.batch import Batch
from tritonllm.layers.metadata import AttentionMetadata

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense where padding would cost most, then every 16."""
    sizes = [n for n in (1, 2, 4, 8) if n <= max_num_seqs]
    sizes += range(16, max_num_seqs + 1, 16)
    return sizes if sizes[-1] == max_num_seqs else [*sizes, max_num_seqs]


class DecodeGraphs:
    """Captured decode steps.

    Args:
        forward: ``(input_ids, positions, metadata) -> hidden``.
        max_num_seqs: the largest batch.
        max_blocks: the widest block table.
        device: a CUDA device.
    """

    def __init__(self, forward: Forward, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self._input_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._slots = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._no_prefill = torch.zeros(1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._sizes = graph_sizes(max_num_seqs)
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):  # the largest first: the others then fit into its memory
            inputs = self._inputs(size)
            forward(*inputs)  # compiles and loads whatever the capture must not
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = forward(*inputs)
            self._graphs[size] = graph, hidden

    def _inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        metadata = AttentionMetadata(
            slot_mapping=self._slots[:size],
            block_tables=self._tables[:size],
            seq_lens=self._lengths[:size],
            cu_seqlens_q=self._no_prefill,
            num_decodes=size,
            max_seqlen_q=0,
        )
        return self._input_ids[:size], self._positions[:size], metadata

    def run(self, batch: Batch) -> torch.Tensor:
        """Hidden states ``[B, hidden]`` of a batch of decodes, valid until the next run."""
        n = batch.input_ids.shape[0]
        size = next(s for s in self._sizes if s >= n)
        metadata = batch.metadata
        self._input_ids[:n].copy_(batch.input_ids)
        self._positions[:n].copy_(batch.positions)
        self._slots[:n].copy_(metadata.slot_mapping)
        self._slots[n:size].fill_(-1)
        self._lengths[:n].copy_(metadata.seq_lens)
        self._lengths[n:size].fill_(0)
        self._tables[:n, : metadata.block_tables.shape[1]].copy_(metadata.block_tables)
        graph, hidden = self._graphs[size]
        graph.replay()
        return hidden[:n]
