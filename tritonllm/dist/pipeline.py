"""The stages of a pipeline, and what they send each other: one small value, as :class:`~tritonllm.dist.group.Group` is.

Stage i sends to stage i + 1, and the last one to the first. Each of these ways is a group of two ranks of its own, so
that what goes one way never waits for what goes another: with several steps in flight the first stage sends step 2
while the last one sends step 1 back, and neither has begun to receive yet.
"""

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritonllm.config.parallel import ParallelConfig
from tritonllm.dist.connect import connect
from tritonllm.dist.exchange import NO_EXCHANGE, Exchange
from tritonllm.dist.group import ALONE as ONE_RANK
from tritonllm.dist.group import PATIENCE, ConnectedGroup, Group
from tritonllm.dist.lockstep import Lockstep

CPU = torch.device("cpu")
SENDER, RECEIVER = 0, 1  # ranks of a way


class Pipeline:
    """A stage whose neighbours are not there: of one stage, or for meta tensors, whose values nobody reads.

    Args:
        stage: the number of this stage, from 0 to ``stages - 1``.
        stages: how many there are; as many steps are in flight.
    """

    def __init__(self, stage: int = 0, stages: int = 1) -> None:
        if stages < 1 or not 0 <= stage < stages:
            raise ValueError(f"stage must be from 0 to stages - 1, got stage={stage} and stages={stages}")
        self.stage, self.stages = stage, stages

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def most_kept(self) -> int:
        """How many steps' streams a stage keeps at most, because they may still be on their way. Those of steps that
        are older than all in flight have arrived: to wait for them takes no time."""
        return 2 * self.stages

    def send(self, x: torch.Tensor) -> None:
        """Send a copy of ``x`` to the next stage, of the last one to the first, without waiting for it."""

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Fill ``x``, contiguous, with what the stage before sends, of the first one the last; returned."""
        return x

    def least(self, value: int) -> int:
        """The smallest value of all ranks of all stages; waits for it."""
        return value

    def limit(self, seconds: float) -> None:
        """As :meth:`Group.limit`."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that connect this stage to others; empty with one stage."""
        return ()


UNDIVIDED = Pipeline()


class ConnectedPipeline(Pipeline):
    """A stage that reaches its neighbours.

    Args:
        stage, stages: the number of this stage, and how many there are.
        before, behind: the ways from the stage before this one and to the one behind it.
        everyone: all ranks of all stages, on the CPU.
    """

    def __init__(
        self, stage: int, stages: int, before: ConnectedGroup, behind: ConnectedGroup, everyone: Group
    ) -> None:
        super().__init__(stage, stages)
        self._before, self._behind, self._everyone = before, behind, everyone
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._most = self.most_kept if self.last else 2 * self.most_kept  # a step is its inputs and its stream

    def send(self, x: torch.Tensor) -> None:
        if not x.numel():
            return
        while len(self._sending) >= self._most:
            self._sending.popleft()[0].wait()
        copy = x.clone(memory_format=torch.contiguous_format)
        self._sending.append((self._behind.send(copy, RECEIVER), copy))

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            self._before.receive(x, SENDER)
        return x

    def least(self, value: int) -> int:
        return self._everyone.least(value)

    def limit(self, seconds: float) -> None:
        for group in self.groups:
            group.limit(seconds)

    @property
    def groups(self) -> tuple[Group, ...]:
        return self._before, self._behind, self._everyone


class Team(NamedTuple):
    """All that a rank has of the others.

    Attributes:
        group: the ranks of its stage.
        pipe: the other stages.
        context: the ranks of its stage with which it splits the keys of each sequence: they have the same key head.
        exchange: the engines with which it shares the experts; each has requests of its own.
        lockstep: the engines of ``exchange``, which take their steps together; ``None`` if there are no others.
    """

    group: Group = ONE_RANK
    pipe: Pipeline = UNDIVIDED
    context: Group = ONE_RANK
    exchange: Exchange = NO_EXCHANGE
    lockstep: Lockstep | None = None

    @property
    def leads(self) -> bool:
        """This is rank 0 of all, which plans, draws and reports."""
        return self.group.leads and self.pipe.first

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size * self.pipe.stages

    def least(self, value: int) -> int:
        """The smallest value of all ranks, those of other engines with the same experts included; waits for it."""
        value = self.group.least(value) if self.pipe.stages == 1 else self.pipe.least(value)
        return self.exchange.group.least(value)

    def limit(self, seconds: float) -> None:
        """As :meth:`Group.limit`."""
        self.group.limit(seconds)
        self.pipe.limit(seconds)
        self.context.limit(seconds)

    def shut(self) -> None:
        """As :meth:`Group.shut`, of all groups at once.

        NCCL's abort may wait for the device, and so for what waits in a group that is not aborted yet: one after the
        other they would never end.
        """
        groups = self.group, *self.pipe.groups, *([self.context] if self.context.size > 1 else [])
        if len(groups) == 1:
            self.group.shut()
            return
        threads = [threading.Thread(target=group.shut, daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        until = time.monotonic() + PATIENCE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


ALONE = Team()


def meet(
    store: Any, rank: int, parallel: ParallelConfig, device: torch.device, *, timeout: float, own: str | None = None
) -> Team:
    """Meet the other ranks of an engine.

    Args:
        rank: the number of this rank among all; see :attr:`ParallelConfig.world_size`.
        store, device, timeout, own: as of :func:`~tritonllm.dist.connect.connect`.

    Raises:
        ValueError: torch lacks the backend.
        RuntimeError: the others did not come in time.
    """
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    how: dict[str, Any] = {"timeout": timeout, "own": own}
    peers = not parallel.disable_custom_all_reduce
    stage, column = divmod(rank, size)
    each = parallel.decode_context_parallel_size
    which, place = divmod(column, each)

    def split_context() -> Group:
        group = connect(dist.PrefixStore(f"context-{stage}-{which}", store), place, each, device, peers=False, **how)
        if isinstance(group, ConnectedGroup):
            group.introduce_all()
        return group

    if stages == 1:
        return Team(connect(store, rank, size, device, peers=peers, **how), context=split_context())
    group = connect(dist.PrefixStore(f"stage-{stage}", store), column, size, device, peers=peers, **how)
    context = split_context()
    everyone = connect(dist.PrefixStore("everyone", store), rank, size * stages, CPU, **how)
    ways: dict[int, ConnectedGroup] = {}
    for way in sorted({(stage - 1) % stages, stage}):  # in one order everywhere: to make one waits for the other end
        end = SENDER if way == stage else RECEIVER
        connected = connect(dist.PrefixStore(f"way-{column}-{way}", store), end, 2, device, peers=False, **how)
        assert isinstance(connected, ConnectedGroup)  # of two ranks
        connected.introduce(SENDER, RECEIVER)
        ways[way] = connected
    pipe = ConnectedPipeline(stage, stages, ways[(stage - 1) % stages], ways[stage], everyone)
    return Team(group, pipe, context)
