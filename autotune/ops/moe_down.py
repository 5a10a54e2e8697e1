"""The second grouped product of a mixture of experts, for each BLOCK_M that the first may choose."""

from dataclasses import dataclass
from typing import Any

import torch

from autotune.ops import Tunable, product
from autotune.ops.moe_gate_up import SHAPES, FusedMoe, blocks_m, sensible
from autotune.problem import Inputs
from tritonllm.kernels import moe_products, moe_tiles, tuning


@dataclass(frozen=True)
class FusedMoeInBlocks(FusedMoe):
    """With the first product's default configuration but for its BLOCK_M."""

    block_m: int

    @property
    def name(self) -> str:
        return f"{super().name} BLOCK_M {self.block_m}"

    def _gate_up_config(self, **key: Any) -> tuning.Config:
        return moe_tiles.default_gate_up_config(**key) | {"BLOCK_M": self.block_m}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        with tuning.override("moe_gate_up", self._gate_up_config):
            return super().run(x)


def space(pairs: int, experts: int, n: int, k: int, itemsize: int, block_m: int) -> list[tuning.Config]:
    configs = product(BLOCK_N=(64, 128, 256), BLOCK_K=(64, 128), GROUP_M=(1, 16), num_warps=(4, 8), num_stages=(3, 4))
    return [config for config in configs if sensible(config, block_m)]


TUNABLE = Tunable(
    op="moe_down",
    module=moe_products,
    default=moe_tiles.default_down_config,
    problems=tuple(
        FusedMoeInBlocks(tokens, experts, top_k, hidden, intermediate, block_m)
        for tokens, experts, top_k, hidden, intermediate in SHAPES
        for block_m in blocks_m(
            pairs=tokens * top_k, experts=experts, n=intermediate, k=hidden, itemsize=2, activation="silu"
        )
    ),
    space=space,
)
