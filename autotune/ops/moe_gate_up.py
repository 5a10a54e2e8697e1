"""The first grouped product of a mixture of experts; its BLOCK_M is also the second's."""

from dataclasses import dataclass
from typing import Any

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import fused_moe, fused_moe_ref, moe_products, moe_route_ref, moe_tiles, tuning


@dataclass(frozen=True)
class FusedMoe(Problem):
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def name(self) -> str:
        return f"fused_moe T{self.tokens} E{self.experts}/{self.top_k} H{self.hidden} I{self.intermediate}"

    def shared(self, new: TensorFactory) -> Inputs:
        e, n, i = self.experts, self.hidden, self.intermediate
        return {"w_gate_up": new.normal(e, 2 * i, n, std=n**-0.5), "w_down": new.normal(e, n, i, std=i**-0.5)}

    def inputs(self, new: TensorFactory) -> Inputs:
        logits = new.normal(self.tokens, self.experts, dtype=torch.float32)
        weights, ids = moe_route_ref(logits, self.top_k)
        return {"x": new.normal(self.tokens, self.hidden), "weights": weights, "ids": ids}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (fused_moe(x["x"], x["w_gate_up"], x["w_down"], x["weights"], x["ids"]),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (fused_moe_ref(x["x"].float(), x["w_gate_up"], x["w_down"], x["weights"], x["ids"]),)

    def work(self, x: Inputs) -> Work:
        of_one_expert = 3 * self.hidden * self.intermediate
        hit = len(x["ids"].unique())
        return Work(
            bytes=2 * (hit * of_one_expert + 2 * self.tokens * self.hidden),
            flops=2 * self.tokens * self.top_k * of_one_expert,
        )


# (tokens, experts, top_k, hidden, intermediate) of Qwen3-30B-A3B and Mixtral-8x7B.
TOKENS = (1, 16, 64, 256, 1024, 8192)
SHAPES = tuple((tokens, *shape) for shape in ((128, 8, 2048, 768), (8, 2, 4096, 14336)) for tokens in TOKENS)


def blocks_m(**key: Any) -> list[int]:
    """The default BLOCK_M and its neighbours."""
    default = moe_tiles.default_gate_up_config(**key)["BLOCK_M"]
    return [block for block in (default // 2, default, 2 * default) if 16 <= block <= 128]


def sensible(config: tuning.Config, block_m: int) -> bool:
    """Accumulators that fit the registers of so many warps and do not waste them; groups of large tiles only."""
    per_thread = block_m * config["BLOCK_N"] // (32 * config["num_warps"])
    return 4 <= per_thread <= 128 and (config["GROUP_M"] == 1 or block_m >= 64)


def space(**key: Any) -> list[tuning.Config]:
    configs = product(
        BLOCK_M=blocks_m(**key),
        BLOCK_N=(64, 128, 256),
        BLOCK_K=(64, 128),
        GROUP_M=(1, 16),
        num_warps=(4, 8),
        num_stages=(3, 4),
    )
    return [config for config in configs if sensible(config, config["BLOCK_M"])]


TUNABLE = Tunable(
    op="moe_gate_up",
    module=moe_products,
    default=moe_tiles.default_gate_up_config,
    problems=tuple(FusedMoe(*shape) for shape in SHAPES),
    space=space,
)
