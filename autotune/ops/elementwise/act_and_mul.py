"""Gated activations: how much of a row a program takes, and with how many warps."""

from dataclasses import dataclass

import torch
import triton

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import silu_and_mul, silu_and_mul_ref
from tritonllm.kernels.elementwise import activation
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class GatedActivation(Problem):
    tokens: int
    n: int

    @property
    def name(self) -> str:
        return f"silu_and_mul T{self.tokens} 2x{self.n}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"x": new.normal(self.tokens, 2 * self.n)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (silu_and_mul(x["x"]),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (silu_and_mul_ref(x["x"].float()),)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=3 * self.tokens * self.n * 2)


def space(n: int, tokens: int) -> list[tuning.Config]:
    """2 to 32 elements a thread."""
    configs = product(BLOCK=(256, 512, 1024, 2048, 4096, 8192), num_warps=(1, 2, 4, 8))
    return [
        config
        for config in configs
        if config["BLOCK"] <= triton.next_power_of_2(n) and 2 <= config["BLOCK"] // (32 * config["num_warps"]) <= 32
    ]


TUNABLE = Tunable(
    op="act_and_mul",
    module=activation,
    default=activation.default_config,
    # Intermediate sizes of Qwen3-0.6B and Llama-3.1-8B.
    problems=tuple(GatedActivation(tokens, n) for n in (3072, 14336) for tokens in (1, 16, 64, 256, 1024, 4096, 16384)),
    space=space,
)
