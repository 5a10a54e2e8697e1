"""What attention needs to know of a step: built once by the runner, passed as an argument through every layer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tritonllm.kernels import CascadePlan, DecodeStep
from tritonllm.layers.local_keys import LocalKeys
from tritonllm.layers.segments import Segments


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch, or the room that a captured step has for one: its tensors are settled when attention begins.

    Shapes: T tokens, B sequences, D of them decodes, V verified, C chunks, M blocks per sequence. A batch padded for a
    CUDA graph has ``seq_lens`` 0 and ``slot_mapping`` -1 in its padding.

    Attributes:
        segments: how many sequences and tokens are decodes, verified, chunks.
        slot_mapping: ``[T]`` int64, where each token's key and value go; -1 stores nothing.
        block_tables: ``[B, M]`` int32.
        seq_lens: ``[B]`` int32, keys of each sequence, this step's tokens included.
        cu_seqlens_q: ``[C + 1]`` int32, first query of each prompt chunk, counted from the first token of a chunk.
        verify_starts: ``[V + 1]`` int32, the same of the verified sequences; ``None`` if there are none.
        tree_mask: ``[tokens of the verified sequences]`` int32, what each sees of its sequence's new tokens if drafts
            form a tree (:func:`~tritonllm.kernels.paged_verify_attention`); ``None``: those before it.
        decode_order: ``[D]`` int32, the decodes from the longest to the shortest: the order in which attention shares
            them out; ``None`` if nobody has sorted them.
        cascade: where the decodes' keys are if some of them begin with the same blocks, and it pays to read those once.
        row_marks: ``[R]`` int32, of the rows that are wanted of the step: negative in padding (:meth:`marks`).
        max_decode_len: a bound of the decodes' keys, which chooses kernels (:mod:`tritonllm.layers.regime`); ``None``:
            what the tables have room for.
        local: which keys are this rank's, where ranks split them (:mod:`tritonllm.layers.context`); ``None``: all.
        of_chunks: the same step as layers read it that see one chunk of the sequence
            (:mod:`tritonllm.layers.attention_chunks`); ``None`` if there are none.
        stored: is told of each layer, by number, when the launches that store its keys and values are made; ``None``:
            nobody listens. Of a captured step this is while it is captured.
        exchange_rows: where engines share experts (:mod:`tritonllm.layers.exchanged_rows`), room for the rows of a rank
            in the exchanges of this step: the same number on all ranks, and at least T and R of each. 0: as many as
            this step has, where all ranks' steps have the same room.
    """

    segments: Segments
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    verify_starts: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    decode_order: torch.Tensor | None = None
    cascade: CascadePlan | None = None
    max_decode_len: int | None = None
    row_marks: torch.Tensor | None = None
    local: LocalKeys | None = None
    of_chunks: "AttentionMetadata | None" = None
    stored: Callable[[int], None] | None = None
    exchange_rows: int = 0
    _starts: list[torch.Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    _bound: list[DecodeStep] = field(default_factory=list, init=False, repr=False, compare=False)

    def marks(self, *, wanted: bool) -> torch.Tensor:
        """``[T]`` int64, or of the rows that are ``wanted`` of the step ``[R]`` int32: negative in padding; for those
        who count tokens (:mod:`tritonllm.layers.expert_counts`) or send them
        (:mod:`tritonllm.layers.exchanged_rows`)."""
        if not wanted:
            return self.slot_mapping
        assert self.row_marks is not None  # `make_batch` sets them
        return self.row_marks

    def decode_starts(self) -> torch.Tensor:
        """``[D + 1]`` int32, the first query of each decode, as of other segments: made when a layer first asks."""
        if not self._starts:
            count, device = self.segments.decode.sequences + 1, self.seq_lens.device
            self._starts.append(torch.arange(count, dtype=torch.int32, device=device))
        return self._starts[0]

    def decode_step(self, positions: torch.Tensor) -> DecodeStep:
        """The step's decodes, at ``positions[D]``, for all layers: bound when the first one asks. All tokens decode."""
        if not self._bound:
            # settled: within a step only the projection's rows are new to a layer
            limits = {"order": self.decode_order, "max_seqlen_k": self.max_decode_len}
            tables = self.slot_mapping, self.block_tables, self.seq_lens
            self._bound.append(DecodeStep(*tables, positions, settled=True, **limits))
        return self._bound[0]


class CacheShape(NamedTuple):
    """What a layer keeps of a token: a key and a value of ``size`` elements for each of ``heads``."""

    heads: int
    size: int

    @property
    def elements(self) -> int:
        """Elements of a token's keys and values."""
        return 2 * self.heads * self.size


class KVScales(NamedTuple):
    """Numbers by which a layer's keys and values are divided before they are stored, for a cache of a narrow dtype."""

    k_scale: float = 1.0
    v_scale: float = 1.0


UNSCALED = KVScales()


@dataclass(frozen=True)
class KVCacheView:
    """One layer's paged keys and values.

    Attributes:
        k, v: each ``[P, S, K, D]``.
        workspace: zeros that all layers' decode attention may share, see
            :func:`~tritonllm.kernels.paged_decode_attention`; ``None`` makes new ones in each call.
        divided_by: the scales of what lies in the cache.
    """

    k: torch.Tensor
    v: torch.Tensor
    workspace: torch.Tensor | None = None
    divided_by: KVScales = UNSCALED

    @property
    def scales(self) -> dict[str, float]:
        """The scales as keywords of the kernels that write or read this cache."""
        return self.divided_by._asdict()
