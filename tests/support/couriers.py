"""Ranks of one process whose memory is the host's: what a relay sends comes late, in turns."""

from collections import deque

import torch

from tritonllm.dist.relay import Relay, Shape


class LateCourier:
    """Its thread does what it was told to, one thing at a time.

    Args:
        memories: uint8, of each rank.
    """

    def __init__(self, turns, memories, rank):
        self._turns, self._memories, self._own = turns, memories, memories[rank]
        self._jobs, self._ended = deque(), False
        turns.start(self._work)

    def _work(self):
        while True:
            self._turns.take(lambda: self._jobs or self._ended)
            if not self._jobs:
                return
            to, at, source = self._jobs.popleft()
            if isinstance(source, int):
                source = torch.tensor([source], dtype=torch.int64).to(torch.int32)
            data = source.contiguous().view(-1).view(torch.uint8)
            self._memories[to][at : at + len(data)] = data

    def mark(self):
        """What was computed has been computed."""

    def copy(self, to, at, source):
        assert source.is_contiguous()
        self._jobs.append((to, at, source))

    def tell(self, to, at, number):
        self._jobs.append((to, at, number))

    def wait(self, at, number):
        there = self._own[at : at + 4].view(torch.int32)
        self._turns.take(lambda: int(there) >= number)

    def end(self):
        self._ended = True


def relays(turns, shape: Shape) -> list[Relay]:
    memories = [torch.zeros(shape.nbytes, dtype=torch.uint8) for _ in range(shape.size)]
    return [Relay(shape, rank, LateCourier(turns, memories, rank), memories[rank]) for rank in range(shape.size)]
