"""Products of rows and a weight of 8 bits, both rounded: by what tiles, or by torch."""

from dataclasses import dataclass

import torch

from autotune.narrow import NarrowFormat
from autotune.ops import Tunable, product
from autotune.ops.dense import linear as plain
from autotune.ops.dense.linear_narrow import NarrowProduct
from autotune.problem import Inputs
from tritonllm.kernels import Weight, linear_ref
from tritonllm.kernels.dense import rounded
from tritonllm.kernels.dense.choice import MANY, TORCH, default_rounded_config
from tritonllm.kernels.dense.portable import tiles
from tritonllm.kernels.elementwise import activation, norm, quantized
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class RoundedProduct(NarrowProduct):
    """``m`` rows with a weight ``[n, k]`` in the format ``of``, to which they are rounded."""

    @property
    def name(self) -> str:
        return super().name.replace("linear_narrow", "linear_rounded", 1)

    def _weight(self, x: Inputs) -> Weight:
        return super()._weight(x)._replace(rounds_rows=True)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        fused = self._fused(x)
        if self.residual:
            fused["residual"] = x["residual"].float()
        return (linear_ref(x["x"], self._weight(x), **fused),)


def space(m: int, n: int, k: int) -> list[tuning.Config]:
    """Tiles with the weight as the left operand, which is read as it lies; of one block of rows in parts along K."""
    tile = {"kernel": "tiles", "TURNED": True}
    if m > tiles.MAX_BLOCK_M:
        return [TORCH, MANY, MANY | {"num_stages": 4}]
    configs = product(
        BLOCK_N=(64, 128),
        BLOCK_K=(128, 256),
        SPLIT_K=(1, 2, 4) if m <= 64 else (1, 2),
        num_warps=(4, 8),
        num_stages=(3, 4, 6),
    )
    return [tile | config for config in configs]


TUNABLE = Tunable(
    op="linear_rounded",
    module=rounded,
    also=(tiles, quantized, norm, activation),
    default=default_rounded_config,
    problems=tuple(
        RoundedProduct(m, **layer, of=NarrowFormat(format))
        for layer in plain.LAYERS
        if "logits" not in layer
        for format in ("fp8", "int8")
        for m in (1, 16, 64, 256)
    ),
    space=space,
)
