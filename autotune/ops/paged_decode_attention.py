"""Decode attention: which kernel, its tile of keys, and over how many programs the keys of a batch are spread."""

from dataclasses import dataclass

import torch
import triton

from autotune.ops import Tunable, product
from autotune.paged import paged_cache, sequence_lengths
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import (
    attention_decode,
    attention_decode_sm90,
    paged_decode_attention,
    paged_decode_attention_ref,
    tuning,
)


@dataclass(frozen=True)
class DecodeAttention(Problem):
    batch: int
    q_heads: int
    kv_heads: int
    head_size: int
    context: int
    ragged: bool = False  # lengths from 1 to context
    capacity: int = 0  # keys that a block table has room for; 0: context
    block_size: int = 16

    @property
    def name(self) -> str:
        room = f" of {self.capacity}" if self.capacity else ""
        lengths = f"{'1..' if self.ragged else ''}{self.context}{room}"
        return f"decode B{self.batch} H{self.q_heads}/{self.kv_heads} D{self.head_size} L{lengths}"

    def lengths(self) -> list[int]:
        return sequence_lengths(self.batch, self.context, self.ragged)

    def inputs(self, new: TensorFactory) -> Inputs:
        capacity = self.capacity or self.context
        cache = paged_cache(new, self.lengths(), capacity, self.block_size, self.kv_heads, self.head_size)
        workspace = new.filled(0, attention_decode.WORKSPACE_SIZE, dtype=torch.int32)
        return {"q": new.normal(self.batch, self.q_heads, self.head_size), "workspace": workspace} | cache

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        tensors = (x["q"], x["k_cache"], x["v_cache"], x["block_tables"], x["seq_lens"])
        out = paged_decode_attention(*tensors, workspace=x["workspace"])
        assert isinstance(out, torch.Tensor)
        return (out,)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        out = paged_decode_attention_ref(x["q"], x["k_cache"], x["v_cache"], x["block_tables"], x["seq_lens"])
        assert isinstance(out, torch.Tensor)
        return (out,)

    def work(self, x: Inputs) -> Work:
        keys = sum(self.lengths())
        return Work(
            bytes=2 * self.head_size * (2 * keys * self.kv_heads + 2 * self.batch * self.q_heads),
            flops=4 * keys * self.q_heads * self.head_size,
        )


def split_space(group: int) -> list[tuning.Config]:
    """Over how many programs the keys are spread."""
    rows = min(64, max(16, triton.next_power_of_2(group)))
    splits = product(kernel=("split",), SPLIT_TO=(264, 1056, 2112), BLOCK_M=(rows,))
    tiles = product(BLOCK_N=(64,), num_warps=(4,), num_stages=(3, 4)) + product(
        BLOCK_N=(128,), num_warps=(4,), num_stages=(2,)
    )
    return [split | tile for split in splits for tile in tiles]


def balanced_space(group: int) -> list[tuning.Config]:
    """How many programs a processor holds at once, with the registers that this leaves to each."""
    rows = min(64, max(16, triton.next_power_of_2(group)))
    tiles = [(64, 4, 3, 2), (64, 4, 4, 2), (64, 4, 2, 3), (64, 8, 3, 1), (64, 8, 4, 1), (128, 4, 3, 2), (128, 8, 3, 1)]
    return [
        {"kernel": "balanced", "BLOCK_M": rows, "BLOCK_N": block_n, "PROGRAMS": 132 * held, "num_warps": warps}
        | {"num_stages": stages, "maxnreg": min(255, 65536 // (32 * warps * held) // 8 * 8)}
        for block_n, warps, stages, held in tiles
    ]


def sm90_space(group: int) -> list[tuning.Config]:
    """Tiles of keys, and how many of them are on their way."""
    rows = max(16, triton.next_power_of_2(group))
    if rows > attention_decode.SM90_ROWS:
        return []
    rings = [(64, 2, 2), (64, 3, 2), (64, 4, 2), (64, 6, 2), (64, 4, 1), (64, 6, 1), (128, 2, 1), (128, 3, 1)]
    return [
        {"kernel": "sm90", "BLOCK_M": rows, "BLOCK_N": block_n, "PROGRAMS": 132 * held, "num_warps": 4}
        | {"num_stages": stages, "maxnreg": 128 if held == 2 else 248}
        for block_n, stages, held in rings
    ]


def space(
    head_size: int, group: int, programs: int, capacity: int, dtype: str, cache_dtype: str, arch: str
) -> list[tuning.Config]:
    return split_space(group) + balanced_space(group) + (sm90_space(group) if arch == "sm90" else [])


TUNABLE = Tunable(
    op="paged_decode_attention",
    module=attention_decode,
    also=(attention_decode_sm90,),
    default=attention_decode.default_config,
    problems=(
        # Llama-3.1-8B
        *(DecodeAttention(batch, 32, 8, 128, context) for batch, context in ((1, 32768), (8, 8192), (64, 4096))),
        DecodeAttention(256, 32, 8, 128, 1024),
        DecodeAttention(64, 32, 8, 128, 8192, ragged=True),
        # Qwen3-30B-A3B
        *(DecodeAttention(batch, 32, 4, 128, context) for batch, context in ((1, 8192), (64, 4096))),
        # Qwen3-0.6B
        *(DecodeAttention(batch, 16, 8, 128, context) for batch, context in ((1, 8192), (128, 2048))),
        # In an engine the tables have room for the longest context while most sequences are short.
        *(
            DecodeAttention(batch, heads, 8, 128, 2048, ragged=True, capacity=32768)
            for heads in (16, 32)
            for batch in (1, 16, 256)
        ),
    ),
    space=space,
)
