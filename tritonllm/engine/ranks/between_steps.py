"""What a rank does between steps because rank 0 says so: it takes weights, or calls a function.

Weights travel as data, whichever way ranks were started. Functions are pickled, and whoever unpickles runs what is in
there. So they go only to processes that rank 0 has spawned itself, through memory that nobody else has, and what they
return comes back through a pipe of theirs. Other ranks refuse them.
"""

import logging
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.data.orders import Order, WeightPieces
from tritonllm.engine.ranks.served_model import model_executor
from tritonllm.models.interface import CausalLM

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankWeights:
    """One rank's part of a model: what is loaded into it is whole, and it takes its part alone.

    Attributes:
        model: the part.
        memory: where its weights are.
    """

    model: CausalLM
    memory: EngineMemory

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As :meth:`EngineMemory.load_weights`."""
        return self.memory.load_weights(weights)

    def worker(self, rank: int) -> Any:
        """What a function is called with on this rank: ``rank`` and ``model_runner.model``."""
        return model_executor(self, rank).driver_worker


class CallAnswer(NamedTuple):
    """What has become of a function on a rank.

    Attributes:
        value: what it returned.
        error: its error instead, in words.
    """

    value: Any = None
    error: str | None = None


def packed_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A function and its arguments for ranks that this process has spawned.

    Raises:
        ValueError: other processes cannot import the function, or an argument cannot be sent.
    """
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            "collective_rpc: the other ranks are processes: the function must be defined at the top of a module that "
            f"they can import (no lambda, no function within another), and its arguments picklable: {error}"
        ) from error


def answered(answer: bytes) -> CallAnswer:
    """What a rank that this process has spawned has answered."""
    return CallAnswer(*pickle.loads(answer))


class BetweenSteps:
    """Does what rank 0 says on a rank that follows it.

    Args:
        here: this rank's part.
        rank: the number of this rank, among all.
        answer: sends bytes to the process that has spawned this one; ``None`` if rank 0 has not, and so sends no
            functions.
    """

    def __init__(self, here: RankWeights, rank: int, answer: Callable[[bytes], None] | None = None) -> None:
        self._here, self._rank, self._answer = here, rank, answer
        self._pieces = WeightPieces()

    def do(self, order: Order) -> None:
        """Carry an order out.

        Raises:
            ValueError: a weight that does not fit, which rank 0 has taken; or a function, which does not travel here.
        """
        if order.kind == "weight":
            tensor = self._pieces.add(order)
            if tensor is not None:
                self._here.load_weights([(order.text, tensor)])
        elif order.kind == "reload":
            self._reload(order.text or None)
        elif self._answer is None:
            raise ValueError("a function came, and this rank, which rank 0 has not spawned, takes none")
        else:
            self._answer(self._call(order.data.tobytes()))

    def _reload(self, model: str | None) -> None:
        try:
            self._here.memory.reload_weights(model)
        except (ValueError, OSError) as error:  # the old weights stay on all ranks, and rank 0 raises
            logger.warning("rank %d did not take other weights: %s", self._rank, error)

    def _call(self, data: bytes) -> bytes:
        try:
            function, args, kwargs = pickle.loads(data)  # from the process that has spawned this one
            return pickle.dumps((function(self._here.worker(self._rank), *args, **kwargs), None))
        except Exception as error:  # of a user's function: it is raised where that was given
            return pickle.dumps((None, f"{type(error).__name__}: {error}"))
