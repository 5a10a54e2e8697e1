"""What a waiting request is given when it begins to run: blocks that hold its beginning, and free ones, into which more
of it may come back from the host's memory (:mod:`tritonllm.engine.schedule.host_tier`). No torch.

Admission takes the blocks of all known tokens at once, chunked or not, and leaves one free block for each request
that runs already and is ahead of it. Those need at most one each in the next ``block_tokens`` steps, so a newcomer is
not preempted as soon as it came.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from tritonllm.engine.data.request import Request
from tritonllm.engine.schedule.block_pool import BlockPool
from tritonllm.engine.schedule.gang import prompt_blocks, room_for
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.prefix_cache import PrefixCache


class Demand(NamedTuple):
    """What a request needs before it runs.

    Attributes:
        cached: blocks that hold its beginning.
        blocks: the others of its known tokens, and those cached ones that nobody uses: so many must be free.
        seats: how many seats the request and those siblings take that are to begin with it.
        others: how many blocks these siblings need.
    """

    cached: Sequence[int]
    blocks: int
    seats: int = 1
    others: int = 0

    def fits(self, seats: int, blocks: int, alone: bool) -> bool:
        """Whether so many free ones are enough; if nobody else runs it need not wait for more, and its siblings follow
        as they fit."""
        if alone:
            return seats >= 1 and self.blocks <= blocks
        return self.seats <= seats and self.blocks + self.others <= blocks


class Admission:
    """Gives blocks of one pool to waiting requests.

    Args:
        pool: the blocks.
        block_tokens: tokens of a block, over all ranks.
        prefix_cache: finds those that hold a request's beginning; ``None`` looks only at its running siblings.
        tier: what the host's memory holds; ``None`` for nothing.
    """

    def __init__(
        self, pool: BlockPool, block_tokens: int, prefix_cache: PrefixCache | None, tier: HostTier | None = None
    ) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._prefix_cache = prefix_cache
        self._tier = tier

    def check(self, request: Request) -> None:
        """Check that the pool is large enough for a request.

        Raises:
            ValueError: the pool cannot hold the request's prompt and a new token.
        """
        length, pools = len(request.prompt_token_ids), request.pooling is not None  # then its new token takes no room
        needed = -(-(length + (not pools)) // self._block_tokens)
        if needed > self._pool.num_blocks:
            raise ValueError(
                f"a prompt of {length} tokens and one new token need {needed} blocks of {self._block_tokens} tokens, "
                f"but num_blocks is {self._pool.num_blocks}: shorten the prompt, or raise num_blocks"
            )

    def demand(self, request: Request, most: int) -> Demand | None:
        """What a waiting request needs before it runs; ``None`` if that is surely more than ``most`` blocks, or if it
        must not run yet."""
        if most < 1 or (self._tier is not None and self._tier.delays(request)):
            return None  # at least one block is never a cached one: no need to look
        total = -(-request.num_tokens // self._block_tokens)
        cached = self._prefix_cache.match(request) if self._prefix_cache else prompt_blocks(request, self._block_tokens)
        new = total - self._pool.count_used(cached)  # the other cached ones are in the free list
        if new > most:
            return None
        seats, others = room_for(request, self._block_tokens) if request.siblings else (1, 0)
        return Demand(cached, new, seats, others)

    def allocate(self, request: Request, cached: Sequence[int]) -> None:
        """Give a waiting request the blocks of all its known tokens, of which ``cached`` are the first; there are
        enough."""
        pool, cache, total = self._pool, self._prefix_cache, -(-request.num_tokens // self._block_tokens)
        pool.retain(cached)  # before anything is allocated, which could evict them
        cached, new = list(cached), pool.allocate_many(total - len(cached))
        back = 0 if self._tier is None else self._bring_back(request, cached, new, self._tier)
        request.block_ids = cached + new
        request.num_computed_tokens = (len(cached) + back) * self._block_tokens
        request.num_labelled_blocks = len(cached) + back
        if request.num_cached_tokens is None:
            request.num_cached_tokens, request.admitted_time = request.num_computed_tokens, time.monotonic()
            if cache:
                cache.count(request)

    def _bring_back(self, request: Request, cached: Sequence[int], new: list[int], tier: HostTier) -> int:
        """Let the first of the new blocks be loaded, if that is sooner done than computing them; returns how many."""
        cache = self._prefix_cache
        if cache is None:
            slots = tier.find_own(request, self._block_tokens, len(cached))
        else:
            labels = cache.labels(request)
            slots = tier.find(labels[len(cached) :])
            # used now, so that the host does not forget what the device needs most; of the two parts the first is last
            tier.keep_all(dict(zip(labels, cached, strict=False)))
            if not tier.rates.pays(len(slots)):
                slots = []
            for label, block in zip(labels[len(cached) :], new[: len(slots)], strict=False):
                self._pool.label(block, label)
        tier.bring(request, cached, slots, new)
        return len(slots)
