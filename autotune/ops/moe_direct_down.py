"""The down projection of a few tokens without grouping: rows and steps of a program, and how many it loads early."""

from autotune.ops import Tunable, product
from autotune.ops.moe_direct_up import PROBLEMS, sensible
from tritonllm.kernels import moe_direct, tuning


def space(tokens: int, n: int, k: int) -> list[tuning.Config]:
    configs = product(BLOCK_N=(2, 4, 8), BLOCK_K=(256, 512, 1024, 2048), EARLY=(0, 4, 8), num_warps=(2, 4, 8))
    return [config for config in configs if sensible(config, k)]


TUNABLE = Tunable(
    op="moe_direct_down",
    module=moe_direct,
    default=moe_direct.default_down_config,
    problems=PROBLEMS,
    space=space,
)
