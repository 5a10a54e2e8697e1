"""What a waiting request is given when it begins to run: blocks that hold its beginning, and free ones. No torch.

Admission takes the blocks of all known tokens at once, chunked or not, and leaves one free block for each request
that runs already. Those need at most one each in the next ``block_size`` steps, so a newcomer is not preempted as soon
as it came.
"""

from tritonllm.engine.block_pool import BlockPool
from tritonllm.engine.gang import prompt_blocks, room_for
from tritonllm.engine.prefix_cache import PrefixCache
from tritonllm.engine.request import Request


class Admission:
    """Gives blocks of one pool to waiting requests.

    Args:
        pool: the blocks.
        block_size: tokens per block.
        prefix_cache: finds those that hold a request's beginning; ``None`` looks only at its running siblings.
    """

    def __init__(self, pool: BlockPool, block_size: int, prefix_cache: PrefixCache | None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._prefix_cache = prefix_cache

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
        if spare < 1:  # at least one block is never a cached one: no need to look
            return False
        cached = cache.match(request) if cache else prompt_blocks(request, self._block_size)
        shared = pool.count_used(cached)  # the other cached ones are in the free list
        if total - shared > spare:
            return False
        pool.retain(cached)  # before anything is allocated, which could evict them
        request.block_ids = cached + pool.allocate_many(total - len(cached))
        request.num_computed_tokens = len(cached) * self._block_size
        request.num_labelled_blocks = len(cached)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            if cache:
                cache.count(request)
        return True
