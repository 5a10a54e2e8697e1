"""The model of a running engine as vLLM's paths to it end in it: to be looked at, and to be given weights."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from tritonllm.models.interface import CausalLM


class TakesWeights(Protocol):
    """An engine, or a rank of one, as far as its model's weights go."""

    @property
    def model(self) -> CausalLM: ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]: ...


class ServedModel:
    """An engine's model. It has what the module has, and ``load_weights``.

    Args:
        engine: the engine, which must be idle when its weights change.
    """

    def __init__(self, engine: TakesWeights) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.model, name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Overwrite weights, all of them or some; see :meth:`tritonllm.LLMEngine.load_weights`."""
        return self._engine.load_weights(weights)


def model_executor(engine: TakesWeights, rank: int = 0) -> SimpleNamespace:
    """What vLLM has between an engine and its model, as far as scripts go through it:
    ``driver_worker.model_runner.model``."""
    model_runner = SimpleNamespace(model=ServedModel(engine))
    return SimpleNamespace(driver_worker=SimpleNamespace(rank=rank, model_runner=model_runner))
