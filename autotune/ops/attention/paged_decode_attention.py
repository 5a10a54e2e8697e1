"""Decode attention: which kernel, its tile of keys, and over how many programs the keys of a batch are spread."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import triton

from autotune.ops import Tunable, product
from autotune.paged import paged_cache, sequence_lengths
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import (
    WORKSPACE_SIZE,
    build_cos_sin_cache,
    fused_decode_attention,
    fused_decode_attention_ref,
    paged_decode_attention,
    paged_decode_attention_ref,
)
from tritonllm.kernels.attention import decode, qk_norm_rope
from tritonllm.kernels.attention.portable import balanced, few
from tritonllm.kernels.attention.portable import split as split_decode
from tritonllm.kernels.attention.sm90 import decode as sm90_decode
from tritonllm.kernels.runtime import tuning


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
        workspace = new.filled(0, WORKSPACE_SIZE, dtype=torch.int32)
        order = new.tensor(np.argsort(self.lengths())[::-1].tolist(), dtype=torch.int32)
        q = new.normal(self.batch, self.q_heads, self.head_size)
        return {"q": q, "workspace": workspace, "order": order} | cache

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        tensors = (x["q"], x["k_cache"], x["v_cache"], x["block_tables"], x["seq_lens"])
        out = paged_decode_attention(*tensors, workspace=x["workspace"], order=x["order"])
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


@dataclass(frozen=True)
class FusedDecode(DecodeAttention):
    """As in a model: from the rows of the projection, with all else settled, so that one call begins in the other."""

    mutates: ClassVar[tuple[str, ...]] = ("qkv", "k_cache", "v_cache")

    @property
    def name(self) -> str:
        return f"fused {super().name}"

    def shared(self, new: TensorFactory) -> Inputs:
        weights = {name: new.normal(self.head_size, mean=1, std=0.2) for name in ("q_weight", "k_weight")}
        return {"table": build_cos_sin_cache(self.head_size, self.context, 1e6).to(new.device), **weights}

    def inputs(self, new: TensorFactory) -> Inputs:
        x = super().inputs(new)
        positions = new.tensor([length - 1 for length in self.lengths()], torch.int64)
        blocks = x["block_tables"].gather(1, positions[:, None] // self.block_size)[:, 0]
        slots = blocks * self.block_size + positions % self.block_size
        rows = new.normal(self.batch, (self.q_heads + 2 * self.kv_heads) * self.head_size)
        return x | {"qkv": rows, "positions": positions, "slots": slots}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        weights = {"q_weight": x["q_weight"], "k_weight": x["k_weight"]}
        tensors = (x["qkv"], x["k_cache"], x["v_cache"], x["slots"], x["block_tables"], x["seq_lens"])
        rope = (x["positions"], x["table"])
        state = {"workspace": x["workspace"], "settled": True, "order": x["order"]}
        out = fused_decode_attention(*tensors, *rope, **weights, **state)
        assert isinstance(out, torch.Tensor)
        return out, x["k_cache"], x["v_cache"]

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        weights = {"q_weight": x["q_weight"], "k_weight": x["k_weight"]}
        k, v = x["k_cache"].float(), x["v_cache"].float()
        tensors = (x["qkv"].float(), k, v, x["slots"], x["block_tables"], x["seq_lens"], x["positions"], x["table"])
        out = fused_decode_attention_ref(*tensors, **weights)
        assert isinstance(out, torch.Tensor)
        return out, k, v


def few_space(group: int, head_size: int) -> list[tuning.Config]:
    """How many heads and keys a program has, and how many programs there may be. One or two warps (see
    :mod:`tritonllm.kernels.attention.portable.few_parts`). Single heads and tiles of 16 keys would win at a few
    hundred keys, by 1%, and lose a fifth at some thousand."""
    if group > 16 or head_size > 256:
        return []
    return [
        {"kernel": "few", "PROGRAMS": programs, "BLOCK_M": heads, "BLOCK_N": block_n, "MIN_TILES": 1}
        | {"MERGE": min(16, 32 // heads), "num_warps": warps, "num_stages": 1}
        for programs in (528, 1056)
        for heads in (2, 4, 8)
        for block_n, warps in ((32, 1), (32, 2), (64, 2))
        if heads < 2 * group or heads == 2
    ]


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


def sm90_space(group: int, cache_dtype: str) -> list[tuning.Config]:
    """Tiles of keys, and how many of them are on their way. Up to 8 rows each warp works on its own."""
    rows = 8 if group <= 8 else max(16, triton.next_power_of_2(group))
    if rows > decode.SM90_ROWS:
        return []
    rings = [(64, 2, 2), (64, 3, 2), (64, 4, 2), (64, 6, 2), (64, 4, 1), (64, 6, 1), (128, 2, 1), (128, 3, 1)]
    if rows == 8:
        float8 = [(128, 2, 2), (128, 3, 2), (64, 2, 2), (64, 3, 2), (128, 4, 1)]
        rings = float8 if cache_dtype.startswith("float8") else [(64, 2, 2), (64, 3, 2), (64, 6, 1)]
    return [
        {"kernel": "sm90", "BLOCK_M": rows, "BLOCK_N": block_n, "PROGRAMS": 132 * held, "num_warps": 4}
        | {"num_stages": stages, "maxnreg": 128 if held == 2 else 248}
        for block_n, stages, held in rings
    ]


def space(
    head_size: int, group: int, programs: int, lengths: str, dtype: str, cache_dtype: str, arch: str
) -> list[tuning.Config]:
    """Long sequences have no use for the few kernel, and on Hopper none for the split one: it won 5% for one sequence
    of 8192 keys and 4 heads, and nowhere else."""
    if lengths == "short":
        return few_space(group, head_size)
    hopper = sm90_space(group, cache_dtype) if arch == "sm90" else []
    return balanced_space(group) + (hopper or split_space(group))


TUNABLE = Tunable(
    op="paged_decode_attention",
    module=decode,
    also=(sm90_decode, balanced, few, split_decode, qk_norm_rope),
    default=decode.DECODE.default_config,
    problems=(
        # Llama-3.1-8B
        *(DecodeAttention(batch, 32, 8, 128, context) for batch, context in ((1, 32768), (8, 8192), (64, 4096))),
        DecodeAttention(256, 32, 8, 128, 1024),
        DecodeAttention(64, 32, 8, 128, 8192, ragged=True),
        # Qwen3-30B-A3B
        *(DecodeAttention(batch, 32, 4, 128, context) for batch, context in ((1, 30000), (4, 16000), (64, 4096))),
        # Qwen3-0.6B. (One sequence of 6000 keys and not 8192: what wins 3% there loses 15% at 6000.)
        *(DecodeAttention(batch, 16, 8, 128, context) for batch, context in ((1, 6000), (4, 8192), (128, 2048))),
        # a rank's half of the heads of those
        *(DecodeAttention(1, heads, 4, 128, 30000) for heads in (8, 16)),
        # Few short sequences in a model. (At 800 keys and with nothing between launches, 64 keys and two warps win for
        # Qwen3-0.6B; its layers are slower with them.)
        *(
            FusedDecode(batch, *heads, 128, context)
            for heads in ((16, 8), (32, 8), (32, 4))
            for batch, context in ((1, 400), (4, 400), (8, 256))
        ),
        # In an engine the tables have room for the longest context while most sequences are short.
        *(
            DecodeAttention(batch, heads, 8, 128, 2048, ragged=True, capacity=32768)
            for heads in (16, 32)
            for batch in (16, 64, 256)
        ),
    ),
    space=space,
)
