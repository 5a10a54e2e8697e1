"""Norm, rotation and storing of a fused projection: how many heads a program takes, and with how many warps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import build_cos_sin_cache, qk_norm_rope_store, qk_norm_rope_store_ref
from tritonllm.kernels.attention import qk_norm_rope
from tritonllm.kernels.runtime import tuning

MAX_POSITION = 32768


@dataclass(frozen=True)
class QkNormRopeStore(Problem):
    """Up to 1024 tokens of as many sequences, more in whole blocks, as in ``StoreKv``."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_size: int
    norm: bool = True
    blocks: int = 2048
    block_size: int = 16
    mutates: ClassVar[tuple[str, ...]] = ("qkv", "k_cache", "v_cache")

    @property
    def name(self) -> str:
        what = "qk_norm_rope_store" if self.norm else "rope_store"
        return f"{what} T{self.tokens} H{self.q_heads}+{self.kv_heads} D{self.head_size}"

    def shared(self, new: TensorFactory) -> Inputs:
        pool = (self.blocks, self.block_size, self.kv_heads, self.head_size)
        table = build_cos_sin_cache(self.head_size, MAX_POSITION, 1e6).to(new.device)
        weights = {name: new.normal(self.head_size, mean=1, std=0.2) for name in ("q_weight", "k_weight")}
        return {"k_cache": new.normal(*pool), "v_cache": new.normal(*pool), "table": table, **weights}

    def inputs(self, new: TensorFactory) -> Inputs:
        token = torch.arange(self.tokens, device=new.device)
        block = new.permutation(self.blocks, dtype=torch.int64)
        if self.tokens <= 1024:
            slots = block[: self.tokens] * self.block_size + new.integers(0, self.block_size, self.tokens)
        else:
            slots = block[token // self.block_size] * self.block_size + token % self.block_size
        width = (self.q_heads + 2 * self.kv_heads) * self.head_size
        positions = new.integers(0, MAX_POSITION, self.tokens, dtype=torch.int64)
        return {"qkv": new.normal(self.tokens, width), "slots": slots, "positions": positions}

    def _call(self, function: Callable[..., torch.Tensor], qkv: torch.Tensor, x: Inputs) -> tuple[torch.Tensor, ...]:
        weights = {name: x[name] for name in ("q_weight", "k_weight")} if self.norm else {}
        caches = x["k_cache"], x["v_cache"]
        function(qkv, *caches, x["slots"], x["positions"], x["table"], **weights)
        return (qkv, *caches)

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return self._call(qk_norm_rope_store, x["qkv"], x)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        caches = {name: x[name].float() for name in ("k_cache", "v_cache")}
        return self._call(qk_norm_rope_store_ref, x["qkv"].float(), x | caches)

    def work(self, x: Inputs) -> Work:
        columns = (self.q_heads + 2 * self.kv_heads) * self.head_size  # of two bytes, read and written
        return Work(bytes=self.tokens * (2 * 2 * columns + 4 * self.head_size + 16))


def space(heads: int, head_size: int, tokens: int) -> list[tuning.Config]:
    """2 to 64 elements a thread."""
    configs = product(BLOCK_H=(1, 2, 4, 8, 16), num_warps=(1, 2, 4, 8))

    def sensible(config: tuning.Config) -> bool:
        return config["BLOCK_H"] < heads and 2 <= config["BLOCK_H"] * head_size // (32 * config["num_warps"]) <= 64

    return [config for config in configs if sensible(config)]


TUNABLE = Tunable(
    op="qk_norm_rope_store",
    module=qk_norm_rope,
    default=qk_norm_rope.default_config,
    # Qwen3-0.6B, Llama-3.1-8B (without the norm, which changes little), Qwen3-30B-A3B
    problems=tuple(
        QkNormRopeStore(tokens, *heads, 128)
        for heads in ((16, 8), (32, 8), (32, 4))
        for tokens in (1, 16, 64, 256, 1024, 4096, 16384)
    ),
    space=space,
)
