"""What attention needs to know of a step: built once by the runner, passed as an argument through every layer."""

from dataclasses import dataclass

import torch

from tritonllm.kernels import CascadePlan


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch. Decodes (one token each) come first, then prefill chunks.

    Shapes: T tokens, B sequences, M blocks per sequence. A batch padded for a CUDA graph has ``seq_lens`` 0 and
    ``slot_mapping`` -1 in its padding.

    Attributes:
        slot_mapping: ``[T]`` int64, where each token's key and value go; -1 stores nothing.
        block_tables: ``[B, M]`` int32.
        seq_lens: ``[B]`` int32, keys of each sequence, this step's tokens included.
        cu_seqlens_q: ``[B - num_decodes + 1]`` int32, first query of each prefill chunk, counted from the first
            prefill token.
        num_decodes: how many of the B sequences are decodes; equally, how many leading tokens.
        max_seqlen_q: upper bound of the longest prefill chunk; 0 if there is none.
        decode_order: ``[num_decodes]`` int32, the decodes from the longest to the shortest: the order in which
            attention shares them out; ``None`` if nobody has sorted them.
        cascade: where the decodes' keys are if some of them begin with the same blocks, and it pays to read those once.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    num_decodes: int
    max_seqlen_q: int
    decode_order: torch.Tensor | None = None
    cascade: CascadePlan | None = None


@dataclass(frozen=True)
class KVCacheView:
    """One layer's paged keys and values.

    Attributes:
        k, v: each ``[P, S, K, D]``.
        workspace: zeros that all layers' decode attention may share, see
            :func:`~tritonllm.kernels.paged_decode_attention`; ``None`` makes new ones in each call.
    """

    k: torch.Tensor
    v: torch.Tensor
    workspace: torch.Tensor | None = None
