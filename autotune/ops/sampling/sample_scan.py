"""The pass over the logits that sampling begins with: how much of a row a program takes."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.sampling import common

GROUP = common.GROUP.value


@dataclass(frozen=True)
class Scan(Problem):
    rows: int
    vocab: int

    @property
    def name(self) -> str:
        return f"sample_scan B{self.rows} V{self.vocab}"

    def inputs(self, new: TensorFactory) -> Inputs:
        logits = new.normal(self.rows, 1, self.vocab, dtype=torch.float32, std=2)
        return {"logits": logits, "temperature": new.filled(0.8, self.rows, dtype=torch.float32)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return common.scan(x["logits"], x["temperature"])

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        padding = -self.vocab % GROUP
        logits = torch.nn.functional.pad(x["logits"][:, 0], (0, padding), value=float("-inf")).double()
        groups = logits.unflatten(1, (-1, GROUP))
        largest = groups.amax(-1, keepdim=True)
        return largest[..., 0], ((groups - largest) / x["temperature"][:, None, None]).exp().sum(-1)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=4 * self.rows * (self.vocab + 2 * self.vocab / GROUP))


def space(rows: int, vocab: int) -> list[tuning.Config]:
    return product(TILES=(1, 2, 4, 8), num_warps=(1, 2, 4, 8, 16))


TUNABLE = Tunable(
    op="sample_scan",
    module=common,
    default=common.default_config,
    # Vocabularies of Qwen3 and Llama 3
    problems=tuple(Scan(rows, vocab) for vocab in (151936, 128256) for rows in (1, 4, 16, 64, 256)),
    space=space,
)
