"""How many tokens of prompts a step takes in while others decode. No torch.

A step of decodes reads the weights and computes little; up to about 290 tokens an H200 computes while it reads them.
So a small chunk of a prompt beside decodes is all but free. A large one makes each of them wait: of Llama-3.1-8B a
token then takes 190 ms instead of 5, with `max_num_batched_tokens` of 8192 (chunked prefill and its budget: Agrawal et
al., "Sarathi-Serve", OSDI 2024). On the other hand, small chunks let prompts queue up when many come at once.

Hence a step takes as many as let the queue be empty in ``STEPS`` steps, but at least ``BESIDE``. A prompt of 8192
tokens takes 16 steps of some 13 ms instead of one of 190; where hundreds of prompts wait, steps are as full as without
decodes. The numbers are powers of two, which captured steps have room for (:mod:`tritonllm.engine.step.graphs`).
"""

import sys
from collections.abc import Sequence

from tritonllm.config.engine import SchedulerConfig
from tritonllm.engine.data.control import MOST_FORCED
from tritonllm.engine.data.request import Request
from tritonllm.engine.schedule.waiting_queue import WaitingQueue

BESIDE = 256
STEPS = 16


def prompt_budget(most: int, queued: int) -> int:
    """Tokens of prompts in a step with decodes.

    Args:
        most: tokens of a step.
        queued: tokens of all prompts that are not computed yet.
    """
    wanted = -(-queued // STEPS)
    return min(most, max(BESIDE, 1 << max(0, wanted - 1).bit_length()))


class PromptShare:
    """What prompts may have of a step that is being planned; found out when the first of them asks.

    Args:
        config: the limits of a step. Prompts that are not cut have no share: a step takes them whole, or not yet.
        running: the requests that run.
        waiting: the queue of waiting requests.

    Attributes:
        granted: the share; ``None`` while no prompt has asked.
        left: tokens that are left of it.
    """

    def __init__(self, config: SchedulerConfig, running: Sequence[Request], waiting: WaitingQueue) -> None:
        self._most, self._running, self._waiting = config.max_num_batched_tokens, running, waiting
        self._cuts, self._longest = config.enable_chunked_prefill, config.long_prefill_token_threshold or sys.maxsize
        self._decodes = False  # the step has one already
        self.granted: int | None = None
        self.left: int | None = None

    def _in_chunks(self, request: Request) -> bool:
        """Whether the prompt may be computed in chunks. A prompt that is pooled may not, for it may have to be computed
        at once, nor the few tokens of a jump."""
        if not self._cuts or request.pooling is not None:
            return False
        left = request.num_tokens - request.num_computed_tokens
        return request.num_computed_tokens < len(request.prompt_token_ids) or left > 2 * MOST_FORCED

    def room(self, request: Request, budget: int) -> int:
        """Tokens that the step may compute of a request, if ``budget`` are left of it."""
        if not self._in_chunks(request):
            return budget
        if self.left is None:
            behind = [r.num_tokens + r.num_pending_tokens - 1 - r.num_computed_tokens for r in self._running]
            # A request that the token in flight ends waits for no step. (If it did, prompts with max_tokens=1 alone, as
            # a server that only prefills gets them, would be taken in by ever smaller steps.)
            decodes = self._decodes or any(
                tokens == 0 and r.num_tokens + r.num_pending_tokens < r.length_limit
                for tokens, r in zip(behind, self._running, strict=True)
            )
            self.left = prompt_budget(self._most, self._waiting.num_tokens + sum(behind)) if decodes else self._most
            self.granted = self.left
        return min(budget, self.left, self._longest)

    def take(self, request: Request, tokens: int) -> None:
        """The step computes so many of a request."""
        if tokens == 1 and self._decodes:  # asked of each request in each step
            return
        self._decodes |= tokens == 1 and not self._in_chunks(request)
        if self.left is not None and tokens > 1 and self._in_chunks(request):
            self.left -= tokens
