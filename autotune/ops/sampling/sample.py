"""Sampling: how many logits of a row that is searched are in registers, and how many groups are read at a time."""

from dataclasses import dataclass
from typing import Any

import torch

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import sample, sample_ref
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.sampling import limited

MODES = ("temperature", "top_p", "top_k_top_p")


def likely_logits(new: TensorFactory, rows: int, vocab: int) -> torch.Tensor:
    """float32 logits as of a language model that is fairly sure: 64 likely tokens a row over a broad background."""
    logits = new.normal(rows, vocab, dtype=torch.float32, std=2)
    likely = logits[:, :: max(1, vocab // 64)]
    likely.copy_(9 + 3 * new.uniform(*likely.shape))
    return logits


@dataclass(frozen=True)
class Sampling(Problem):
    """One call for each mode."""

    batch: int
    modes: tuple[str, ...]
    vocab: int = 151936

    @property
    def name(self) -> str:
        return f"sample B{self.batch} V{self.vocab} {' + '.join(self.modes)}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return {
            "logits": likely_logits(new, self.batch, self.vocab),
            "temperature": new.filled(0.8, self.batch, dtype=torch.float32),
            "top_k": new.filled(50, self.batch, dtype=torch.int32),
            "top_p": new.filled(0.9, self.batch, dtype=torch.float32),
            "seeds": new.integers(0, 2**62, self.batch, dtype=torch.int64),
            "steps": new.integers(0, 2**20, self.batch, dtype=torch.int64),
            "workspace": new.filled(0, self.batch, dtype=torch.int32),
        }

    def _arguments(self, x: Inputs, mode: str) -> tuple[Any, ...]:
        top_k = x["top_k"] if "top_k" in mode else None
        top_p = x["top_p"] if "top_p" in mode else None
        return x["logits"], x["temperature"], top_k, top_p, None, x["seeds"], x["steps"]

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return tuple(sample(*self._arguments(x, mode), workspace=x["workspace"]) for mode in self.modes)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return tuple(sample_ref(*self._arguments(x, mode)) for mode in self.modes)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=4 * len(self.modes) * self.batch * self.vocab)


def space(vocab: int) -> list[tuning.Config]:
    """4 to 16 of the searched logits a thread."""
    configs = product(CAPACITY=(4096, 8192, 16384), TILE=(16, 32, 64), num_warps=(8, 16, 32))
    return [config for config in configs if 4 <= config["CAPACITY"] // (32 * config["num_warps"]) <= 16]


@dataclass(frozen=True)
class FlatSampling(Sampling):
    """Logits of which no few are likely: every row is searched."""

    @property
    def name(self) -> str:
        return f"sample flat B{self.batch} V{self.vocab} {' + '.join(self.modes)}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return super().inputs(new) | {"logits": new.normal(self.batch, self.vocab, dtype=torch.float32)}


TUNABLE = Tunable(
    op="sample",
    module=limited,
    default=limited.default_config,
    problems=(FlatSampling(64, MODES[1:2]),),  # the batch is no part of the key, so one stands for all
    space=space,
)
