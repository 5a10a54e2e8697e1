"""In which order requests get a step's tokens, seats and blocks, and who gives way. No torch.

The scheduler asks a policy for each request's rank once, when the request arrives, and sorts by it from then on: those
that run are served in this order, those that wait are admitted in it, and where blocks run out the last one in it gives
way. An order that never changes is why the first request in it always goes on (the scheduler's argument). That every
request becomes the first at some time is the policy's duty.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

from tritonllm.config.checks import load_code
from tritonllm.config.engine import SchedulerConfig
from tritonllm.engine.data.request import Request


class SchedulingPolicy(ABC):
    """The order of requests. ``LLM(..., scheduler_cls=MyPolicy)`` takes a class derived from this one, or its name as
    ``"module.MyPolicy"``, and calls it once, without arguments.

    It must let nobody starve: if requests that have yet to arrive can always get lower ranks than one that waits, that
    one may wait for ever. Ranks that also grow with :attr:`Request.arrival` keep that from happening.

    Attributes:
        preempts: a request that waits takes seats and blocks from running ones of higher rank, if that is enough for it
            to begin. Otherwise those that run keep them until they end, or the cache is full.
        uses_priority: requests may have a ``priority``. Otherwise one that has is refused.
    """

    preempts = False
    uses_priority = True

    @abstractmethod
    def rank(self, request: Request) -> float:
        """The place of a request that has just arrived: lower ranks come first, equal ones as they arrived.

        Args:
            request: what it asks for: ``prompt_token_ids``, ``params``, ``priority``, ``arrival`` and what else the
                first group of :class:`Request`'s fields has. Of a user's request with several sequences, the first.
        """


class ByArrival(SchedulingPolicy):
    """First come, first served: ``policy="fcfs"``."""

    uses_priority = False

    def rank(self, request: Request) -> float:
        """0: arrival alone decides."""
        return 0


class ByPriority(SchedulingPolicy):
    """The user's priorities: ``policy="priority"``. A stream of higher ones that never ends keeps lower ones from
    running."""

    preempts = True

    def rank(self, request: Request) -> float:
        """The request's own number."""
        return request.priority


NAMED = {"fcfs": ByArrival, "priority": ByPriority}


def policy_of(config: SchedulerConfig) -> SchedulingPolicy:
    """The policy that a configuration names.

    Raises:
        ValueError: ``scheduler_cls`` is no policy, or cannot be imported or made.
    """
    if config.scheduler_cls is None:
        return NAMED[config.policy]()
    kind: Any = config.scheduler_cls
    if isinstance(kind, str):
        kind = load_code("scheduler_cls=", kind)
    if not (isinstance(kind, type) and issubclass(kind, SchedulingPolicy)):
        raise ValueError(
            f"scheduler_cls must be a class derived from {SchedulingPolicy.__module__}.{SchedulingPolicy.__name__}, "
            f"which says in which order requests run, got {kind!r}"
        )
    try:
        return kind()
    except TypeError as error:
        raise ValueError(
            f"scheduler_cls: {kind.__name__} must have a rank() and be made without arguments ({error})"
        ) from error


def rank_of(policy: SchedulingPolicy, request: Request) -> float:
    """A request's rank; sequences of one user's request have that of the first of them.

    Raises:
        ValueError: the policy fails, or returns no number.
    """
    if request.siblings and request.siblings[0] is not request and request.siblings[0].rank is not None:
        return request.siblings[0].rank
    try:
        rank = policy.rank(request)
    except Exception as error:
        raise ValueError(f"scheduler_cls: {type(policy).__name__}.rank: {type(error).__name__}: {error}") from error
    if not isinstance(rank, int | float) or math.isnan(rank):
        raise ValueError(f"scheduler_cls: {type(policy).__name__}.rank must return a number, got {rank!r}")
    return rank
