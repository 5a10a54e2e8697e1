"""The multiplier and the soft cap of logits, in place."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import cap_logits, cap_logits_ref
from tritonllm.kernels.elementwise import logits
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class CapLogits(Problem):
    rows: int
    vocab: int
    mutates: ClassVar[tuple[str, ...]] = ("logits",)

    @property
    def name(self) -> str:
        return f"cap_logits N{self.rows} V{self.vocab}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"logits": new.normal(self.rows, self.vocab, dtype=torch.float32, std=20)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (cap_logits(x["logits"], softcap=30.0),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (cap_logits_ref(x["logits"], softcap=30.0),)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=8 * self.rows * self.vocab)


def space(rows: int, vocab: int) -> list[tuning.Config]:
    """4 to 16 elements a thread."""
    configs = product(BLOCK=(512, 1024, 2048, 4096, 8192), num_warps=(1, 2, 4, 8))
    return [config for config in configs if 4 <= config["BLOCK"] // (32 * config["num_warps"]) <= 16]


TUNABLE = Tunable(
    op="cap_logits",
    module=logits,
    default=logits.default_config,
    problems=tuple(CapLogits(rows, 256000) for rows in (1, 4, 16, 64, 256)),  # Gemma and Command-R
    space=space,
)
