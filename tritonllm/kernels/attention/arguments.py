"""What attention's operators and launchers take together: each list once for decode, verify, prefill and fusions."""

from typing import NamedTuple

import torch


class Queries(NamedTuple):
    """Tokens of B sequences, and what they see; as of ``varlen_prefill_attention`` and ``paged_verify_attention``."""

    q: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None  # None: a token each, the last
    max_seqlen_q: int = 1
    causal: bool = True
    tree_mask: torch.Tensor | None = None


class Slots(NamedTuple):
    """Where the keys and values of new tokens go; as of ``store_kv``."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor


class Pages(NamedTuple):
    """Where the keys and values of B sequences are; as of ``paged_decode_attention``."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        """As kernels take them: of keys and of values those of block, slot and head; of block tables that of a row."""
        return *self.k_cache.stride()[:3], *self.v_cache.stride()[:3], self.block_tables.stride(0)


class Options(NamedTuple):
    """What a layer asks of attention, as the public functions take it; see ``paged_decode_attention``."""

    scale: float | None = None
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None


class AttentionArgs(NamedTuple):
    """What is written, and the options once they are checked."""

    out: torch.Tensor
    lse: torch.Tensor | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    scale: float  # of the logits, with k_scale if that is a number
    v_factor: float  # v_scale if that is a number
    window: int  # 0: none, as kernels take it; everywhere else that is None
    softcap: float  # 0: none


class Hints(NamedTuple):
    """What a step offers to its launches, and no result depends on; see ``paged_decode_attention``."""

    workspace: torch.Tensor | None
    settled: bool = False
    order: torch.Tensor | None = None
    max_seqlen_k: int | None = None

    def most_keys(self, pages: Pages) -> int:
        """How many keys a sequence has at most: what the caller expects, or else what the tables have room for."""
        if self.max_seqlen_k is not None:
            return self.max_seqlen_k
        return pages.block_tables.shape[1] * pages.k_cache.shape[1]


class Heads(NamedTuple):
    """How the heads of a projection are normalised and turned; see ``qk_norm_rope_store``."""

    positions: torch.Tensor | None
    cos_sin_cache: torch.Tensor | None
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    weight_offset: float
    interleaved: bool
    batch_invariant: bool = False  # a head is summed in one order, however many tokens there are


class Scales(NamedTuple):
    """The scales of the caches: a tensor with one for each head, and else a number."""

    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    k_factor: float
    v_factor: float

    @property
    def given(self) -> bool:
        return self.k_scale is not None or self.v_scale is not None or self.k_factor != 1 or self.v_factor != 1

    def divide(self, dtype: torch.dtype, cache: torch.Tensor) -> bool:
        """Whether what is stored in ``cache``, of rows of ``dtype``, is divided. In a narrow cache always: its scales
        are read with the weights, and what is compiled must be known before."""
        return self.given or cache.dtype != dtype
