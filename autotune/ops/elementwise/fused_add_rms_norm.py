"""RMSNorm with the residual addition before it, in place."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from autotune.ops import Tunable
from autotune.ops.elementwise.rms_norm import HIDDEN, TOKENS, space
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import fused_add_rms_norm, fused_add_rms_norm_ref
from tritonllm.kernels.elementwise import norm


@dataclass(frozen=True)
class AddRmsNorm(Problem):
    tokens: int
    n: int
    mutates: ClassVar[tuple[str, ...]] = ("x", "residual")

    @property
    def name(self) -> str:
        return f"fused_add_rms_norm T{self.tokens} N{self.n}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return {
            "x": new.normal(self.tokens, self.n),
            "residual": new.normal(self.tokens, self.n, std=2),
            "weight": new.normal(self.n, mean=1, std=0.2),
        }

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return fused_add_rms_norm(x["x"], x["residual"], x["weight"])

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return fused_add_rms_norm_ref(x["x"].float(), x["residual"].float(), x["weight"])

    def work(self, x: Inputs) -> Work:
        return Work(bytes=2 * (4 * self.tokens + 1) * self.n)


TUNABLE = Tunable(
    op="fused_add_rms_norm",
    module=norm,
    default=norm.default_config,
    problems=tuple(AddRmsNorm(tokens, n) for n in HIDDEN for tokens in TOKENS),
    space=space,
)
