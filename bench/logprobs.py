"""Log-probabilities as a benchmark: a problem that has nothing to tune, and what torch does instead."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autotune.ops.sampling.sample import likely_logits
from autotune.problem import Inputs, Problem, TensorFactory, Work
from bench.baselines import Call
from tritonllm.kernels import token_logprobs, token_logprobs_ref


@dataclass(frozen=True)
class TokenLogprobs(Problem):
    """The chosen tokens' log-probabilities and ranks, and the ``top_n`` most likely tokens."""

    rows: int
    top_n: int
    vocab: int = 151936

    @property
    def name(self) -> str:
        return f"token_logprobs R{self.rows} N{self.top_n} V{self.vocab}"

    def inputs(self, new: TensorFactory) -> Inputs:
        chosen = new.integers(0, self.vocab, self.rows, dtype=torch.int64)
        return {"logits": likely_logits(new, self.rows, self.vocab), "chosen": chosen}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return token_logprobs(x["logits"], x["chosen"], self.top_n)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return token_logprobs_ref(x["logits"], x["chosen"], self.top_n)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=4 * self.rows * self.vocab)


def log_softmax_and_topk(problem: TokenLogprobs, sets: list[Inputs]) -> Call:
    def call(i: int) -> Sequence[torch.Tensor]:
        logprobs, chosen = sets[i]["logits"].log_softmax(-1), sets[i]["chosen"][:, None]
        of_chosen, best = logprobs.gather(-1, chosen), logprobs.topk(problem.top_n, dim=-1)
        ids = torch.cat((chosen, best.indices), dim=-1)
        return ids, torch.cat((of_chosen, best.values), dim=-1), (logprobs > of_chosen).sum(-1) + 1

    return call
