"""The sequences of one user's request: they share what they have in common, and they come and go together. No torch.

They share blocks by reference counts. :func:`fork` gives a sequence what another one has computed: the full blocks,
which nobody writes any more, and a reference to the block behind them (its *tail*), which is partly filled. Before the
sequence writes into that block it takes one of its own, and the step begins by copying the tail into it
(copy-on-write: Kwon et al., "PagedAttention", SOSP 2023, section 4.4). The sequence that owns the tail goes on writing
into it, behind what is shared: the others never read that, and what they copy of it they overwrite.

They are admitted and preempted together (section 4.5), as long as that is possible: if a gang is more than the pool or
the seats can hold, its sequences run as if they were on their own. What they leave in the host's memory where there is
no prefix cache, they leave together, too (:mod:`tritonllm.engine.schedule.swaps`).
"""

from collections.abc import Sequence

from tritonllm.engine.data.plan import ScheduledRequest
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.schedule.block_pool import BlockPool


def fork(parent: Request, child: Request, pool: BlockPool, block_tokens: int, has: int = 0) -> None:
    """Let ``child`` share all that ``parent`` has computed, by reference. It holds none but so many of the first.
    ``block_tokens`` are a block's tokens over all ranks, here and in this file."""
    full, rest = divmod(parent.num_computed_tokens, block_tokens)
    child.block_ids = parent.block_ids[:full]
    if rest:
        child.tail = parent.block_ids[full] if full < len(parent.block_ids) else parent.tail
    new = child.block_ids[has:]
    pool.retain(new if child.tail is None else [*new, child.tail])
    child.num_computed_tokens = parent.num_computed_tokens
    child.block_hashes = parent.block_hashes[:full]
    child.num_labelled_blocks = min(parent.num_labelled_blocks, full)
    if child.num_cached_tokens is None:
        child.num_cached_tokens, child.admitted_time = child.num_computed_tokens, parent.admitted_time


def move(child: Request, parent: Request, pool: BlockPool, block_tokens: int) -> None:
    """Move a child that has blocks to a parent's, as :func:`free` and :func:`fork`; takes no time in those that both
    have."""
    both = 0
    for mine, theirs in zip(child.block_ids, parent.block_ids, strict=False):
        if mine != theirs:
            break
        both += 1
    both = min(both, parent.num_computed_tokens // block_tokens)
    del child.block_ids[:both]
    free(child, pool)
    fork(parent, child, pool, block_tokens, both)


def free(request: Request, pool: BlockPool) -> None:
    """Give back its blocks, so that a sequence's tail is evicted before its head."""
    if request.tail is not None:
        pool.release([request.tail])
        request.tail = None
    pool.release(reversed(request.block_ids))
    request.block_ids = []
    request.num_labelled_blocks = 0


def parent_in(scheduled: Sequence[ScheduledRequest], request: Request) -> Request | None:
    """The sibling whose prompt ends in this step, if ``request`` can take its first token from the same logits."""
    if request.output_token_ids:
        return None
    for item in reversed(scheduled):
        parent = item.request
        if parent.siblings is request.siblings and item.samples and not item.pending and not item.drafts:
            return parent if item.output_index == 0 else None
    return None


def room_for(request: Request, block_tokens: int) -> tuple[int, int]:
    """Seats that ``request`` and its siblings need, and blocks that the siblings need beside its own.

    Once one of them runs, the others follow as they fit.
    """
    full = len(request.prompt_token_ids) // block_tokens
    others = [s for s in request.siblings if s is not request and not s.status.is_finished]
    if not others or any(s.status is RequestStatus.RUNNING for s in others):
        return 1, 0
    return 1 + len(others), 1 + sum(s.num_tokens // block_tokens + 1 - full for s in others)


def prompt_blocks(request: Request, block_tokens: int) -> list[int]:
    """Full blocks of the prompt that a running sibling has; what stands for the prefix cache where there is none."""
    for sibling in request.siblings:
        if sibling.status is RequestStatus.RUNNING:
            shared = min(sibling.num_computed_tokens, len(request.prompt_token_ids), request.num_tokens - 1)
            return sibling.block_ids[: shared // block_tokens]
    return []


def last_gang(running: Sequence[Request], end: int | None = None) -> int:
    """How many of the last running requests, or of the first ``end`` of them, belong together."""
    end = len(running) if end is None else end
    siblings, count = running[end - 1].siblings, 1
    if siblings:
        while count < end and running[end - 1 - count].siblings is siblings:
            count += 1
    return count
