"""Steps with prompt tokens beside decodes, as CUDA graphs.

Launching a step kernel by kernel takes the host about 1 ms a layer. The GPU computes faster than that up to some
thousand tokens, and a small model's largest step: of the prefill in W1 (Qwen3-0.6B, steps of 8192 tokens) an H200 was
idle for a third. So steps are captured up to the size from which on the GPU takes longer. (All at the start: the two
large ones of Qwen3-0.6B take 0.07 s, which the first long prompts would wait for.)

A captured step has room for ``decodes`` sequences that decode and ``tokens`` prompt tokens; both are padded. A padded
decode has length 0 (it computes nothing). The padded prompt tokens are dealt out to the chunks that are not there: they
read whatever lies in block 0 and store nothing, so every row of the step is an ordinary, finite one.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from tritonllm.engine.batch import HostBatch, empty_batch, upload
from tritonllm.engine.cuda_graphs import graph_sizes, padded
from tritonllm.engine.graph_capture import GraphCapture
from tritonllm.engine.input_buffer import InputBuffer
from tritonllm.layers.metadata import AttentionMetadata

# (input_ids, positions, metadata, rows that are wanted) -> hidden
Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor], torch.Tensor]

SMALL = (64, 256, 1024)  # prompt tokens of captured steps
LARGE = (4096,)  # and, beside the largest step, of those that are worth it only where the host is what takes longer
_EMPTY = empty_batch()


def decode_sizes(max_num_seqs: int, tokens: int) -> list[int]:
    """Room for decodes in captured steps: few sizes, since a padded one costs little; beside many tokens nothing."""
    return [*(n for n in (8, 64) if n < max_num_seqs and tokens <= SMALL[-1]), max_num_seqs]


def token_sizes(budget: int, host_bound: int) -> list[int]:
    """Room for prompt tokens in captured steps.

    Args:
        budget: most tokens of a step.
        host_bound: tokens of a step from which on the GPU takes longer than the host for its launches.
    """
    large = (n for n in sorted({*LARGE, budget}) if SMALL[-1] < n <= min(budget, host_bound))
    return [*(n for n in SMALL if n <= budget), *large]


def chunk_capacity(tokens: int) -> int:
    """Room for prompt chunks in a captured step, the padding's among them."""
    return 16 if tokens <= SMALL[-1] else 64


