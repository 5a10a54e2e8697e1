"""Verify attention: as decode attention, with the draft's tokens as more rows of each key/value head."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable
from autotune.ops.attention.paged_decode_attention import balanced_space, sm90_space
from autotune.paged import paged_cache
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import WORKSPACE_SIZE, paged_verify_attention, paged_verify_attention_ref
from tritonllm.kernels.attention import verify
from tritonllm.kernels.attention.portable import balanced
from tritonllm.kernels.attention.portable import prefill as portable_prefill
from tritonllm.kernels.attention.sm90 import copying as sm90_copying
from tritonllm.kernels.attention.sm90 import decode as sm90_decode
from tritonllm.kernels.attention.sm90 import prefill as sm90_prefill
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class VerifyAttention(Problem):
    batch: int
    q_len: int
    q_heads: int
    kv_heads: int
    head_size: int
    context: int
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"verify B{self.batch} x {self.q_len} H{self.q_heads}/{self.kv_heads} D{self.head_size} L{self.context}"

    def inputs(self, new: TensorFactory) -> Inputs:
        lengths = [self.context] * self.batch
        cache = paged_cache(new, lengths, self.context, self.block_size, self.kv_heads, self.head_size)
        begins = new.tensor([self.q_len * i for i in range(self.batch + 1)], dtype=torch.int32)
        workspace = new.filled(0, WORKSPACE_SIZE, dtype=torch.int32)
        q = new.normal(self.batch * self.q_len, self.q_heads, self.head_size)
        return {"q": q, "cu_seqlens_q": begins, "workspace": workspace} | cache

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        tensors = (x["q"], x["k_cache"], x["v_cache"], x["block_tables"], x["cu_seqlens_q"], x["seq_lens"])
        out = paged_verify_attention(*tensors, max_seqlen_q=self.q_len, workspace=x["workspace"])
        assert isinstance(out, torch.Tensor)
        return (out,)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        tensors = (x["q"], x["k_cache"], x["v_cache"], x["block_tables"], x["cu_seqlens_q"], x["seq_lens"])
        out = paged_verify_attention_ref(*tensors, max_seqlen_q=self.q_len)
        assert isinstance(out, torch.Tensor)
        return (out,)

    def work(self, x: Inputs) -> Work:
        keys, rows = self.batch * self.context, self.batch * self.q_len * self.q_heads
        return Work(
            bytes=2 * self.head_size * (2 * keys * self.kv_heads + 2 * rows),
            flops=4 * keys * self.q_len * self.q_heads * self.head_size,
        )


def space(
    head_size: int, group: int, programs: int, dtype: str, cache_dtype: str, arch: str, tree: str
) -> list[tuning.Config]:
    prefill = [] if tree == "yes" else [{"kernel": "prefill"}]
    return prefill + balanced_space(group) + (sm90_space(group, cache_dtype) if arch == "sm90" else [])


TUNABLE = Tunable(
    op="paged_verify_attention",
    module=verify,
    also=(balanced, sm90_copying, sm90_decode, portable_prefill, sm90_prefill),
    default=verify.VERIFY.default_config,
    problems=tuple(
        VerifyAttention(batch, q_len, 32, 8, 128, context)
        for batch, context in ((8, 8192), (64, 4096))
        for q_len in (2, 4, 8, 16)
    ),
    space=space,
)
