"""Routing: how many tokens a program takes."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import moe_route, moe_route_ref
from tritonllm.kernels.moe import route
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class Route(Problem):
    tokens: int
    experts: int
    top_k: int

    @property
    def name(self) -> str:
        return f"moe_route T{self.tokens} E{self.experts}/{self.top_k}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"logits": new.normal(self.tokens, self.experts)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return moe_route(x["logits"], self.top_k)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return moe_route_ref(x["logits"], self.top_k)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=self.tokens * (2 * self.experts + 8 * self.top_k))


def space(experts: int, tokens: int) -> list[tuning.Config]:
    configs = product(ROWS=(1, 2, 4, 8, 16), num_warps=(1, 2, 4, 8))
    return [
        config for config in configs if config["ROWS"] <= max(1, tokens) and config["num_warps"] <= 2 * config["ROWS"]
    ]


TUNABLE = Tunable(
    op="moe_route",
    module=route,
    default=route.default_route_config,
    # Qwen3-30B-A3B and Mixtral-8x7B
    problems=tuple(
        Route(tokens, experts, top_k)
        for experts, top_k in ((128, 8), (8, 2))
        for tokens in (1, 16, 64, 256, 1024, 8192)
    ),
    space=space,
)
