"""The order of pairs by expert: how many pairs a program ranks, and how many table columns it fills at a time."""

from dataclasses import dataclass

import torch
import triton

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels.moe import grouping
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class Grouping(Problem):
    """Pairs spread evenly over the experts, in random order."""

    tokens: int
    experts: int
    top_k: int
    block_m: int = 64

    @property
    def name(self) -> str:
        return f"group_by_expert T{self.tokens} E{self.experts}/{self.top_k}"

    def inputs(self, new: TensorFactory) -> Inputs:
        ids = new.permutation(self.tokens * self.top_k).remainder(self.experts)
        return {"ids": ids.view(self.tokens, self.top_k)}

    def _counts(self) -> list[int]:
        pairs = self.tokens * self.top_k
        return [pairs // self.experts + (expert < pairs % self.experts) for expert in range(self.experts)]

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        blocks = grouping.group_by_expert(x["ids"], self.experts, self.block_m)
        used = sum(triton.cdiv(count, self.block_m) for count in self._counts())
        return blocks.order, blocks.table[:, :used], blocks.table[2, used:]

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        table, first = [], 0
        for expert, count in enumerate(self._counts()):
            for done in range(0, count, self.block_m):
                table.append((expert, first + done, min(self.block_m, count - done)))
            first += count
        device, pairs = x["ids"].device, self.tokens * self.top_k
        live = min(self.experts, pairs)
        unused = live + (pairs - live) // self.block_m - len(table)
        return (
            x["ids"].flatten().argsort(stable=True),
            torch.tensor(table, device=device).T,
            torch.zeros(unused, dtype=torch.int32, device=device),
        )

    def work(self, x: Inputs) -> Work:
        return Work(bytes=8 * self.tokens * self.top_k)


def space(pairs: int, experts: int) -> list[tuning.Config]:
    """1 to 16 of the ranked pairs a thread."""
    configs = product(CHUNK=(32, 64, 128, 256, 512), COLS=(8, 16, 32), num_warps=(1, 2, 4, 8))
    return [config for config in configs if 1 <= config["CHUNK"] // (32 * config["num_warps"]) <= 16]


TUNABLE = Tunable(
    op="moe_grouping",
    module=grouping,
    default=grouping.default_config,
    # Qwen3-30B-A3B and Mixtral-8x7B
    problems=tuple(
        Grouping(tokens, experts, top_k)
        for experts, top_k in ((128, 8), (8, 2))
        for tokens in (1, 16, 64, 256, 1024, 8192)
    ),
    space=space,
)
