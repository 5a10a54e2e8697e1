"""Products of 2 to 16 rows on Hopper, whose weights go straight into the tensor cores' registers: how much of a weight
a program takes, and how much of it is under way."""

from dataclasses import dataclass
from typing import Any

from autotune.ops import Tunable, product
from autotune.ops.dense.linear import Product
from tritonllm.kernels.dense.sm90 import few
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class FewRows(Product):
    """A product of a layer that is not large."""

    together = 1

    @property
    def name(self) -> str:
        return super().name.replace("linear", "linear_few", 1)


def space(n: int, k: int, gated: str) -> list[tuning.Config]:
    """64 or 128 registers of a thread under way."""
    configs = []
    for config in product(COLUMNS=(8, 16, 32), STEP=(32, 64, 128), DEPTH=(1, 2, 4, 8), num_warps=(2, 4, 8)):
        each = config["COLUMNS"] * config["STEP"] // 64 * (2 if gated == "yes" else 1)
        turn = config["num_warps"] * config["STEP"]
        if each * config["DEPTH"] in (64, 128) and turn <= max(k, 64) and k <= few.MAX_TURNS * turn:
            configs.append(config)
    return configs


# qkv, o, gate and up, down: Qwen3-0.6B, Llama-3.2-1B, Qwen3-4B
LAYERS: tuple[dict[str, Any], ...] = tuple(
    layer
    for hidden, qkv, heads, inner in ((1024, 4096, 2048, 3072), (2048, 3072, 2048, 8192), (2560, 6144, 4096, 9728))
    for layer in (
        {"n": qkv, "k": hidden, "norm": True},
        {"n": hidden, "k": heads, "residual": True},
        {"n": 2 * inner, "k": hidden, "norm": True, "gated": True},
        {"n": hidden, "k": inner, "residual": True},
    )
)
TUNABLE = Tunable(
    op="linear_few",
    module=few,
    default=few.default_config,
    problems=tuple(FewRows(8, **layer) for layer in LAYERS),
    space=space,
)
