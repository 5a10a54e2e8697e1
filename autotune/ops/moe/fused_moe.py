"""A mixture of experts: which kernels, and the tile of the two grouped products."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import fused_moe, fused_moe_ref, moe_route_ref
from tritonllm.kernels.moe import experts as moe_experts
from tritonllm.kernels.moe import grouping, tiles
from tritonllm.kernels.moe.portable import direct, products
from tritonllm.kernels.moe.sm90 import products as sm90_products
from tritonllm.kernels.runtime import tuning


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
        exact = (x[name].float() for name in ("x", "w_gate_up", "w_down"))
        return (fused_moe_ref(*exact, x["weights"], x["ids"]),)

    def work(self, x: Inputs) -> Work:
        of_one_expert = 3 * self.hidden * self.intermediate
        hit = len(x["ids"].unique())
        return Work(
            bytes=2 * (hit * of_one_expert + 2 * self.tokens * self.hidden),
            flops=2 * self.tokens * self.top_k * of_one_expert,
        )


# (experts, top_k, hidden, intermediate) of Qwen3-30B-A3B and Mixtral-8x7B. Between 1 and 16 tokens grouping begins to
# win: a table takes the nearest number of tokens.
SHAPES = ((128, 8, 2048, 768), (8, 2, 4096, 14336))
TOKENS = (1, 2, 4, 16, 64, 256, 1024, 8192)


def _portable_is_sensible(config: tuning.Config) -> bool:
    """Accumulators that fit the registers of so many warps and do not waste them; groups of large tiles only."""
    per_thread = config["BLOCK_M"] * config["BLOCK_N"] // (32 * config["num_warps"])
    return 4 <= per_thread <= 128 and (config["GROUP_M"] == 1) == (config["BLOCK_M"] < 64)


def portable_space(default: tuning.Config) -> list[tuning.Config]:
    """Blocks of the default's number of pairs, and its neighbours."""
    block_m = default["BLOCK_M"]
    configs = product(
        kernel=("portable",),
        BLOCK_M=[block for block in (block_m // 2, block_m, 2 * block_m) if 16 <= block <= 128],
        BLOCK_N=(64, 128, 256),
        BLOCK_K=(64, 128),
        GROUP_M=(1, 16),
        num_warps=(4, 8),
        num_stages=(3, 4, 5),
    )
    return [config for config in configs if _portable_is_sensible(config)]


def sm90_space() -> list[tuning.Config]:
    """As many stages as fit in shared memory, where each holds so many rows of 128 bytes, and some less."""
    places = ((16, 0), (32, 0), (64, 0), (64, 16), (64, 32), (128, 0), (256, 0), (256, 16), (256, 32))
    configs = []
    for pairs, tail in places:
        most = min(10, 1700 // (128 + pairs + tail))
        stages = {most, most - 1, max(3, most - 2)}
        configs += product(kernel=("sm90",), PAIRS=(pairs,), TAIL=(tail,), STAGES=sorted(stages))
    return configs


def space(
    tokens: int, top_k: int, experts: int, n: int, i: int, itemsize: int, activation: str, arch: str
) -> list[tuning.Config]:
    pairs = tokens * top_k
    configs = portable_space(tiles.portable_config(tokens, top_k, experts, n, i, itemsize, activation))
    if arch == "sm90" and pairs >= experts:
        configs += sm90_space()
    return configs + [{"kernel": "direct"}] * (tokens <= 4)


TUNABLE = Tunable(
    op="fused_moe",
    module=products,
    also=(sm90_products, direct, moe_experts, grouping),
    default=tiles.FUSED_MOE.default_config,
    problems=tuple(FusedMoe(tokens, *shape) for shape in SHAPES for tokens in TOKENS),
    space=space,
)
