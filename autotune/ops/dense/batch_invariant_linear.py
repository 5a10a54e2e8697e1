"""Products that are batch invariant: the tile, of which the bits of the result do not depend."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable, product
from autotune.ops.dense.linear import LAYERS
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import batch_invariant_linear, batch_invariant_linear_ref
from tritonllm.kernels.dense import invariant
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class InvariantProduct(Problem):
    """``m`` rows with an ``[n, k]`` weight, or with a gate and an up of that shape."""

    m: int
    n: int
    k: int
    gated: bool = False

    @property
    def name(self) -> str:
        return f"batch_invariant_linear M{self.m} N{self.n} K{self.k}" + (" gated" if self.gated else "")

    @property
    def rows(self) -> int:
        """Of the weight."""
        return self.n * (2 if self.gated else 1)

    @property
    def activation(self) -> str | None:
        return "silu" if self.gated else None

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"x": new.normal(self.m, self.k), "weight": new.normal(self.rows, self.k, std=self.k**-0.5)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (batch_invariant_linear(x["x"], x["weight"], activation=self.activation),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        wide = x["x"].float(), x["weight"].float()
        return (batch_invariant_linear_ref(*wide, activation=self.activation),)

    def work(self, x: Inputs) -> Work:
        moved = self.rows * self.k + self.m * (self.n + self.k)
        return Work(bytes=2 * moved, flops=2 * self.m * self.rows * self.k)


def space(m: int, n: int, k: int, itemsize: int, arch: str, gated: str) -> list[tuning.Config]:
    """Tiles of up to 225 kB of loads that are under way; no more than half of their rows empty."""
    configs = []
    for config in product(
        BLOCK_M=(16, 32, 64, 128, 256),
        BLOCK_N=(16, 32, 64, 128, 256),
        BLOCK_K=(64, 128, 256),
        num_warps=(4, 8),
        STAGES=(3, 4, 5, 6, 8),
    ):
        rows, columns = config["BLOCK_M"], config["BLOCK_N"] * (2 if gated == "yes" else 1)
        shared = (rows + columns) * config["BLOCK_K"] * itemsize * config["STAGES"]
        fits = 60e3 <= shared <= 225e3 and (rows == 16 or rows < 2 * m)
        sums = rows * columns  # which registers hold
        warps = (4,) if sums < 16384 else (4, 8) if sums == 16384 else (8,)
        if fits and sums <= 32768 and config["num_warps"] in warps:
            configs.append(config)
    return configs


GATED = {(layer["n"], layer["k"]) for layer in LAYERS if layer.get("gated")}
SHAPES = [
    (n // 2, k, True) if (n, k) in GATED else (n, k, False) for n, k in sorted({(x["n"], x["k"]) for x in LAYERS})
]
TUNABLE = Tunable(
    op="batch_invariant_linear",
    module=invariant,
    default=invariant.default_config,
    problems=tuple(
        InvariantProduct(m, n, k, gated) for n, k, gated in SHAPES for m in (1, 16, 64, 128, 256, 1024, 8192)
    ),
    space=space,
)
