"""Both grouped products on Hopper: how many pairs a tile holds, and how deep the copies run ahead."""

from autotune.ops import Tunable, product
from autotune.ops.moe_gate_up import SHAPES, FusedMoe
from tritonllm.kernels import moe_products_sm90, tuning
from tritonllm.kernels.moe_tiles import default_sm90_config


def space(pairs: int, experts: int, itemsize: int, n: int, k: int) -> list[tuning.Config]:
    one = product(PAIRS=(16, 32, 64, 128), TAIL=(0,), WB=(1,), STAGES=(6, 8, 10))
    two = product(PAIRS=(16, 32, 64, 128), TAIL=(0,), WB=(2,), STAGES=(4, 5, 6))
    wide = product(PAIRS=(256,), TAIL=(0, 16), WB=(1,), STAGES=(3, 4))
    # shared memory: each stage holds so many rows of 128 bytes
    return [
        config
        for config in one + two + wide
        if config["STAGES"] * (config["WB"] * 128 + config["PAIRS"] + config["TAIL"]) <= 1728
    ]


TUNABLE = Tunable(
    op="moe_sm90",
    module=moe_products_sm90,
    default=default_sm90_config,
    problems=tuple(FusedMoe(*shape) for shape in SHAPES if shape[0] >= 256),
    space=space,
)
