"""Storing keys and values: how many tokens, and how much of a token, a program takes."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import store_kv, store_kv_ref
from tritonllm.kernels.attention import kv_cache
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class StoreKv(Problem):
    """From a fused projection into a pool of blocks: up to 1024 tokens to as many sequences, more to whole blocks."""

    tokens: int
    kv_heads: int
    head_size: int
    q_heads: int = 32
    blocks: int = 2048
    block_size: int = 16
    mutates: ClassVar[tuple[str, ...]] = ("k_cache", "v_cache")

    @property
    def name(self) -> str:
        return f"store_kv T{self.tokens} K{self.kv_heads} D{self.head_size}"

    def shared(self, new: TensorFactory) -> Inputs:
        pool = (self.blocks, self.block_size, self.kv_heads, self.head_size)
        return {"k_cache": new.normal(*pool), "v_cache": new.normal(*pool)}

    def inputs(self, new: TensorFactory) -> Inputs:
        token = torch.arange(self.tokens, device=new.device)
        block = new.permutation(self.blocks, dtype=torch.int64)
        if self.tokens <= 1024:
            slots = block[: self.tokens] * self.block_size + new.integers(0, self.block_size, self.tokens)
        else:
            slots = block[token // self.block_size] * self.block_size + token % self.block_size
        return {"qkv": new.normal(self.tokens, self.q_heads + 2 * self.kv_heads, self.head_size), "slots": slots}

    def _arguments(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        _, k, v = x["qkv"].split((self.q_heads, self.kv_heads, self.kv_heads), dim=1)
        return k, v, x["k_cache"], x["v_cache"], x["slots"]

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        store_kv(*self._arguments(x))
        return x["k_cache"], x["v_cache"]

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        store_kv_ref(*self._arguments(x))
        return x["k_cache"], x["v_cache"]

    def work(self, x: Inputs) -> Work:
        return Work(bytes=self.tokens * (2 * 2 * 2 * self.kv_heads * self.head_size + 8))


def space(columns: int, tokens: int) -> list[tuning.Config]:
    """2 to 32 elements a thread, of keys and of values."""
    configs = product(BLOCK_T=(1, 2, 4, 8), BLOCK=(128, 256, 512, 1024, 2048), num_warps=(1, 2, 4, 8))

    def sensible(config: tuning.Config) -> bool:
        per_thread = config["BLOCK_T"] * config["BLOCK"] // (32 * config["num_warps"])
        return config["BLOCK"] < 2 * columns and config["BLOCK_T"] <= tokens and 2 <= per_thread <= 32

    return [config for config in configs if sensible(config)]


TUNABLE = Tunable(
    op="store_kv",
    module=kv_cache,
    default=kv_cache.default_store_config,
    # 4 key heads: Qwen3-30B-A3B; 8: Qwen3-0.6B and Llama-3.1-8B
    problems=tuple(StoreKv(tokens, heads, 128) for heads in (4, 8) for tokens in (1, 16, 64, 256, 1024, 4096, 16384)),
    space=space,
)
