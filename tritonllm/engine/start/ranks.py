"""What an engine and its start see of the other ranks: nothing, where there are none."""

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import torch

from tritonllm.dist.lockstep import Lockstep
from tritonllm.dist.pipeline import ALONE, Team
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.cache.host_copies import HostCopies
from tritonllm.engine.data.orders import Order
from tritonllm.engine.data.plan import StepPlan
from tritonllm.engine.data.results import RunningStep
from tritonllm.engine.data.step import Restrictions
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.models.interface import CausalLM


class Executor(Protocol):
    """What the engine needs of its runner.

    Attributes:
        host: the cache's second tier; ``None`` without one.
        model: what this process runs.
    """

    @property
    def model(self) -> CausalLM: ...

    @property
    def host(self) -> HostCopies | None: ...

    def launch(self, plan: StepPlan) -> RunningStep | None:
        """Start one step; its results can be waited for, and the next one may be started before. ``None``: but for its
        draw. A pipeline starts so many steps as it has stages before the first of them is drawn."""

    def draw(self, late: Restrictions) -> RunningStep:
        """Draw the oldest step that was launched and not drawn. If it is late, the results of those steps are taken in
        that its requests' last tokens come from."""

    @property
    def lockstep(self) -> Lockstep | None:
        """The engines with which this one takes its steps together; ``None`` if there are none."""

    def join(self) -> None:
        """Take the next step of those that wait for this engine, without a request."""

    def tell(self, order: Order) -> None:
        """Have the other ranks do something between steps, when none is in flight."""

    def abandon(self) -> None:
        """A step was broken off, perhaps between its launch and its draw."""


def release_graphs(runners: Sequence[weakref.ref[ModelRunner]]) -> None:
    """Let the runners that are still there go of their captured steps."""
    for reference in runners:
        if (runner := reference()) is not None:
            runner.release_graphs()


class Ranks:
    """The other ranks of an engine, from its start on; here there are none (``uni``).

    A context: what breaks it off ends them.

    Attributes:
        device_index: which of this machine's GPUs is this rank's, once they have begun.
    """

    device_index = 0

    def begin(self) -> None:
        """Start the other ranks; they load while this rank does."""

    def join(self, device: torch.device) -> Team:
        """Meet the other ranks, and return the groups that they form; here this rank is alone."""
        return ALONE

    def lead(self, runner: ModelRunner, memory: EngineMemory) -> Executor:
        """Wait until all are ready; returns what runs steps on all of them.

        Args:
            runner: the runner of this rank.
            memory: where this rank's weights are.
        """
        return runner

    def end(self) -> None:
        """End the other ranks; idempotent."""

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self.end()
