"""Which sequences a pipeline's next step takes. No torch.

A pipeline of S stages begins S steps before it draws the tokens of the first of them. So a sequence that was sampled
from in one step has a token for the next one only S steps later, and what decodes is dealt out to S steps, equally
many sequences to each: were all in one step, the stages would wait for each other. Prompts are not dealt out: a chunk
may follow in the next step.
"""

from collections.abc import Sequence

from tritonllm.engine.data.request import Request


class MicroBatches:
    """Which sequences may be in the next step: those of one of the batches that the stages work on at once.

    Args:
        stages: how many stages the pipeline has. With one, every sequence may be in every step.

    Attributes:
        are_taken: whether there is more than one stage.
    """

    def __init__(self, stages: int) -> None:
        self._stages, self.are_taken = stages, stages > 1
        self._number = 0  # of the plan in the making; empty ones are not counted
        self._left = 0  # sequences that it may still let decode

    def begin(self, running: Sequence[Request]) -> None:
        """A plan begins with these requests."""
        if self.are_taken:
            decoding = sum(request.num_tokens - request.num_computed_tokens <= 1 for request in running)
            self._left = -(-decoding // self._stages)

    def is_free(self, request: Request) -> bool:
        """Whether a running request may be in the plan: its last token is drawn before the plan's step begins, and if
        it decodes, there is room for it."""
        if request.num_pending_tokens and self._number - request.sampled_in < self._stages:
            return False
        if request.num_tokens + request.num_pending_tokens - request.num_computed_tokens != 1:
            return True
        self._left -= 1
        return self._left >= 0

    def take(self, request: Request) -> None:
        """The plan samples from it."""
        request.sampled_in = self._number

    def planned(self, runs: bool) -> None:
        """The plan is made; it is empty unless it ``runs``."""
        self._number += runs
