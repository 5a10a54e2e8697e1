"""Activations that are not gated: how much of a row a program takes, and with how many warps."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable
from autotune.ops.elementwise.act_and_mul import space
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import apply_activation, apply_activation_ref
from tritonllm.kernels.elementwise import activation


@dataclass(frozen=True)
class Activation(Problem):
    tokens: int
    n: int

    @property
    def name(self) -> str:
        return f"gelu_tanh T{self.tokens} N{self.n}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"x": new.normal(self.tokens, self.n)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (apply_activation(x["x"], "gelu_tanh"),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (apply_activation_ref(x["x"].float(), "gelu_tanh"),)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=2 * self.tokens * self.n * 2)


TUNABLE = Tunable(
    op="apply_activation",
    module=activation,
    default=activation.default_config,
    # Intermediate sizes of GPT-2 and Falcon-7B.
    problems=tuple(Activation(tokens, n) for n in (3072, 18176) for tokens in (1, 16, 64, 256, 1024, 4096, 16384)),
    space=space,
)
