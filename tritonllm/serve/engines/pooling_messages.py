"""Pooling requests between the API process and the engine process: their parameters, and what comes back."""

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tritonllm.config.pooling_params import PoolingParams
from tritonllm.engine.data.outputs import PoolingOutput, PoolingRequestOutput
from tritonllm.serve.engines.messages import PoolingFacts, Update

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


def pack_pooled(output: PoolingRequestOutput) -> Update:
    """An engine's output as a message; its numbers are float32 in the machine's order."""
    data = output.outputs.data
    return Update(
        output.request_id,
        [],
        True,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
        pooled=(list(data.shape), data.float().contiguous().numpy().tobytes()),
    )


def unpack_pooled(update: Update, prompt_token_ids: Sequence[int]) -> PoolingRequestOutput:
    shape, data = update.pooled or ([0], b"")
    return PoolingRequestOutput(
        request_id=update.request_id,
        outputs=PoolingOutput(torch.from_numpy(np.frombuffer(data, dtype=np.float32).reshape(shape).copy())),
        prompt_token_ids=prompt_token_ids,
        num_cached_tokens=update.num_cached_tokens,
        error=update.error,
    )


class PoolingCollector:
    """Between the task that receives from the engine and the one that serves a request: one output, the last."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._output: PoolingRequestOutput | None = None
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, update: Update) -> None:
        self._output = unpack_pooled(update, self._prompt_token_ids)
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
