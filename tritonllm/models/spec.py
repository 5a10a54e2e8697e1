"""A model as data: everything the decoder needs to know, and nothing about how files spell it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tritonllm.kernels.rope_cache import build_cos_sin_cache

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding.

    Attributes:
        base: of the geometric series of wavelengths.
        rotary_dim: leading elements of each head that are rotated.
        trained_length: positions that the model was trained on, unless ``scaling`` says otherwise.
        scaling: ``rope_type`` and its parameters, as in ``config.json``; empty for none.
        interleaved: pairs are neighbours instead of halves.
    """

    base: float
    rotary_dim: int
    trained_length: int
    scaling: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False

    def table(self, max_position: int, device: torch.device | None = None) -> torch.Tensor:
        """``[max_position, rotary_dim]`` float32: what :func:`~tritonllm.kernels.apply_rope` reads.

        Raises:
            ValueError: a rope type that is not supported, or parameters that do not fit it.
        """
        return build_cos_sin_cache(
            self.rotary_dim,
            max_position,
            self.base,
            self.scaling,
            max_position_embeddings=self.trained_length,
            device=device,
        )


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer with a residual stream, RMS norms, rotary positions and gated MLPs.

    Attributes:
        architecture: its name in ``config.json``.
        head_size: elements of one head; ``num_heads * head_size`` may differ from ``hidden_size``.
        max_position_embeddings: most tokens of a sequence, position scaling included.
        norm_eps: of every norm.
        activation: one of ``ACTIVATIONS``.
        qkv_bias: of the query, key and value projections.
        o_bias: of attention's output projection.
        mlp_bias: of all three projections of the MLP.
        qk_norm: queries and keys are normalised per head, before the rotation.
        sliding_window: per layer, how many keys a token sees, itself included; ``None`` for all.
        tie_word_embeddings: the output projection is the embedding table.
        eos_token_ids: tokens that end a sequence.
        dtype: of the checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_size % 8 or not 16 <= self.head_size <= 512:
            raise ValueError(f"head_size must be a multiple of 8 from 16 to 512, got {self.head_size}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if len(self.sliding_window) != self.num_layers:
            raise ValueError(
                f"sliding_window must have one entry for each of {self.num_layers} layers, got {self.sliding_window}"
            )
