"""Steps with a few prompt tokens beside decodes, as CUDA graphs.

Launching a step kernel by kernel takes the host about 8 us a kernel; below some thousand tokens a small model computes
faster than that. A captured step has room for ``decodes`` sequences that decode and ``tokens`` prompt tokens; both are
padded. A padded decode has length 0 (it computes nothing), and the padded prompt tokens are one more sequence, which
reads whatever lies in block 0 and stores nothing: so every row of the step is an ordinary, finite one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tritonllm.engine.batch import HostBatch, empty_batch, upload
from tritonllm.engine.input_buffer import InputBuffer
from tritonllm.layers.metadata import AttentionMetadata

# (input_ids, positions, metadata, seats of the decodes) -> hidden
Forward = Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor], torch.Tensor]

TOKENS = (64, 256, 1024)
CHUNKS = 16  # prompt chunks in a step, the padding's among them
_EMPTY = empty_batch()


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Room for decodes in captured steps: a few sizes, since a padded one costs little."""
    return [*(n for n in (8, 64) if n < max_num_seqs), max_num_seqs]


class MixedGraphs:
    """Captured steps of prompt chunks and decodes.

    Args:
        forward: ``(input_ids, positions, metadata, seats) -> hidden``.
        max_num_seqs: most sequences of a step.
        max_tokens: most prompt tokens of a step.
        max_blocks: the widest block table.
        block_size: tokens of a block.
        device: a CUDA device.
    """

    def __init__(
        self,
        forward: Forward,
        max_num_seqs: int,
        max_tokens: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._decodes = decode_sizes(max_num_seqs)
        self._tokens = [n for n in TOKENS if n <= min(max_tokens, max_blocks * block_size)]
        rows, sequences = max_num_seqs + max(self._tokens, default=0), max_num_seqs + CHUNKS
        self._buffer = InputBuffer(
            {
                "positions": (torch.int64, rows),
                "slot_mapping": (torch.int64, rows),
                "seats": (torch.int64, max_num_seqs),
                "input_ids": (torch.int32, rows),
                "seq_lens": (torch.int32, sequences),
                "cu_seqlens_q": (torch.int32, CHUNKS + 1),
            },
            device,
        )
        self._tables = torch.zeros(sequences, max_blocks, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        for tokens in reversed(self._tokens):
            for decodes in reversed(self._decodes):
                self._capture(forward, decodes, tokens, pool)

    def _capture(self, forward: Forward, decodes: int, tokens: int, pool: Any) -> None:
        t = self._buffer.tensors
        metadata = AttentionMetadata(
            slot_mapping=t["slot_mapping"][: decodes + tokens],
            block_tables=self._tables[: decodes + CHUNKS],
            seq_lens=t["seq_lens"][: decodes + CHUNKS],
            cu_seqlens_q=t["cu_seqlens_q"],
            num_decodes=decodes,
            max_seqlen_q=tokens,
        )
        inputs = t["input_ids"][: decodes + tokens], t["positions"][: decodes + tokens], metadata, t["seats"][:decodes]
        self._load(_EMPTY, decodes, tokens)
        forward(*inputs)  # compiles and loads whatever the capture must not
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            hidden = forward(*inputs)
        self._graphs[decodes, tokens] = graph, hidden

    def room_for(self, batch: HostBatch) -> tuple[int, int] | None:
        """The smallest captured (decodes, tokens) that holds a batch; ``None`` if it is too large, or shares keys."""
        n, chunks = batch.num_decodes, len(batch.cu_seqlens_q) - 1
        if batch.cascade is not None or not 0 < chunks < CHUNKS:
            return None
        decodes = next((size for size in self._decodes if size >= n), None)
        tokens = next((size for size in self._tokens if size >= len(batch.input_ids) - n), None)
        return None if decodes is None or tokens is None else (decodes, tokens)

    def run(self, batch: HostBatch, room: tuple[int, int]) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` of the batch's tokens, in their order.

        Args:
            room: what :meth:`room_for` said.
        """
        decodes, tokens = room
        n, prompt_tokens = batch.num_decodes, len(batch.input_ids) - batch.num_decodes
        self._load(batch, decodes, tokens)
        graph, hidden = self._graphs[room]
        graph.replay()
        return torch.cat((hidden[:n], hidden[decodes : decodes + prompt_tokens]))

    def _load(self, batch: HostBatch, decodes: int, tokens: int) -> None:
        self._buffer.load(lambda columns: _write(columns, batch, decodes, tokens))
        n, sequences, width = batch.num_decodes, *batch.block_tables.shape
        (tables,) = upload([batch.block_tables], self._device)
        self._tables[:n, :width].copy_(tables[:n])
        self._tables[decodes : decodes + sequences - n, :width].copy_(tables[n:])
        self._tables[decodes + sequences - n].zero_()  # the padding reads block 0


def _write(columns: Mapping[str, np.ndarray], batch: HostBatch, decodes: int, tokens: int) -> None:
    """Decodes, room for more of them, prompt tokens, and room for more of those."""
    n, chunks = batch.num_decodes, len(batch.cu_seqlens_q) - 1
    used = len(batch.input_ids) - n
    for name, padding in (("positions", 0), ("input_ids", 0), ("slot_mapping", -1)):
        column, values = columns[name], getattr(batch, name)
        column[:] = padding
        column[:n] = values[:n]
        column[decodes : decodes + used] = values[n:]
    seats, lengths, starts = columns["seats"], columns["seq_lens"], columns["cu_seqlens_q"]
    seats[:] = 0  # nobody asks for the last token of a padded decode
    seats[:n] = batch.seats[:n]
    lengths[:] = 0
    lengths[:n] = batch.seq_lens[:n]
    lengths[decodes : decodes + chunks] = batch.seq_lens[n:]
    lengths[decodes + chunks] = tokens - used
    starts[: chunks + 1] = batch.cu_seqlens_q
    starts[chunks + 1 :] = tokens
