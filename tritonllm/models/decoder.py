"""The one decoder: every supported architecture is a :class:`ModelSpec` over this module."""

from collections.abc import Sequence

import torch
from torch import nn

from tritonllm.layers.attention import Attention
from tritonllm.layers.linear import Embedding
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.mlp import GatedMLP
from tritonllm.layers.norm import RMSNorm
from tritonllm.models.spec import ModelSpec


class DecoderLayer(nn.Module):
    """Attention, then the MLP, each after a norm that also adds what came before to the residual stream."""

    def __init__(self, spec: ModelSpec, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.attention = Attention(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            qkv_bias=spec.qkv_bias,
            o_bias=spec.o_bias,
            qk_norm_eps=spec.norm_eps if spec.qk_norm else None,
            window=spec.sliding_window[index],
            interleaved=spec.rope.interleaved,
            dtype=dtype,
            device=device,
        )
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(
            spec.hidden_size,
            spec.intermediate_size,
            activation=spec.activation,
            bias=spec.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: KVCacheView,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x[T, hidden]``, not yet added to the stream, and the stream -> the same two of the next layer."""
        x, residual = self.attention_norm(x, residual)
        x = self.attention(x, positions, cos_sin_cache, metadata, kv_cache)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Token ids -> hidden states -> logits, over a paged cache.

    Weights are allocated on ``device`` once and not initialised: :mod:`tritonllm.models.weights` fills them.

    Args:
        spec: the model.
        dtype: of the weights and activations; norms, rotations and softmax compute in float32.
        device: where the weights are.
        max_model_len: positions go from 0 to ``max_model_len - 1``.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(spec, i, dtype=dtype, device=device) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype=dtype, device=device)
        self.lm_head = self.embed
        if not spec.tie_word_embeddings:
            self.lm_head = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.register_buffer("cos_sin_cache", spec.rope.table(max_model_len, device), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
    ) -> torch.Tensor:
        """Run one step.

        Args:
            input_ids: ``[T]`` int32 or int64, decodes first.
            positions: ``[T]`` int64, each token's place in its sequence.
            metadata: the batch.
            kv_cache: one view per layer; the step's keys and values are written into it.

        Returns:
            ``[T, hidden]`` after the last norm, for :meth:`compute_logits`.
        """
        x, residual = self.embed(input_ids), None
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            x, residual = layer(x, residual, positions, self.cos_sin_cache, metadata, layer_cache)
        return self.norm(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden[N, hidden]``, the rows that need logits -> ``[N, vocab]`` float32."""
        return self.lm_head.logits(hidden)
