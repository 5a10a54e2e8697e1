"""Rotary embedding: how many heads a program takes, and with how many warps."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import apply_rope, apply_rope_ref, build_cos_sin_cache
from tritonllm.kernels.elementwise import rope
from tritonllm.kernels.runtime import tuning

MAX_POSITION = 32768


@dataclass(frozen=True)
class Rope(Problem):
    """Queries and keys inside a fused projection."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_size: int
    mutates: ClassVar[tuple[str, ...]] = ("qkv",)

    @property
    def name(self) -> str:
        return f"apply_rope T{self.tokens} H{self.q_heads}+{self.kv_heads} D{self.head_size}"

    def shared(self, new: TensorFactory) -> Inputs:
        cache = build_cos_sin_cache(self.head_size, MAX_POSITION, 1e6)
        return {"cos_sin": cache.to(device=new.device, dtype=torch.bfloat16)}

    def inputs(self, new: TensorFactory) -> Inputs:
        width = (self.q_heads + 2 * self.kv_heads) * self.head_size
        positions = new.integers(0, MAX_POSITION, self.tokens, dtype=torch.int64)
        return {"qkv": new.normal(self.tokens, width), "positions": positions}

    def _q_and_k(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = qkv.view(self.tokens, -1, self.head_size)
        return heads[:, : self.q_heads], heads[:, self.q_heads : self.q_heads + self.kv_heads]

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        apply_rope(*self._q_and_k(x["qkv"]), x["positions"], x["cos_sin"])
        return (x["qkv"],)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        qkv = x["qkv"].float()
        apply_rope_ref(*self._q_and_k(qkv), x["positions"], x["cos_sin"])
        return (qkv,)

    def work(self, x: Inputs) -> Work:
        rotated = 2 * (self.q_heads + self.kv_heads) * self.head_size  # read and written
        return Work(bytes=self.tokens * (2 * rotated + 2 * self.head_size + 8))


def space(heads: int, rotary: int, tokens: int) -> list[tuning.Config]:
    """1 to 64 pairs a thread."""
    configs = product(BLOCK_H=(1, 2, 4, 8, 16, 32, 64), num_warps=(1, 2, 4, 8))

    def sensible(config: tuning.Config) -> bool:
        pairs = config["BLOCK_H"] * rotary // 2
        return config["BLOCK_H"] < 2 * heads and 1 <= pairs // (32 * config["num_warps"]) <= 64

    return [config for config in configs if sensible(config)]


TUNABLE = Tunable(
    op="apply_rope",
    module=rope,
    default=rope.default_config,
    # Qwen3-0.6B and Llama-3.1-8B; Qwen3-30B-A3B has 4 key heads, which the key does not see.
    problems=tuple(Rope(tokens, heads, 8, 128) for heads in (16, 32) for tokens in (1, 16, 64, 256, 1024, 4096, 16384)),
    space=space,
)
