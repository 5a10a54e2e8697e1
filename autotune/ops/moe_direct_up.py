"""The gated projection of a few pairs without grouping: rows and steps of a program."""

from autotune.ops import Tunable, product
from autotune.ops.moe_gate_up import FusedMoe
from tritonllm.kernels import moe_direct, tuning

# (experts, top_k, hidden, intermediate) of Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-20b
SHAPES = ((128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880))
PROBLEMS = tuple(FusedMoe(1, *shape) for shape in SHAPES)


def sensible(config: tuning.Config, k: int) -> bool:
    """8 to 64 elements of a tile a thread, and no more tiles than compile in seconds."""
    per_thread = config["BLOCK_N"] * config["BLOCK_K"] // (32 * config["num_warps"])
    return 8 <= per_thread <= 64 and config["BLOCK_K"] * 16 >= k and config["BLOCK_K"] < 2 * k


def space(pairs: int, n: int, k: int) -> list[tuning.Config]:
    configs = product(BLOCK_N=(2, 4, 8), BLOCK_K=(256, 512, 1024, 2048), num_warps=(2, 4, 8))
    return [config for config in configs if sensible(config, k)]


TUNABLE = Tunable(
    op="moe_direct_up",
    module=moe_direct,
    default=moe_direct.default_up_config,
    problems=PROBLEMS,
    space=space,
)
