"""``/start_profile`` and ``/stop_profile``: traces of the engine, by request. Paths are vLLM's."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tritonllm.serve.api.admin_api import refuse_pages
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.api.errors import APIError
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.engines.engine_calls import ProfileRefusedError
from tritonllm.serve.engines.profiling import NO_FOLDER


def add_profile(app: FastAPI, llm: AsyncLLM, config: ServerConfig) -> None:
    """Add the routes that begin and end a trace. Without a folder for traces both answer 404 and say what to do."""
    offered, has_keys = config.profiler_config is not None, bool(config.api_keys)

    def check(request: Request) -> None:
        if not offered:
            raise APIError(404, NO_FOLDER)
        refuse_pages(request, has_keys)

    @app.post("/start_profile", include_in_schema=offered)
    async def start_profile(request: Request, profile_prefix: str | None = None) -> Response:
        check(request)
        try:
            return JSONResponse(await llm.start_profile(profile_prefix))
        except ProfileRefusedError as error:
            raise APIError(409, str(error), code="busy") from error

    @app.post("/stop_profile", include_in_schema=offered)
    async def stop_profile(request: Request) -> Response:
        check(request)
        try:
            return JSONResponse(await llm.stop_profile())
        except ProfileRefusedError as error:
            raise APIError(409, str(error), code="busy") from error