class MixedGraphs:
    """Captured steps of prompt chunks and decodes.

    Args:
        forward: ``(input_ids, positions, metadata, rows) -> hidden``.
        max_num_seqs: most sequences of a step.
        sizes: room for prompt tokens, see :func:`token_sizes`.
        max_blocks: the widest block table.
        block_size: tokens of a block.
        device: a CUDA device.
        capture: what captures.
    """

    def __init__(
        self,
        forward: Forward,
        max_num_seqs: int,
        sizes: Sequence[int],
        max_blocks: int,
        block_size: int,
        device: torch.device,
        capture: GraphCapture,
    ) -> None:
        self._forward = forward
        self._capture_graph = capture
        self._device = device
        self._longest = max_blocks * block_size
        sizes = [tokens for tokens in sizes if tokens <= chunk_capacity(tokens) * self._longest]  # all may be padding
        self._rooms = [(decodes, tokens) for tokens in sizes for decodes in decode_sizes(max_num_seqs, tokens)]
        most = max(sizes, default=0)
        rows, sequences = max_num_seqs + most, max_num_seqs + chunk_capacity(most)
        self._sampled = graph_sizes(max_num_seqs)
        self._buffer = InputBuffer(
            {
                "positions": (torch.int64, rows),
                "slot_mapping": (torch.int64, rows),
                "logit_rows": (torch.int64, max_num_seqs),
                "input_ids": (torch.int32, rows),
                "seq_lens": (torch.int32, sequences),
                "decode_order": (torch.int32, max_num_seqs),
                "cu_seqlens_q": (torch.int32, chunk_capacity(most) + 1),
            },
            device,
        )
        self._tables = torch.zeros(sequences, max_blocks, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        for room in reversed(self._rooms):  # the largest first: the others then fit into its memory
            self._capture(room)

    def __len__(self) -> int:
        return len(self._graphs)

    def _capture(self, room: tuple[int, int]) -> None:
        decodes, tokens = room
        chunks, t = chunk_capacity(tokens), self._buffer.tensors
        metadata = AttentionMetadata(
            slot_mapping=t["slot_mapping"][: decodes + tokens],
            block_tables=self._tables[: decodes + chunks],
            seq_lens=t["seq_lens"][: decodes + chunks],
            cu_seqlens_q=t["cu_seqlens_q"][: chunks + 1],
            num_decodes=decodes,
            max_seqlen_q=tokens,
            decode_order=t["decode_order"][:decodes],
        )
        ids, positions = t["input_ids"][: decodes + tokens], t["positions"][: decodes + tokens]
        sampled = padded(min(decodes + chunks, self._sampled[-1]), self._sampled)
        inputs = ids, positions, metadata, t["logit_rows"][:sampled]
        self._load(_EMPTY, room)
        self._graphs[room] = self._capture_graph(lambda: self._forward(*inputs))

    def room_for(self, batch: HostBatch) -> tuple[int, int] | None:
        """The smallest (decodes, tokens) that holds a batch; ``None`` if there is none, if the batch shares keys, or if
        the hidden states of all its tokens are wanted."""
        n, chunks = batch.num_decodes, len(batch.cu_seqlens_q) - 1
        used = len(batch.input_ids) - n
        if batch.cascade is not None or batch.whole or chunks == 0:
            return None
        for decodes, tokens in self._rooms:
            free = chunk_capacity(tokens) - chunks
            if n <= decodes and used <= tokens and free > 0 and tokens - used <= free * self._longest:
                return decodes, tokens
        return None

    def run(self, batch: HostBatch, room: tuple[int, int]) -> torch.Tensor:
        """Hidden states ``[R or more, hidden]``, first those of the batch's ``logit_rows``, valid until the next run.

        Args:
            room: what :meth:`room_for` said.
        """
        self._load(batch, room)
        graph, hidden = self._graphs[room]
        graph.replay()
        return hidden[: padded(len(batch.logit_rows), self._sampled)]

    def _load(self, batch: HostBatch, room: tuple[int, int]) -> None:
        decodes, tokens = room
        self._buffer.load(lambda columns: _write(columns, batch, decodes, tokens))
        n, sequences, width = batch.num_decodes, *batch.block_tables.shape
        (tables,) = upload([batch.block_tables], self._device)
        self._tables[:n, :width].copy_(tables[:n])
        self._tables[decodes : decodes + sequences - n, :width].copy_(tables[n:])
        self._tables[decodes + sequences - n :].zero_()  # the padding reads block 0


def _write(columns: Mapping[str, np.ndarray], batch: HostBatch, decodes: int, tokens: int) -> None:
    """Decodes, room for more of them, prompt tokens, and room for more of those."""
    n, chunks, capacity = batch.num_decodes, len(batch.cu_seqlens_q) - 1, chunk_capacity(tokens)
    used = len(batch.input_ids) - n
    for name, padding in (("positions", 0), ("input_ids", 0), ("slot_mapping", -1)):
        column, values = columns[name], getattr(batch, name)
        column[:] = padding
        column[:n] = values[:n]
        column[decodes : decodes + used] = values[n:]
    lengths, starts, rows = (columns[name] for name in ("seq_lens", "cu_seqlens_q", "logit_rows"))
    rows[:] = 0  # nobody looks at it
    rows[: len(batch.logit_rows)] = np.where(batch.logit_rows < n, batch.logit_rows, batch.logit_rows + decodes - n)
    starts[: chunks + 1] = batch.cu_seqlens_q
    starts[chunks : capacity + 1] = np.linspace(used, tokens, capacity + 1 - chunks).astype(np.int32)
    starts[capacity + 1 :] = tokens
    columns["decode_order"][:] = np.arange(len(columns["decode_order"]))
    columns["decode_order"][:n] = batch.decode_order
    lengths[:] = 0
    lengths[:n] = batch.seq_lens[:n]
    lengths[decodes : decodes + chunks] = batch.seq_lens[n:]
    lengths[decodes + chunks : decodes + capacity] = np.diff(starts[chunks : capacity + 1])
