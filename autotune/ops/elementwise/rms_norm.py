"""RMSNorm alone: of whole rows, and of the heads of a fused projection as Qwen3 does it, in place."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import rms_norm, rms_norm_ref
from tritonllm.kernels.elementwise import norm
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class RmsNorm(Problem):
    tokens: int
    n: int

    @property
    def name(self) -> str:
        return f"rms_norm T{self.tokens} N{self.n}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"x": new.normal(self.tokens, self.n), "weight": new.normal(self.n, mean=1, std=0.2)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (rms_norm(x["x"], x["weight"]),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (rms_norm_ref(x["x"].float(), x["weight"]),)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=2 * (2 * self.tokens + 1) * self.n)


@dataclass(frozen=True)
class HeadNorm(Problem):
    """The query heads inside a fused projection of queries, keys and values."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_size: int
    mutates: ClassVar[tuple[str, ...]] = ("qkv",)

    @property
    def name(self) -> str:
        return f"rms_norm T{self.tokens} H{self.q_heads} D{self.head_size} in place"

    def inputs(self, new: TensorFactory) -> Inputs:
        width = (self.q_heads + 2 * self.kv_heads) * self.head_size
        return {"qkv": new.normal(self.tokens, width), "weight": new.normal(self.head_size, mean=1, std=0.2)}

    def _heads(self, x: Inputs) -> torch.Tensor:
        return x["qkv"][:, : self.q_heads * self.head_size].view(self.tokens, self.q_heads, self.head_size)

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        heads = self._heads(x)
        return (rms_norm(heads, x["weight"], out=heads), x["qkv"])

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        normed = rms_norm_ref(self._heads(x).float(), x["weight"])
        self._heads(x).copy_(normed)
        return (normed, x["qkv"])

    def work(self, x: Inputs) -> Work:
        return Work(bytes=2 * (2 * self.tokens * self.q_heads + 1) * self.head_size)


def space(n: int, rows: int) -> list[tuning.Config]:
    """A row in one block or two, several short rows to a program; 4 to 32 elements a thread."""
    whole = triton.next_power_of_2(n)
    configs = product(BLOCK=(whole, whole // 2), ROWS=(1, 2, 4, 8, 16, 32), num_warps=(1, 2, 4, 8, 16))

    def sensible(config: tuning.Config) -> bool:
        tile = config["BLOCK"] * config["ROWS"]
        return config["BLOCK"] <= norm.MAX_BLOCK and tile <= 16384 and 4 <= tile // (32 * config["num_warps"]) <= 32

    return [config for config in configs if sensible(config)]


TOKENS = (1, 64, 512, 4096, 16384)
# Hidden sizes of Qwen3 0.6B to 32B and of Llama 3. Every common one: a neighbour's BLOCK may be smaller than the row.
HIDDEN = (1024, 2048, 2560, 3072, 4096, 5120, 8192)

TUNABLE = Tunable(
    op="rms_norm",
    module=norm,
    default=norm.default_config,
    problems=(
        *(RmsNorm(tokens, n) for n in HIDDEN for tokens in TOKENS),
        *(HeadNorm(tokens, 16, 8, head_size) for head_size in (128, 256) for tokens in TOKENS),
    ),
    space=space,
)
