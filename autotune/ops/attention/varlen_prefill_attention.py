"""Prefill attention: which kernel, its tiles of queries and of keys, and how its loops are cut."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable, product
from autotune.paged import paged_cache
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import WORKSPACE_SIZE, varlen_prefill_attention, varlen_prefill_attention_ref
from tritonllm.kernels.attention import decode, prefill
from tritonllm.kernels.attention.portable import prefill as portable_prefill
from tritonllm.kernels.attention.sm90 import copying as sm90_copying
from tritonllm.kernels.attention.sm90 import decode as sm90_decode
from tritonllm.kernels.attention.sm90 import prefill as sm90_prefill
from tritonllm.kernels.attention.sm90 import rows as sm90_rows
from tritonllm.kernels.attention.sm90 import shares as sm90_shares
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class PrefillAttention(Problem):
    """``batch`` sequences of ``new`` tokens each, after ``cached`` tokens each; causal."""

    batch: int
    new: int
    cached: int = 0
    q_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    @property
    def name(self) -> str:
        cached = f" over {self.cached} cached" if self.cached else ""
        return f"prefill {self.batch}x{self.new}{cached} H{self.q_heads}/{self.kv_heads} D{self.head_size}"

    def inputs(self, new: TensorFactory) -> Inputs:
        length = self.cached + self.new
        cache = paged_cache(new, [length] * self.batch, length, self.block_size, self.kv_heads, self.head_size)
        begins = [self.new * sequence for sequence in range(self.batch + 1)]
        q = new.normal(self.batch * self.new, self.q_heads, self.head_size)
        workspace = new.filled(0, WORKSPACE_SIZE, dtype=torch.int32)
        return {"q": q, "cu_seqlens_q": new.tensor(begins, torch.int32), "workspace": workspace} | cache

    def _arguments(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return tuple(x[name] for name in ("q", "k_cache", "v_cache", "block_tables", "cu_seqlens_q", "seq_lens"))

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        out = varlen_prefill_attention(*self._arguments(x), max_seqlen_q=self.new, workspace=x["workspace"])
        assert isinstance(out, torch.Tensor)
        return (out,)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        out = varlen_prefill_attention_ref(*self._arguments(x), max_seqlen_q=self.new)
        assert isinstance(out, torch.Tensor)
        return (out,)

    def work(self, x: Inputs) -> Work:
        pairs = self.batch * (self.new * self.cached + self.new**2 / 2)  # the causal square counts half
        elements = self.batch * (self.new * self.q_heads + (self.new + self.cached) * self.kv_heads) * self.head_size
        return Work(bytes=2 * 2 * elements, flops=4 * pairs * self.q_heads * self.head_size)


def space(
    head_size: int,
    group: int,
    tokens: int,
    max_q: int,
    capacity: int,
    dtype: str,
    cache_dtype: str,
    arch: str,
    logits: str,
    few: str,
) -> list[tuning.Config]:
    rows = prefill.padded_rows(max_q, group)
    if few == "decode":  # its table decides
        return [decode.sm90_config(head_size, max_q * group, cache_dtype) | {"kernel": "decode"}]
    if arch == "sm90":  # two to four times as fast as the other
        hopper = {"kernel": "sm90", "BLOCK_M": 128, "PROGRAMS": 132, "num_warps": 4}
        narrow = {"BLOCK_N": (64,), "PARTS": (1, 2), "MERGED": (False, True), "num_stages": (4,)}
        if few == "split":  # with tiles of 128 keys it spills
            return [hopper | tile for tile in product(**narrow, SPLIT=(64, 128, 256))]
        wide = product(BLOCK_N=(128,), PARTS=(1, 2), MERGED=(False,), SPLIT=(0,), num_stages=(2,))
        return [hopper | tile for tile in [*product(**narrow, SPLIT=(0,)), *wide]]
    tiles = [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2)]
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    whole = {"kernel": "portable", "SPLIT": 0}
    configs = [whole | dict(zip(names, tile, strict=True)) for tile in tiles if tile[0] <= rows]
    if few == "split" and dtype != "float32":
        configs += [prefill.shared_config(head_size, rows) | {"SPLIT": split} for split in (16, 32, 64, 128)]
    return configs


TUNABLE = Tunable(
    op="varlen_prefill_attention",
    module=prefill,
    also=(portable_prefill, sm90_copying, sm90_decode, sm90_prefill, sm90_rows, sm90_shares),
    default=prefill.PREFILL.default_config,
    problems=(
        # Llama-3.1-8B
        *(PrefillAttention(batch, new) for batch, new in ((1, 16384), (4, 4096), (16, 1024), (64, 256))),
        PrefillAttention(4, 1024, cached=7168),
        # the next turn of a chat
        *(PrefillAttention(1, new, cached=32768 - new) for new in (16, 32, 128, 256)),
        # the same with heads of Gemma 2 9B and of Phi-3 mini, which Hopper's kernel does not take
        PrefillAttention(1, 32, cached=8160, q_heads=16, kv_heads=8, head_size=256),
        PrefillAttention(1, 32, cached=8160, q_heads=32, kv_heads=32, head_size=96),
        # Qwen3-0.6B and Qwen3-30B-A3B
        *(
            PrefillAttention(batch, new, q_heads=q_heads, kv_heads=kv_heads)
            for q_heads, kv_heads in ((16, 8), (32, 4))
            for batch, new in ((2, 4096), (16, 512))
        ),
    ),
    space=space,
)
