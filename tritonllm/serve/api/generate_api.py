"""``POST /generate``, the simple API of vLLM's first servers: a completion whose answer is the texts alone."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from tritonllm.serve.api.answering import Outputs, Service, respond, stream
from tritonllm.serve.api.completions_api import Choices, start
from tritonllm.serve.api.errors import APIError, error_body
from tritonllm.serve.api.protocol import GenerateRequest
from tritonllm.serve.api.replies import as_json

LINES = "application/x-ndjson"


async def generate(service: Service, request: Request, body: GenerateRequest) -> Response:
    """Answer ``POST /generate``.

    Raises:
        APIError, ValueError, QueueFullError, EngineDeadError: see :mod:`tritonllm.serve.api.errors`.
    """
    _, build, outputs = await start(service, request, body)
    if body.stream:
        return await stream(request, _lines(build, outputs), _failed, done=b"", media_type=LINES)
    return await respond(request, _whole(build, outputs))


async def _whole(build: Choices, outputs: Outputs) -> dict[str, Any]:
    texts = list[str]()
    async with aclosing(outputs):
        async for prompt, output in outputs:
            texts = [choice["text"] for choice in build.whole(prompt, output)]
    return {"text": texts}


async def _lines(build: Choices, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    """The texts so far, as often as one of them grows or ends."""
    texts = list[str]()
    async with aclosing(outputs):
        async for _, output in outputs:
            texts = texts or [build.prompt_text(output)] * build.count
            for completion in output.outputs:
                texts[completion.index] += completion.text
            if any(completion.text or completion.finished() for completion in output.outputs):
                yield as_json({"text": texts}) + b"\n"


def _failed(error: APIError) -> bytes:
    return as_json(error_body(error)) + b"\n"
