"""Decode steps as CUDA graphs: one captured pass, from token ids to new tokens, per batch size.

A decode step of a small model is hundreds of short kernels; launched one by one from Python they leave the GPU idle
between them. A graph launches them all at once. Lengths, slots and block tables are read by the kernels from fixed
buffers, so one graph serves any lengths at its batch size; a smaller batch runs padded (slot -1, length 0). Steps whose
sequences share a prefix launch other kernels: their graphs are captured when the first such step of a size comes, since
most services never see one. (The 20 ordinary ones take 1.05 s of a start of Qwen3-0.6B on an H200.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tritonllm.engine.batch import HostBatch, SamplingInputs, upload, upload_cascade
from tritonllm.engine.graph_capture import GraphCapture
from tritonllm.engine.input_buffer import InputBuffer
from tritonllm.kernels import CascadePlan
from tritonllm.kernels.attention.cascade import cascade_parts
from tritonllm.layers.metadata import AttentionMetadata

# (input_ids, positions, metadata, sampling) -> (hidden, new tokens)
Step = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, SamplingInputs], tuple[torch.Tensor, torch.Tensor]]

_COLUMNS = {  # one number a sequence
    "positions": torch.int64,
    "slot_mapping": torch.int64,
    "seeds": torch.int64,
    "steps": torch.int64,
    "input_ids": torch.int32,
    "seq_lens": torch.int32,
    "decode_order": torch.int32,
    "top_k": torch.int32,
    "temperature": torch.float32,
    "top_p": torch.float32,
    "min_p": torch.float32,
}


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense where padding would cost most, then every 16."""
    sizes = [n for n in (1, 2, 4, 8) if n <= max_num_seqs]
    sizes += range(16, max_num_seqs + 1, 16)
    return sizes if sizes[-1] == max_num_seqs else [*sizes, max_num_seqs]


def padded(n: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes that holds ``n`` rows; 0 for none.

    Logits are computed of so many rows, also in steps that are not captured: with the rows cuBLAS changes kernels, and
    loads each when it first comes, which waits for all that the device is doing. These have come in the captures.
    """
    return next(size for size in (0, *sizes) if size >= n)


def _fill(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` into the first rows and columns of ``buffer``, and zeros into its other rows."""
    buffer[tuple(slice(length) for length in values.shape)].copy_(values)
    if len(values) < len(buffer):
        buffer[len(values) :].zero_()


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    tokens: torch.Tensor


class DecodeGraphs:
    """Captured decode steps.

    Args:
        step: ``(input_ids, positions, metadata, sampling) -> (hidden, tokens)``.
        max_num_seqs: the largest batch.
        max_blocks: the widest block table.
        device: a CUDA device.
        may_share: whether a step of so many sequences can come with a plan for their shared prefix.
        capture: what captures.
    """

    def __init__(
        self,
        step: Step,
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        may_share: Callable[[int], bool],
        capture: GraphCapture,
    ) -> None:
        self._device = device
        self._columns = InputBuffer({name: (dtype, max_num_seqs) for name, dtype in _COLUMNS.items()}, device)
        self._padding = {"slot_mapping": -1, "top_p": 1.0}  # and 0 in the other columns
        self._tables = torch.zeros(max_num_seqs, max_blocks, dtype=torch.int32, device=device)
        self._loaded = np.empty((0, 0), dtype=np.int32)
        self._no_prefill = torch.zeros(1, dtype=torch.int32, device=device)
        self._suffix_tables = torch.zeros_like(self._tables)
        self._suffix_lens = torch.zeros_like(self._columns.tensors["seq_lens"])
        self._shares = torch.zeros(max_num_seqs, dtype=torch.bool, device=device)
        self._sizes = graph_sizes(max_num_seqs)
        self._plans = {size: self._plan(size) for size in self._sizes if may_share(size)}
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._step = step
        self._capture_graph = capture
        for size in reversed(self._sizes):  # the largest first: the others then fit into its memory
            self._graphs[size, False] = self._capture(size, shared=False)

    def __len__(self) -> int:
        return len(self._graphs)

    def _capture(self, size: int, *, shared: bool) -> _Captured:
        """Capture the step on what is in the buffers.

        The rehearsal before it may come in the middle of service. It puts tokens in the place of pending ids, as the
        replay would have; what else it writes (keys, values, drawn tokens) the replay that follows writes again.
        """
        inputs = self._inputs(size, self._plans[size] if shared else None)
        graph, (hidden, tokens) = self._capture_graph(lambda: self._step(*inputs))
        return _Captured(graph, hidden, tokens)

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

    def _inputs(
        self, size: int, plan: CascadePlan | None
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata, SamplingInputs]:
        columns = {name: tensor[:size] for name, tensor in self._columns.tensors.items()}
        metadata = AttentionMetadata(
            slot_mapping=columns["slot_mapping"],
            block_tables=self._tables[:size],
            seq_lens=columns["seq_lens"],
            cu_seqlens_q=self._no_prefill,
            num_decodes=size,
            max_seqlen_q=0,
            decode_order=columns["decode_order"],
            cascade=plan,
        )
        return columns["input_ids"], columns["positions"], metadata, self.sampling_inputs(size)

    def sampling_inputs(self, n: int) -> SamplingInputs:
        """Those of the first ``n`` sequences of the batch that ran last."""
        names = SamplingInputs.__dataclass_fields__
        return SamplingInputs(**{name: self._columns.tensors[name][:n] for name in names})

    def _write(self, columns: Mapping[str, np.ndarray], batch: HostBatch) -> None:
        n = len(batch.input_ids)
        for name, column in columns.items():
            column[:n] = getattr(batch, name)
            column[n:] = self._padding.get(name, 0)
        columns["decode_order"][n:] = np.arange(n, len(columns["decode_order"]))

    def _load_tables(self, tables: np.ndarray) -> None:
        """Rows and columns beyond these keep what they had: no length reaches there."""
        if np.array_equal(tables, self._loaded):  # most steps of a small batch: no block has been filled
            return
        (there,) = upload([tables], self._device)
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(there)
        self._loaded = tables  # not before: an exception on the way would leave other tables there

    def run(self, batch: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states ``[B or more, hidden]`` and new tokens ``[B]`` of B decodes, valid until the next run."""
        n = len(batch.input_ids)
        size = padded(n, self._sizes)
        self._columns.load(lambda columns: self._write(columns, batch))
        self._load_tables(batch.block_tables)
        cascade = upload_cascade(batch.cascade, self._device)
        if cascade is not None:
            mine = self._plans[size]
            new = cascade._replace(prefix_cu_seqlens=mine.prefix_cu_seqlens)  # its own counts the padding
            for buffer, values in zip(mine, new, strict=True):
                _fill(buffer, values)
        key = size, cascade is not None
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, shared=cascade is not None)
        captured = self._graphs[key]
        captured.graph.replay()
        return captured.hidden, captured.tokens[:n]
