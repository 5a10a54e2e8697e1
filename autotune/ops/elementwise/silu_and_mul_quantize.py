"""SwiGLU in float8: how much of a row a program holds, and with how many warps."""

from dataclasses import dataclass

import torch
import triton

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import silu_and_mul_quantize, silu_and_mul_quantize_ref
from tritonllm.kernels.elementwise import quantized
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class QuantizedActivation(Problem):
    tokens: int
    n: int

    @property
    def name(self) -> str:
        return f"silu_and_mul_quantize T{self.tokens} 2x{self.n}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"x": new.normal(self.tokens, 2 * self.n)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return silu_and_mul_quantize(x["x"])

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return silu_and_mul_quantize_ref(x["x"])

    def work(self, x: Inputs) -> Work:
        return Work(bytes=self.tokens * (5 * self.n + 4))


def space(n: int, tokens: int) -> list[tuning.Config]:
    """A whole row in registers, or a part of it; 4 to 32 elements a thread."""
    whole = triton.next_power_of_2(n)
    configs = product(BLOCK=(whole, whole // 2, whole // 4), num_warps=(4, 8, 16, 32))
    return [
        config
        for config in configs
        if config["BLOCK"] <= 32768 and 4 <= config["BLOCK"] // (32 * config["num_warps"]) <= 32
    ]


TUNABLE = Tunable(
    op="silu_and_mul_quantize",
    module=quantized,
    default=quantized.default_config,
    problems=tuple(QuantizedActivation(tokens, n) for n in (3072, 14336) for tokens in (1, 64, 1024, 4096)),
    space=space,
)
