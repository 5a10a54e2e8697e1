"""What runs at one moment, and who holds which block: for whoever looks at an engine now and then. No torch.

Events (:mod:`tritonllm.events`) tell everything, at a price for each step. A picture costs nothing until it is taken:
then 1.4 ms with 256 sequences that fill a pool of 65,536 blocks (on a busy core).
"""

from dataclasses import dataclass

from tritonllm.engine.scheduler import Scheduler

MOST_BLOCKS = 1024  # of a picture
FREE, CACHED, SHARED, OTHER = -1, -2, -3, -4


@dataclass(frozen=True)
class Sequence:
    """One that runs.

    Args:
        seat: tells it from the others that run now.
        prompt_tokens: of its prompt.
        output_tokens: generated so far, as far as the host knows them.
        computed_tokens: whose keys and values are in the cache once the steps in flight have run.
        cached_tokens: so many of the prompt's the prefix cache gave.
        blocks: that it holds, alone or with others.
    """

    seat: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_tokens: int
    blocks: int


@dataclass(frozen=True)
class Picture:
    """Args:
    running: the sequences that run, the earliest first.
    waiting: how many wait.
    block_size: tokens of a block.
    num_blocks, num_free_blocks: of the pool; blocks that only the prefix cache knows are free.
    stride: ``owners`` tells of each ``stride``-th block.
    owners: the seat of the one sequence that holds the block; else ``FREE``; ``CACHED``, free, but with contents that
        can be found; ``SHARED``, held by several; or ``OTHER``, held by nobody who runs.
    """

    running: tuple[Sequence, ...]
    waiting: int
    block_size: int
    num_blocks: int
    num_free_blocks: int
    stride: int
    owners: tuple[int, ...]


def take_picture(scheduler: Scheduler, most_blocks: int = MOST_BLOCKS) -> Picture:
    """Args:
    most_blocks: that ``owners`` tells of; of larger pools it is a sample, evenly spread.
    """
    pool = scheduler.pool
    stride = -(-pool.num_blocks // most_blocks)
    shown = range(0, pool.num_blocks, stride)
    of_interest, holders = set(shown), {}
    for request in scheduler.running:
        for block in of_interest.intersection(request.block_ids):
            holders[block] = request.seat

    def owner(block: int) -> int:
        users = pool.ref_count(block)
        if not users:
            return CACHED if pool.is_labelled(block) else FREE
        seat = holders.get(block) if users == 1 else SHARED
        return OTHER if seat is None else seat

    sequences = [
        Sequence(
            seat=-1 if request.seat is None else request.seat,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=len(request.output_token_ids),
            computed_tokens=request.num_computed_tokens,
            cached_tokens=request.num_cached_tokens or 0,
            blocks=len(request.block_ids),
        )
        for request in scheduler.running
    ]
    owners = tuple(owner(block) for block in shown)
    return Picture(
        *(tuple(sequences), scheduler.num_waiting, scheduler.block_size, pool.num_blocks, pool.num_free),
        *(stride, owners),
    )
