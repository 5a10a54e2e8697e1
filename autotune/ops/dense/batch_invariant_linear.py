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
    """``m`` rows with an ``[n, k]`` weight."""

    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"batch_invariant_linear M{self.m} N{self.n} K{self.k}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"x": new.normal(self.m, self.k), "weight": new.normal(self.n, self.k, std=self.k**-0.5)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (batch_invariant_linear(x["x"], x["weight"]),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (batch_invariant_linear_ref(x["x"].float(), x["weight"].float()),)

    def work(self, x: Inputs) -> Work:
        moved = self.n * self.k + self.m * (self.n + self.k)
        return Work(bytes=2 * moved, flops=2 * self.m * self.n * self.k)


def space(m: int, n: int, k: int, itemsize: int, arch: str) -> list[tuning.Config]:
    """Tiles of up to 225 kB of loads that are under way; no more than half of their rows empty."""
    configs = []
    for config in product(
        BLOCK_M=(16, 64, 128, 256),
        BLOCK_N=(16, 32, 64, 128, 256),
        BLOCK_K=(64, 128),
        num_warps=(4, 8),
        STAGES=(3, 4, 5, 6, 8),
    ):
        rows, columns = config["BLOCK_M"], config["BLOCK_N"]
        shared = (rows + columns) * config["BLOCK_K"] * itemsize * config["STAGES"]
        fits = 60e3 <= shared <= 225e3 and (rows == 16 or rows < 2 * m)
        large = rows * columns >= 16384  # elements of the accumulator, which registers hold
        if fits and rows * columns <= 32768 and (config["num_warps"] == 8) == large:
            configs.append(config)
    return configs


SHAPES = sorted({(layer["n"], layer["k"]) for layer in LAYERS})
TUNABLE = Tunable(
    op="batch_invariant_linear",
    module=invariant,
    default=invariant.default_config,
    problems=tuple(InvariantProduct(m, n, k) for n, k in SHAPES for m in (1, 16, 64, 128, 256, 1024, 8192)),
    space=space,
)
