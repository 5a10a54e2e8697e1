"""Rejection sampling with draft probabilities: how the program of a row reads a row whole, and its registers."""

from dataclasses import dataclass
from typing import Any

import torch

from autotune.ops import Tunable, product
from autotune.ops.sampling.sample import likely_logits
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import rejection_sample, rejection_sample_ref
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.speculative import judge

DRAFTS = ("probabilities", "tokens", "greedy")


@dataclass(frozen=True)
class RejectionSampling(Problem):
    """``drafts`` tokens a sequence: drawn from probabilities that are given, or only tokens, or under temperature 0."""

    batch: int
    drafts: int
    draft: str
    vocab: int = 151936

    @property
    def name(self) -> str:
        return f"rejection_sample B{self.batch} G{self.drafts} V{self.vocab} {self.draft}"

    def inputs(self, new: TensorFactory) -> Inputs:
        logits = likely_logits(new, self.batch * (self.drafts + 1), self.vocab)
        logits = logits.view(self.batch, self.drafts + 1, self.vocab)
        probs = (logits[:, :-1] + new.normal(self.batch, self.drafts, self.vocab, dtype=torch.float32)).softmax(-1)
        if self.draft == "probabilities":  # drawn by exponential races: the least of noise / probability
            noise = -new.uniform(*probs.shape).log_()
            draft_ids = (noise / probs).argmin(-1)
        else:
            draft_ids = probs.argmax(-1)
        temperature = 0.0 if self.draft == "greedy" else 0.8
        return {
            "draft_ids": draft_ids,
            "draft_probs": probs if self.draft == "probabilities" else None,
            "target_logits": logits,
            "temperature": new.filled(temperature, self.batch, dtype=torch.float32),
            "seeds": new.integers(0, 2**62, self.batch, dtype=torch.int64),
            "steps": new.integers(0, 2**20, self.batch, dtype=torch.int64),
            "workspace": new.filled(0, self.batch * (self.drafts + 1), dtype=torch.int32),
        }

    def _arguments(self, x: Inputs) -> tuple[Any, ...]:
        inputs = (x["draft_ids"], x["draft_probs"], x["target_logits"])
        return (*inputs, x["temperature"], None, None, x["seeds"], x["steps"])

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return rejection_sample(*self._arguments(x), workspace=x["workspace"])

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return rejection_sample_ref(*self._arguments(x))

    def work(self, x: Inputs) -> Work:
        rows = self.batch * (self.drafts + 1)
        if self.draft == "probabilities":
            rows += self.batch * self.drafts
        return Work(bytes=4 * rows * self.vocab)


def space(vocab: int) -> list[tuning.Config]:
    """Registers decide how many of a step's rows are judged at a time: at 80, with 8 warps, three a multiprocessor."""
    narrow = product(WIDE=(16,), num_warps=(8,), maxnreg=(80, 96, 128)) + product(
        WIDE=(8, 16), num_warps=(4,), maxnreg=(128,)
    )
    return narrow + product(WIDE=(32,), num_warps=(8, 16), maxnreg=(128,))


TUNABLE = Tunable(
    op="rejection_judge",
    module=judge,
    default=judge.default_config,
    problems=(RejectionSampling(64, 4, "probabilities"),),  # the batch is no part of the key, so one stands for all
    space=space,
)
