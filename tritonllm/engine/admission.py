"""What a waiting request is given when it begins to run: blocks that hold its beginning, and free ones, into which more
of it may come back from the host's memory (:mod:`tritonllm.engine.host_tier`). No torch.

Admission takes the blocks of all known tokens at once, chunked or not, and leaves one free block for each request
that runs already. Those need at most one each in the next ``block_size`` steps, so a newcomer is not preempted as soon
as it came.
"""

from tritonllm.engine.block_pool import BlockPool
from tritonllm.engine.gang import prompt_blocks, room_for
from tritonllm.engine.host_tier import HostTier
from tritonllm.engine.prefix_cache import PrefixCache
from tritonllm.engine.request import Request


class Admission:
    """Gives blocks of one pool to waiting requests.

    Args:
        pool: the blocks.
        block_size: tokens per block.
        prefix_cache: finds those that hold a request's beginning; ``None`` looks only at its running siblings.
        tier: what the host's memory holds; ``None`` for nothing.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, prefix_cache: PrefixCache | None, tier: HostTier | None = None
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        self._tier = tier

    def check(self, request: Request) -> None:
        """Raises:
        ValueError: the pool cannot hold the request's prompt and a new token.
        """
        length, pools = len(request.prompt_token_ids), request.pooling is not None  # then its new token takes no room
        needed = -(-(length + (not pools)) // self._block_size)
        if needed > self._pool.num_blocks:
            raise ValueError(
                f"a prompt of {length} tokens and one new token need {needed} blocks of {self._block_size} tokens, but "
                f"num_blocks is {self._pool.num_blocks}: shorten the prompt, or raise num_blocks"
            )

    def allocate(self, request: Request, running: int, free_seats: int) -> bool:
        """Give a waiting request the blocks of all its known tokens, cached ones first; false if they are too few, or
        if its siblings would not fit beside it (unless it is alone: then it need not wait for more).

        Args:
            running: so many requests run.
            free_seats: so many more may.
        """
        pool, cache = self._pool, self._prefix_cache
        total, spare = -(-request.num_tokens // self._block_size), pool.num_free - running
        if request.siblings and running:
            seats, blocks = room_for(request, self._block_size)
            spare = spare - blocks if seats <= free_seats else 0
        if self._tier is not None and self._tier.delays(request):
            return False
        if spare < 1:  # at least one block is never a cached one: no need to look
            return False
        cached = cache.match(request) if cache else prompt_blocks(request, self._block_size)
        shared = pool.count_used(cached)  # the other cached ones are in the free list
        if total - shared > spare:
            return False
        pool.retain(cached)  # before anything is allocated, which could evict them
        new = pool.allocate_many(total - len(cached))
        back = 0 if self._tier is None else self._bring_back(request, cached, new, self._tier)
        request.block_ids = cached + new
        request.num_computed_tokens = (len(cached) + back) * self._block_size
        request.num_labelled_blocks = len(cached) + back
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            if cache:
                cache.count(request)
        return True

    def _bring_back(self, request: Request, cached: list[int], new: list[int], tier: HostTier) -> int:
        """Let the first of the new blocks be loaded, if that is sooner done than computing them; returns how many."""
        cache = self._prefix_cache
        if cache is None:
            slots = tier.find_own(request, self._block_size, len(cached))
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
