"""A router's logits for one token, with the norm before: experts and warps of a program."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import moe_logits, moe_logits_ref
from tritonllm.kernels.moe import logits
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class RouterLogits(Problem):
    experts: int
    hidden: int

    @property
    def name(self) -> str:
        return f"moe_logits E{self.experts} H{self.hidden}"

    def inputs(self, new: TensorFactory) -> Inputs:
        weight = new.normal(self.experts, self.hidden, std=self.hidden**-0.5)
        return {"x": new.normal(1, self.hidden), "weight": weight, "norm": new.normal(self.hidden, mean=1, std=0.2)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return moe_logits(x["x"], x["weight"], x["norm"], constant_weight=True)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return moe_logits_ref(x["x"].float(), x["weight"].float(), x["norm"])

    def work(self, x: Inputs) -> Work:
        return Work(bytes=2 * self.experts * self.hidden)


def space(experts: int, k: int) -> list[tuning.Config]:
    block = logits.default_config(experts, k)["BLOCK_K"]
    configs = product(BLOCK_N=(1, 2, 4), BLOCK_K=(block,), num_warps=(2, 4, 8))
    return [config for config in configs if config["BLOCK_N"] * block <= 64 * 32 * config["num_warps"]]


TUNABLE = Tunable(
    op="moe_logits",
    module=logits,
    default=logits.default_config,
    # Qwen3-30B-A3B, Mixtral-8x7B and gpt-oss-20b
    problems=(RouterLogits(128, 2048), RouterLogits(8, 4096), RouterLogits(32, 2880)),
    space=space,
)
