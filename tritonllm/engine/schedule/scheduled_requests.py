"""The life of requests: they are queued, run with a seat and blocks, may be preempted, and end. No torch.

The scheduler (:mod:`tritonllm.engine.schedule.scheduler`) decides who changes from one state to another, and when. What
belongs to such a change is done here at one place, so that nobody who does not run holds a seat or a block.
"""

import itertools
import logging
from bisect import bisect_left, insort
from operator import attrgetter

from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.schedule.block_pool import BlockPool
from tritonllm.engine.schedule.gang import free, move
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)
_ORDER = attrgetter("order")
_PREEMPTED = (
    "the KV cache (%d blocks) is too small for %d running requests: one gives up its blocks and is computed again "
    "later. Lower max_num_seqs, or give the cache more memory; stats.preemptions counts further ones"
)


class ScheduledRequests:
    """The unfinished requests of an engine.

    Args:
        seats: how many requests may run at once.
        pool: the blocks that running requests hold.
        block_tokens: tokens of a block, over all ranks.
        tier: where blocks are kept in the host's memory; ``None`` for nowhere.
        keeps_own: the tier keeps what a preempted request leaves (else it has that already, by the prefix cache).

    Attributes:
        waiting: the queue of waiting requests, the preempted ones included.
        running: the running requests, in order.
        just_ended: the requests that ended by the results that were taken in last, by id.
        preemptions: how many requests were preempted since the start.
    """

    def __init__(self, seats: int, pool: BlockPool, block_tokens: int, tier: HostTier | None, keeps_own: bool) -> None:
        self._seats, self._block_tokens = seats, block_tokens
        self._tier, self._keeps_own = tier, keeps_own
        self._arrivals, self._admissions = itertools.count(), itertools.count(1)
        self.preemptions, self._warned = 0, False
        self.reset(pool)

    def reset(self, pool: BlockPool) -> None:
        """Forget all requests. Only totals stay, and admission numbers go on, since the runner knows seats by them."""
        self._pool = pool
        self._unfinished: dict[str, Request] = {}
        self.just_ended: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.free_seats = list(range(self._seats))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unfinished

    def add(self, request: Request, rank: float) -> None:
        """Queue a new request; those with the same rank (the lowest first) are served as they arrived."""
        request.order = (rank, request.arrival, next(self._arrivals))
        self._unfinished[request.request_id] = request
        self.waiting.push(request)

    def start_first(self, request: Request) -> None:
        """Let the first of those that wait run; it has got its blocks."""
        self.waiting.pop_first()
        request.status = RequestStatus.RUNNING
        request.seat, request.admission = self.free_seats.pop(), next(self._admissions)
        insort(self.running, request, key=_ORDER)

    def fork(self, parent: Request, child: Request) -> None:
        """Let a running request go on from where a running sibling is, in the place of what it had itself."""
        move(child, parent, self._pool, self._block_tokens)
        child.admission = next(self._admissions)  # the runner must look at its blocks anew

    def preempt_last(self, count: int = 1, *, crowded: bool = True) -> list[Request]:
        """Preempt the last running requests: they give back their seats and blocks, and wait to be computed anew.

        Args:
            count: how many requests; more than one are of one user's request.
            crowded: whether the cache is too small for those that run. (Else one that comes before them wants to.)

        Returns:
            The preempted requests, the last one first.
        """
        requests = [self.running.pop() for _ in range(count)]
        for request in requests:
            request.num_preemptions += 1
        if self._tier is not None and self._keeps_own:
            self._tier.keep_own(requests, self._block_tokens)
        for request in requests:
            self._free(request)
            request.num_computed_tokens = 0
            request.held = False
            request.status = RequestStatus.PREEMPTED
            self.waiting.push(request)
        if crowded and not self._warned:
            self._warned = True
            logger.warning(_PREEMPTED, self._pool.num_blocks, len(self.running) + count)
        self.preemptions += count
        return requests

    def end(self, request: Request, status: RequestStatus, stop_reason: int | str | None) -> None:
        """End a request in whatever state it is; its seat and blocks are free at once."""
        runs = request.status is RequestStatus.RUNNING
        request.status, request.stop_reason = status, stop_reason
        del self._unfinished[request.request_id]
        if runs:
            del self.running[bisect_left(self.running, request.order, key=_ORDER)]
            self._free(request)
        else:
            self.waiting.count_ended()

    def end_by_results(self, request: Request, status: RequestStatus, stop_reason: int | str | None) -> None:
        """As :meth:`end`, but :meth:`finish` may still name another reason."""
        self.just_ended[request.request_id] = request
        self.end(request, status, stop_reason)

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state; ``None`` if no such request is unfinished."""
        request = self._unfinished.get(request_id)
        if request is not None:
            self.end(request, RequestStatus.FINISHED_ABORTED, None)
        return request

    def finish(self, request_id: str, status: RequestStatus, stop_reason: int | str | None, drop: int) -> None:
        """End a request for a reason that only the engine sees (a stop string), or name that for one that has just
        ended: the same token may complete a stop string and reach the length limit, and then the stop string is the
        reason.

        Args:
            drop: how many of its last tokens came after the end.

        Raises:
            ValueError: an unknown request, or a status that is not a finished one.
        """
        if not status.is_finished:
            raise ValueError(f"status must be one of the finished ones, got {status}")
        request = self._unfinished.get(request_id) or self.just_ended.get(request_id)
        if request is None:
            raise ValueError(f"request_id {request_id!r} is not of an unfinished request")
        if drop:
            del request.output_token_ids[-drop:]
        if request.status.is_finished:
            request.status, request.stop_reason = status, stop_reason
        else:
            self.end(request, status, stop_reason)

    def _free(self, request: Request) -> None:
        if self._tier is not None:
            self._tier.loading.pop(request, None)
        free(request, self._pool)
        assert request.seat is not None  # it runs
        self.free_seats.append(request.seat)
        request.seat = None
