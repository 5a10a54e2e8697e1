"""Which running requests give way to a waiting one of higher priority. No torch.

The last in order go first, and with each its siblings, until the rest leave seats and blocks enough; if all of lower
priority together are not enough, none of them goes. So nobody is preempted in vain, and who was preempted comes back
only after those that he gave way to have begun: all that wait are admitted in order.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from tritonllm.engine.data.request import Request
from tritonllm.engine.schedule.admission import Demand
from tritonllm.engine.schedule.block_pool import BlockPool
from tritonllm.engine.schedule.gang import last_gang


def first_behind(running: Sequence[Request], waiting: Request | None) -> int:
    """The place in ``running`` of the first whose priority is lower than that of a request that waits; their number if
    there is none."""
    place = len(running)
    if waiting is not None:
        while place and running[place - 1].order[0] > waiting.order[0]:
            place -= 1
    return place


def most_blocks(running: Sequence[Request], place: int, pool: BlockPool) -> int:
    """How many blocks are free at most for a request once all from ``place`` on have given way, with one left for each
    before it. Takes no time in numbers of blocks."""
    return pool.num_free - place + sum(len(request.block_ids) + 1 for request in running[place:])


def who_gives_way(
    running: Sequence[Request],
    place: int,
    demand: Demand,
    pool: BlockPool,
    seats: int,
    new_blocks: Callable[[Request], int],
) -> list[int] | None:
    """How many of the last running requests give way, gang by gang; ``None`` if all that may are too few.

    Args:
        running: the running requests, in order.
        place: running requests from this index on may give way. Those before keep what they have, and one block is left
            for each.
        demand: what the waiting request needs.
        pool: the pool of blocks.
        seats: how many requests may run at once.
        new_blocks: returns how many new blocks a request that stays needs for the step that is being planned.
    """
    stay, gangs = len(running), list[int]()
    free = pool.num_free - place - sum(map(new_blocks, running[place:]))
    left = Counter[int]()
    cached = set(demand.cached) if stay > place else set()  # free or not, they are counted
    while stay > place and not demand.fits(seats - stay, free, alone=not stay):
        count = last_gang(running, stay)
        for request in running[stay - count : stay]:
            blocks = request.block_ids if request.tail is None else [*request.block_ids, request.tail]
            left.update(blocks)
            free += new_blocks(request)
            free += sum(left[block] == pool.ref_count(block) and block not in cached for block in blocks)
        stay -= count
        gangs.append(count)
    return gangs if demand.fits(seats - stay, free, alone=not stay) else None
