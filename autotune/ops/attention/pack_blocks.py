"""Gathering blocks of the cache for the host's memory: how much of a block a program takes."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import pack_blocks, pack_blocks_ref
from tritonllm.kernels.attention import packed_blocks
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class PackBlocks(Problem):
    count: int
    layers: int
    elements: int
    blocks: int = 512
    mutates: ClassVar[tuple[str, ...]] = ("packed",)

    @property
    def name(self) -> str:
        return f"pack_blocks N{self.count} L{self.layers} E{self.elements}"

    def shared(self, new: TensorFactory) -> Inputs:
        return {"pool": new.normal(2 * self.layers, self.blocks, self.elements)}

    def inputs(self, new: TensorFactory) -> Inputs:
        return {
            "blocks": new.permutation(self.blocks, dtype=torch.int64)[: self.count],
            "packed": new.normal(self.count, 2 * self.layers, self.elements),
        }

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        pack_blocks(x["pool"], x["blocks"], x["packed"])
        return (x["packed"],)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        pack_blocks_ref(x["pool"], x["blocks"], x["packed"])
        return (x["packed"],)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=2 * 2 * self.count * 2 * self.layers * self.elements)


def space(elements: int) -> list[tuning.Config]:
    """2 to 64 elements a thread."""
    configs = product(BLOCK=(512, 1024, 2048, 4096, 8192, 16384), num_warps=(1, 2, 4, 8))
    return [config for config in configs if 2 <= config["BLOCK"] // (32 * config["num_warps"]) <= 64]


TUNABLE = Tunable(
    op="pack_blocks",
    module=packed_blocks,
    default=packed_blocks.default_pack_config,
    problems=tuple(PackBlocks(16, layers, 16 * heads * 128) for layers, heads in ((32, 8), (48, 4))),
    space=space,
)
