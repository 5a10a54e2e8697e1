"""``POST /v1/embeddings``, ``/score``, ``/rerank``, ``/classify`` and ``/pooling``, as vLLM has them."""

import base64
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI, Request
from fastapi.responses import Response
from torch.nn import functional as F

from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.prompts import Prompt
from tritonllm.engine.data.outputs import PoolingRequestOutput
from tritonllm.serve.api.answering import Service, answer_id, respond
from tritonllm.serve.api.pooling_protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    InputBody,
    Named,
    PoolingBody,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from tritonllm.serve.api.replies import now
from tritonllm.serve.engines.tokenizing import numbered


def add_pooling(app: FastAPI, service: Service) -> None:
    """The paths that pool; a model that lacks a task refuses it by name."""
    api = _PoolingAPI(service)

    @app.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        return await respond(request, api.embeddings(request, body))

    @app.post("/pooling")
    async def pooling(request: Request, body: PoolingRequest) -> Response:
        return await respond(request, api.pooling(request, body))

    @app.post("/classify")
    async def classify(request: Request, body: ClassifyRequest) -> Response:
        return await respond(request, api.classify(request, body))

    @app.post("/score")
    @app.post("/v1/score")
    async def score(request: Request, body: ScoreRequest) -> Response:
        return await respond(request, api.score(request, body))

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def rerank(request: Request, body: RerankRequest) -> Response:
        return await respond(request, api.rerank(request, body))


class _PoolingAPI:
    """Answers, each as a coroutine of one JSON object.

    Args:
        service: the service, whose engine pools.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self, request: Request, body: EmbeddingRequest) -> dict[str, Any]:
        params = body.pooling_params("embed", dimensions=body.dimensions, normalize=body.normalize)
        head, outputs = await self._inputs("embd", request, body, params)
        data = [
            {"index": i, "object": "embedding", "embedding": _numbers(output, body.encoding_format)}
            for i, output in enumerate(outputs)
        ]
        return {**head, "data": data}

    async def pooling(self, request: Request, body: PoolingRequest) -> dict[str, Any]:
        tasks = self._service.llm.pooling.tasks
        task: Any = body.task or (tasks[0] if tasks else "embed")
        params = body.pooling_params(task, dimensions=body.dimensions, normalize=body.normalize)
        head, outputs = await self._inputs("pool", request, body, params)
        data = [
            {"index": i, "object": "pooling", "data": _numbers(output, body.encoding_format)}
            for i, output in enumerate(outputs)
        ]
        return {**head, "data": data}

    async def classify(self, request: Request, body: ClassifyRequest) -> dict[str, Any]:
        head, outputs = await self._inputs("classify", request, body, body.pooling_params("classify"))
        names = self._service.llm.pooling.label_names
        data = []
        for i, output in enumerate(outputs):
            probs = output.outputs.data
            best = int(probs.argmax())
            label = names[best] if best < len(names) else None
            data.append({"index": i, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
        return {**head, "data": data}

    async def score(self, request: Request, body: ScoreRequest) -> dict[str, Any]:
        head, scores = await self._scores("score", request, body, *body.texts())
        return {**head, "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]}

    async def rerank(self, request: Request, body: RerankRequest) -> dict[str, Any]:
        texts = body.texts()
        queries = [Named("query", body.query)] * len(texts)
        head, scores = await self._scores("rerank", request, body, queries, texts)
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
        results = []
        for i in order:
            document = {"document": {"text": texts[i].text}} if body.return_documents else {}
            results.append({"index": i, **document, "relevance_score": scores[i]})
        return {"id": head["id"], "model": head["model"], "usage": head["usage"], "results": results}

    async def _pair(self, first: Named, second: Named) -> Prompt:
        llm = self._service.llm
        typed, names = llm.pooling.token_types > 1, (first.name, second.name)
        return await llm.with_tokenizer(
            len(first.text) + len(second.text),
            lambda inputs: inputs.pair(first.text, second.text, with_types=typed, names=names),
        )

    async def _scores(
        self, prefix: str, request: Request, body: PoolingBody, first: list[Named], second: list[Named]
    ) -> tuple[dict[str, Any], list[float]]:
        """A number for each pair: of a cross-encoder, or the cosine of two embeddings.

        Raises:
            ValueError: a classifier with more than one label.
        """
        llm = self._service.llm
        if "classify" in llm.pooling.tasks:
            if llm.pooling.labels != 1:
                raise ValueError(f"scores need a classifier with one label, this one has {llm.pooling.labels}")
            pairs = [await self._pair(*pair) for pair in zip(first, second, strict=True)]
            names = [f"{two.name} with {one.name}" for one, two in zip(first, second, strict=True)]
            head, outputs = await self._run(prefix, request, body, pairs, body.pooling_params("classify"), names)
            return head, [float(output.outputs.data) for output in outputs]
        ones = first[:1] if len({one.text for one in first}) == 1 else first
        prompts, names = [one.text for one in (*ones, *second)], [one.name for one in (*ones, *second)]
        head, outputs = await self._run(prefix, request, body, prompts, body.pooling_params("embed"), names)
        vectors = torch.stack([output.outputs.data for output in outputs])
        cosines = F.cosine_similarity(vectors[: len(ones)], vectors[len(ones) :], dim=1)
        return head, cosines.tolist()

    async def _inputs(
        self, prefix: str, request: Request, body: InputBody, params: PoolingParams
    ) -> tuple[dict[str, Any], list[PoolingRequestOutput]]:
        inputs = body.inputs()
        return await self._run(prefix, request, body, inputs, params, numbered("input", len(inputs)))

    async def _run(
        self,
        prefix: str,
        request: Request,
        body: PoolingBody,
        prompts: Sequence[Prompt],
        params: PoolingParams,
        names: Sequence[str],
    ) -> tuple[dict[str, Any], list[PoolingRequestOutput]]:
        """What all answers begin with, and an output for each prompt.

        Args:
            names: what errors call each prompt.

        Raises:
            APIError, ValueError, QueueFullError, EngineDeadError: see :mod:`tritonllm.serve.api.errors`.
        """
        model = self._service.accept(request, body)
        name = answer_id(f"{prefix}-", request, body.request_id)
        ended: dict[int, PoolingRequestOutput] = {}
        async with aclosing(self._service.run(name, prompts, params, body.priority, names)) as outputs:
            async for index, output in outputs:
                ended[index] = output
        found = [ended[index] for index in range(len(prompts))]
        tokens = sum(len(output.prompt_token_ids) for output in found)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
        return {"id": name, "object": "list", "created": now(), "model": model, "usage": usage}, found


def _numbers(output: PoolingRequestOutput, encoding: str) -> Any:
    """The numbers of an output: a list (of lists), or base64 of float32 numbers, little endian."""
    data = output.outputs.data
    if encoding == "float":
        return data.tolist()
    return base64.b64encode(data.numpy().astype(np.dtype("<f4")).tobytes()).decode()
