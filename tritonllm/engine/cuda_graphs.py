"""Decode steps as CUDA graphs: one captured forward pass per batch size, replayed with new inputs.

A decode step of a small model is hundreds of short kernels; launched one by one from Python they leave the GPU idle
between them. A graph launches them all at once. Lengths, slots and block tables are read by the kernels from fixed
buffers, so one graph serves any lengths at its batch size; a smaller batch runs padded (slot -1, length 0). Steps whose
sequences share a prefix launch other kernels: where they can occur, their graphs are captured beside the ordinary ones.
"""

from collections.abc import Callable

import torch

from tritonllm.engine.batch import Batch
from tritonllm.kernels import CascadePlan
from tritonllm.kernels.attention_cascade import cascade_parts
from tritonllm.layers.metadata import AttentionMetadata

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata], torch.Tensor]


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense where padding would cost most, then every 16."""
    sizes = [n for n in (1, 2, 4, 8) if n <= max_num_seqs]
    sizes += range(16, max_num_seqs + 1, 16)
    return sizes if sizes[-1] == max_num_seqs else [*sizes, max_num_seqs]


def _fill(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` into the first rows and columns of ``buffer``, and zeros into its other rows."""
    buffer[tuple(slice(length) for length in values.shape)].copy_(values)
    buffer[len(values) :].zero_()


class DecodeGraphs:
    """Captured decode steps.

    Args:
        forward: ``(input_ids, positions, metadata) -> hidden``.
        max_num_seqs: the largest batch.
        max_blocks: the widest block table.
        device: a CUDA device.
        may_share: whether a step of so many sequences can come with a plan for their shared prefix.
    """

    def __init__(
        self,
        forward: Forward,
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        may_share: Callable[[int], bool],
    ) -> None:
        self._input_ids = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._slots = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._no_prefill = torch.zeros(1, dtype=torch.int32, device=device)
        self._suffix_tables = torch.zeros_like(self._tables)
        self._suffix_lens = torch.zeros_like(self._lengths)
        self._shares = torch.zeros(max_num_seqs, dtype=torch.bool, device=device)
        self._sizes = graph_sizes(max_num_seqs)
        self._plans = {size: self._plan(size) for size in self._sizes if may_share(size)}
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):  # the largest first: the others then fit into its memory
            for shared in (False, True) if size in self._plans else (False,):
                inputs = self._inputs(size, self._plans[size] if shared else None)
                forward(*inputs)  # compiles and loads whatever the capture must not
                torch.cuda.synchronize(device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    hidden = forward(*inputs)
                self._graphs[size, shared] = graph, hidden

    def _plan(self, size: int) -> CascadePlan:
        """The buffers of a plan for so many sequences, sharing nothing yet."""
        parts, like = cascade_parts(size), self._tables
        return CascadePlan(
            prefix_tables=like.new_zeros(parts, -(-like.shape[1] // parts)),
            prefix_lens=like.new_zeros(parts),
            prefix_cu_seqlens=torch.arange(parts + 1, dtype=torch.int32, device=like.device) * size,
            suffix_tables=self._suffix_tables[:size],
            suffix_lens=self._suffix_lens[:size],
            shares=self._shares[:size],
        )

    def _inputs(self, size: int, plan: CascadePlan | None) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        metadata = AttentionMetadata(
            slot_mapping=self._slots[:size],
            block_tables=self._tables[:size],
            seq_lens=self._lengths[:size],
            cu_seqlens_q=self._no_prefill,
            num_decodes=size,
            max_seqlen_q=0,
            cascade=plan,
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
        _fill(self._lengths[:size], metadata.seq_lens)
        _fill(self._tables[:size], metadata.block_tables)
        if metadata.cascade is not None:
            mine = self._plans[size]
            new = metadata.cascade._replace(prefix_cu_seqlens=mine.prefix_cu_seqlens)  # its own counts the padding
            for buffer, values in zip(mine, new, strict=True):
                _fill(buffer, values)
        graph, hidden = self._graphs[size, metadata.cascade is not None]
        graph.replay()
        return hidden[:n]
