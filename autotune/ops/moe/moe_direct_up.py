"""The gated projection of a few pairs without grouping: rows and steps of a program."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable, product
from autotune.ops.moe.fused_moe import FusedMoe
from autotune.problem import Inputs
from tritonllm.kernels.moe.portable import direct
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class DirectMoe(FusedMoe):
    """By the kernels for a few tokens, whatever the table says of the sizes."""

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        with tuning.override("fused_moe", {"kernel": "direct"}):
            return super().run(x)


# (experts, top_k, hidden, intermediate) of Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-20b
SHAPES = ((128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880))
# With the choice given; where programs make it themselves, a layer as a whole decides.
PROBLEMS = (*(DirectMoe(1, *shape) for shape in SHAPES), DirectMoe(2, *SHAPES[0]))


def sensible(config: tuning.Config, k: int) -> bool:
    """8 or 16 elements of a tile a thread, which then are of one row, and no more tiles than compile in seconds."""
    return 8 <= per_thread(config) <= 16 and config["BLOCK_K"] * 16 >= k and config["BLOCK_K"] < 2 * k


def per_thread(config: tuning.Config) -> int:
    """Elements of a tile."""
    return int(config["BLOCK_N"] * config["BLOCK_K"] // (32 * config["num_warps"]))


def space(pairs: int, n: int, k: int, chooses: str) -> list[tuning.Config]:
    configs = product(BLOCK_N=(1, 2, 4, 8), BLOCK_K=(256, 512, 1024, 2048), AHEAD=(0, 4, 8), num_warps=(2, 4, 8))
    # 128 bfloat16 of the gate and 128 beside it are 128 registers
    return [c for c in configs if sensible(c, k) and per_thread(c) * c["AHEAD"] <= 128]


TUNABLE = Tunable(
    op="moe_direct_up",
    module=direct,
    default=direct.default_up_config,
    problems=PROBLEMS,
    space=space,
)
