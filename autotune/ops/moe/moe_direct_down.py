"""The down projection of a few tokens without grouping: rows and steps of a program, and how many it asks for ahead."""

from autotune.ops import Tunable, product
from autotune.ops.moe.moe_direct_up import PROBLEMS, per_thread, sensible
from tritonllm.kernels.moe.portable import direct
from tritonllm.kernels.runtime import tuning


def space(tokens: int, n: int, k: int, chooses: str) -> list[tuning.Config]:
    tiles = product(BLOCK_N=(1, 2, 4, 8), BLOCK_K=(256, 512, 1024, 2048), num_warps=(2, 4, 8))
    ahead = [{"EARLY": early, "AHEAD": ahead} for early, ahead in ((0, 0), (4, 0), (8, 0), (12, 0), (4, 16))]
    configs = [tile | loads for tile in tiles for loads in ahead if sensible(tile, k)]
    return [c for c in configs if per_thread(c) * max(c["EARLY"], c["AHEAD"]) <= 192]


TUNABLE = Tunable(
    op="moe_direct_down",
    module=direct,
    default=direct.default_down_config,
    problems=PROBLEMS,
    space=space,
)
