"""Requests that wait for a seat, in the scheduler's order. No torch."""

import heapq

from tritonllm.engine.data.request import Request


class WaitingQueue:
    """A heap over :attr:`Request.order`. A request that ends while it waits stays in it, to be dropped later."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], Request, int]] = []
        self._ended = 0
        self.num_tokens = 0  # that those in the heap had when they came

    def __len__(self) -> int:
        return len(self._heap) - self._ended

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.order, request, request.num_tokens))
        self.num_tokens += request.num_tokens

    def first(self) -> Request | None:
        while self._heap and self._heap[0][1].status.is_finished:
            self.pop_first()
            self._ended -= 1
        return self._heap[0][1] if self._heap else None

    def pop_first(self) -> None:
        """Remove what :meth:`first` returned."""
        _, _, tokens = heapq.heappop(self._heap)
        self.num_tokens -= tokens

    def count_ended(self) -> None:
        """One of the requests has ended. Once they are the majority all of them go: O(1) each, memory stays bounded."""
        self._ended += 1
        if self._ended > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[1].status.is_finished]
            heapq.heapify(self._heap)
            self.num_tokens = sum(tokens for _, _, tokens in self._heap)
            self._ended = 0
