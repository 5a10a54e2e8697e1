"""What a rotary position embedding is, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tritonllm.kernels.elementwise.rope_cache import build_cos_sin_cache


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding.

    Attributes:
        base: the base of the geometric series of wavelengths.
        rotary_dim: how many leading elements of each head are rotated.
        trained_length: positions that the model was trained on, unless ``scaling`` says otherwise.
        scaling: ``rope_type`` and its parameters, as in ``config.json``; empty for none.
        interleaved: pairs are neighbours instead of halves.
        backwards: pairs turn the other way round (NanoChat).
    """

    base: float
    rotary_dim: int
    trained_length: int
    scaling: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    backwards: bool = False

    def table(self, max_position: int, device: torch.device | None = None) -> torch.Tensor:
        """``[max_position, rotary_dim]`` float32: what :func:`~tritonllm.kernels.apply_rope` reads.

        Raises:
            ValueError: a rope type that is not supported, or parameters that do not fit it.
        """
        table = build_cos_sin_cache(
            self.rotary_dim,
            max_position,
            self.base,
            self.scaling,
            max_position_embeddings=self.trained_length,
            device=device,
        )
        if self.backwards:
            table[:, self.rotary_dim // 2 :].neg_()
        return table
