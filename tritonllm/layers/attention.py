"""Attention over the paged cache: project, normalise, rotate, store, attend, project."""

import torch
from torch import nn

from tritonllm.kernels import apply_rope, paged_decode_attention, store_kv, varlen_prefill_attention
from tritonllm.layers.linear import Linear
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.norm import RMSNorm


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values.

    Args:
        qk_norm_eps: normalise each head of the queries and keys before the rotation, with this epsilon.
        window: each token sees this many keys, itself included; ``None`` for all.
        interleaved: rotate neighbouring elements instead of the two halves of a head.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,
        window: int | None,
        interleaved: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        self.window = window
        self.interleaved = interleaved
        self.qkv = Linear(hidden_size, sum(self.heads) * head_size, bias=qkv_bias, dtype=dtype, device=device)
        self.o = Linear(num_heads * head_size, hidden_size, bias=o_bias, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_size, qk_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(head_size, qk_norm_eps, dtype=dtype, device=device)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCacheView,
    ) -> torch.Tensor:
        """Attend from ``x[T, hidden]`` at ``positions[T]``; writes the new keys and values into ``kv_cache``.

        Returns:
            ``[T, hidden]``.
        """
        qkv = self.qkv(x).unflatten(1, (sum(self.heads), self.head_size))
        q, k, v = qkv.split(self.heads, dim=1)  # views: the three kernels below work in place
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.normalize_(q)
            self.k_norm.normalize_(k)
        apply_rope(q, k, positions, cos_sin_cache, interleaved=self.interleaved)
        store_kv(k, v, kv_cache.k, kv_cache.v, metadata.slot_mapping)
        return self.o(self._attend(q, metadata, kv_cache).flatten(1))

    def _attend(self, q: torch.Tensor, metadata: AttentionMetadata, kv_cache: KVCacheView) -> torch.Tensor:
        """``q[T, H, D]`` -> ``[T, H, D]``: decodes in one launch, prefill chunks in another, each only if there."""
        n = metadata.num_decodes
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n > 0:
            paged_decode_attention(
                q[:n],
                kv_cache.k,
                kv_cache.v,
                metadata.block_tables[:n],
                metadata.seq_lens[:n],
                window=self.window,
                out=out[:n],
            )
        if n < q.shape[0]:
            varlen_prefill_attention(
                q[n:],
                kv_cache.k,
                kv_cache.v,
                metadata.block_tables[n:],
                metadata.cu_seqlens_q,
                metadata.seq_lens[n:],
                max_seqlen_q=metadata.max_seqlen_q,
                window=self.window,
                out=out[n:],
            )
        return out
