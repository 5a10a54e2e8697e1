"""What an operator may tell the engine over HTTP, behind ``--server-dev-mode``. Paths and arguments are vLLM's."""

import json
from dataclasses import asdict
from types import MappingProxyType
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from tritonllm.config.engine import max_concurrency
from tritonllm.serve.api.errors import APIError
from tritonllm.serve.api.protocol import Body
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.version import __version__

ORIGIN = "this path answers no pages of browsers: leave the header Origin out, or set --api-key"


class OrderBody(Body):
    """The body of an order, which nobody follows with a part of it left out: a field that it does not know is an
    error."""

    model_config = ConfigDict(extra="forbid")
    refused = MappingProxyType({})


class ReloadRequest(OrderBody):
    """``model``: a folder or hub id; by default the engine's own."""

    model: str | None = None


class RpcRequest(OrderBody):
    """vLLM's way to reload weights; ``timeout`` changes nothing."""

    method: Literal["reload_weights"]
    timeout: float | None = None
    args: list[str] = Field(default_factory=list)
    kwargs: dict[str, str | None] = Field(default_factory=dict)


def refuse_pages(request: Request, has_keys: bool) -> None:
    """Refuse pages of browsers: without keys a page can send a POST without a body to any server that its reader
    reaches.

    Raises:
        APIError: the request comes from a page.
    """
    if not has_keys and "origin" in request.headers:
        raise APIError(403, ORIGIN)


def add_admin(app: FastAPI, llm: AsyncLLM, has_keys: bool) -> None:
    """Add the routes by which a client gives the engine orders: to sleep, to wake up, to reload its weights, and so on.

    Args:
        has_keys: whether the server has keys, without which nobody gets here.
    """

    @app.post("/sleep")
    async def sleep(request: Request, level: int = 1, mode: Literal["wait", "abort"] = "wait") -> Response:
        refuse_pages(request, has_keys)
        await llm.sleep(level, mode)
        return JSONResponse({"is_sleeping": await llm.is_sleeping()})

    @app.post("/wake_up")
    async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        refuse_pages(request, has_keys)
        await llm.wake_up(tags)
        return JSONResponse({"is_sleeping": await llm.is_sleeping()})

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return JSONResponse({"is_sleeping": await llm.is_sleeping()})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        refuse_pages(request, has_keys)
        if not await llm.reset_prefix_cache():
            raise APIError(409, "requests run, so nothing was forgotten: try again when none does", code="busy")
        return JSONResponse({})

    @app.get("/expert_load")
    async def expert_load() -> Response:
        return JSONResponse((await llm.expert_load()).as_json())

    @app.post("/reset_expert_load")
    async def reset_expert_load(request: Request) -> Response:
        refuse_pages(request, has_keys)
        await llm.reset_expert_load()
        return JSONResponse({})

    @app.get("/server_info")
    async def server_info(config_format: Literal["text", "json"] = "text") -> Response:
        config = llm.config
        told = str(config) if config_format == "text" else json.loads(json.dumps(asdict(config), default=str))
        blocks, length = llm.stats.num_blocks, llm.max_model_len
        sizes = {
            "num_blocks": blocks,
            "max_model_len": length,
            "max_concurrency": round(max_concurrency(blocks, config.block_tokens, length), 2),
        }
        return JSONResponse({"version": __version__, "vllm_config": told, **sizes})

    @app.post("/reload_weights")
    async def reload_weights(request: Request, body: ReloadRequest | None = None) -> Response:
        refuse_pages(request, has_keys)
        await llm.reload_weights(None if body is None else body.model)
        return JSONResponse({})

    @app.post("/collective_rpc")
    async def collective_rpc(request: Request, body: RpcRequest) -> Response:
        refuse_pages(request, has_keys)
        results: list[Any] = await llm.collective_rpc(body.method, body.timeout, tuple(body.args), body.kwargs)
        return JSONResponse({"results": results})
