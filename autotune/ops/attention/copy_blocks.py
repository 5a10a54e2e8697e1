"""Copying blocks of the cache: how much of a block a program takes."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import copy_blocks, copy_blocks_ref
from tritonllm.kernels.attention import kv_cache
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class CopyBlocks(Problem):
    pairs: int
    kv_heads: int
    head_size: int
    blocks: int = 2048
    block_size: int = 16
    mutates: ClassVar[tuple[str, ...]] = ("k_cache", "v_cache")

    @property
    def name(self) -> str:
        return f"copy_blocks N{self.pairs} S{self.block_size} K{self.kv_heads} D{self.head_size}"

    def shared(self, new: TensorFactory) -> Inputs:
        pool = (self.blocks, self.block_size, self.kv_heads, self.head_size)
        return {"k_cache": new.normal(*pool), "v_cache": new.normal(*pool)}

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"pairs": new.permutation(self.blocks, dtype=torch.int64)[: 2 * self.pairs].view(-1, 2)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        copy_blocks(x["k_cache"], x["v_cache"], x["pairs"])
        return x["k_cache"], x["v_cache"]

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        copy_blocks_ref(x["k_cache"], x["v_cache"], x["pairs"])
        return x["k_cache"], x["v_cache"]

    def work(self, x: Inputs) -> Work:
        return Work(bytes=self.pairs * 2 * 2 * 2 * self.block_size * self.kv_heads * self.head_size)


def space(elements: int) -> list[tuning.Config]:
    """2 to 64 elements a thread, of keys and of values."""
    configs = product(BLOCK=(512, 1024, 2048, 4096, 8192, 16384), num_warps=(1, 2, 4, 8))
    return [config for config in configs if 2 <= config["BLOCK"] // (32 * config["num_warps"]) <= 64]


TUNABLE = Tunable(
    op="copy_blocks",
    module=kv_cache,
    default=kv_cache.default_copy_config,
    problems=tuple(CopyBlocks(64, heads, 128) for heads in (4, 8)),  # the number of pairs is no part of the key
    space=space,
)
