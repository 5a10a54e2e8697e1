"""Decode attention: the tile of keys, and over how many programs the keys of a batch are spread."""

from dataclasses import dataclass

import torch
import triton

from autotune.ops import Tunable, product
from autotune.paged import paged_cache, sequence_lengths
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import attention_decode, paged_decode_attention, paged_decode_attention_ref, tuning


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


def space(
    head_size: int, group: int, programs: int, capacity: int, dtype: str, cache_dtype: str
) -> list[tuning.Config]:
    """For the kernel that the default takes: tiles of keys, and for the balanced one how many programs a processor
    holds at once, with the registers that this leaves to each, for the other how many to split the keys for."""
    split = product(
        BLOCK_M=(min(64, max(16, triton.next_power_of_2(group))),),
        BLOCK_N=(32, 64, 128),
        SPLIT_TO=(132, 264, 528, 1056, 2112),
        num_warps=(2, 4, 8),
        num_stages=(2, 3, 4),
    )
    if "MIN_TILES" not in attention_decode.default_config(head_size, group, programs, capacity, dtype, cache_dtype):
        return split
    return balanced_space(group)


def balanced_space(group: int) -> list[tuning.Config]:
    tiles = product(
        BLOCK_M=(min(64, max(16, triton.next_power_of_2(group))),),
        BLOCK_N=(32, 64, 128),
        MIN_TILES=(4,),
        num_warps=(2, 4, 8),
        num_stages=(2, 3, 4, 5),
    )
    return [
        tile | {"PROGRAMS": 132 * held, "maxnreg": min(255, 65536 // (32 * tile["num_warps"] * held) // 8 * 8)}
        for tile in tiles
        for held in (1, 2, 3, 4)
    ]


TUNABLE = Tunable(
    op="paged_decode_attention",
    module=attention_decode,
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
