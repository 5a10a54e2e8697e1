"""Pooling requests between the API process and the engine process: their parameters, and who waits for an output."""

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tritonllm.config.pooling_params import PoolingParams
from tritonllm.engine.data.outputs import PoolingRequestOutput
from tritonllm.serve.engines.messages import PoolingFacts

if TYPE_CHECKING:
    from tritonllm.engine.loop.engine import LLMEngine


def pooling_facts(engine: "LLMEngine") -> PoolingFacts:
    pooling = engine.pooling
    return PoolingFacts(
        tasks=list(pooling.tasks),
        causal=pooling.causal,
        labels=pooling.labels,
        label_names=list(pooling.label_names),
        token_types=pooling.token_types,
    )


def pack_pooling_params(params: PoolingParams) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    values = ((field, getattr(params, field.name)) for field in fields(params))
    return {field.name: value for field, value in values if value != field.default}


class PoolingCollector:
    """Between the task that receives from the engine and the one that serves a request: one output, the last."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._output: PoolingRequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, output: PoolingRequestOutput) -> None:
        output.prompt_token_ids = self._prompt_token_ids
        self._output = output
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """Let :meth:`get` raise the error, unless the output has come before."""
        self._error = error
        self._arrived.set()

    async def get(self) -> PoolingRequestOutput:
        """Wait for the output of the request.

        Raises:
            Exception: what :meth:`fail` was given.
        """
        await self._arrived.wait()
        if self._output is None:
            assert self._error is not None
            raise self._error
        return self._output
