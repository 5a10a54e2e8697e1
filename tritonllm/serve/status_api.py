"""What says how the server is: for probes, for Prometheus, and the page for people."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from importlib import resources
from time import monotonic
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tritonllm.serve.async_llm import AsyncLLM
from tritonllm.serve.errors import APIError, as_api_error, error_response
from tritonllm.serve.metrics import Metrics
from tritonllm.teach.dashboard.snapshot import View
from tritonllm.version import __version__

# Of the status page: its own styles and script, and what this server answers; nothing from elsewhere. A browser that is
# told of no icon asks for one.
PAGE_MAY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FRESH = 0.5  # seconds for which a picture is good enough: the engine takes two a second at most
ANSWERS_WITHIN = 5.0  # seconds; an engine that compiles takes longer, and one that hangs
NO_ANSWER = f"the engine has not answered for {ANSWERS_WITHIN:g} seconds: a step takes long, or hangs"
BETWEEN_LOOKS = 0.05  # seconds at least: a look takes 2 ms of the engine's time with 256 sequences of 64 blocks


class Pictures:
    """Of one engine, for however many look."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._asked: asyncio.Task[dict[str, Any]] | None = None
        self._at = 0.0

    async def get(self) -> dict[str, Any]:
        """Raises:
        EngineDeadError: the engine process has died.
        APIError: it does not answer.
        """
        if self._asked is None or (self._asked.done() and monotonic() - self._at > FRESH):
            self._asked, self._at = asyncio.create_task(self._llm.picture()), monotonic()
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                return await asyncio.shield(self._asked)  # others may wait for it, too
        except TimeoutError:
            raise APIError(503, NO_ANSWER, code="engine_busy") from None


class Looks:
    """At what an engine does (:mod:`tritonllm.serve.activity`), one after the other, however many want to look."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._turn = asyncio.Lock()
        self._last = 0.0

    async def get(self, view: Mapping[str, int], replica: int) -> dict[str, Any]:
        """Raises:
        ValueError: a number of the view is out of its range.
        EngineDeadError: the engine process has died.
        APIError: it does not answer.
        """
        try:
            async with asyncio.timeout(ANSWERS_WITHIN), self._turn:
                await asyncio.sleep(self._last + BETWEEN_LOOKS - monotonic())
                try:
                    return await self._llm.activity(view, replica)
                finally:
                    self._last = monotonic()
        except TimeoutError:
            raise APIError(503, NO_ANSWER, code="engine_busy") from None


def add_status(app: FastAPI, llm: AsyncLLM, metrics: Metrics) -> None:
    page = (resources.files("tritonllm.serve") / "status.html").read_bytes()
    pictures, looks = Pictures(llm), Looks(llm)

    @app.get("/", include_in_schema=False)
    async def page_of_status() -> Response:
        headers = {"Content-Security-Policy": PAGE_MAY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return Response(page, media_type="text/html", headers=headers)

    @app.get("/status")
    async def status() -> Response:
        return JSONResponse(await pictures.get(), headers={"Cache-Control": "no-store"})

    @app.get("/activity")
    async def activity(
        first_row: int = 0, rows: int = 20, cells: int = 400, steps: int = 80, replica: int = 0
    ) -> Response:
        view, count = View(first_row, rows, cells, steps), len(llm.replica_stats)
        if not 0 <= replica < count:
            raise APIError(400, f"replica must be from 0 to {count - 1}, got {replica}", param="replica")
        told = await looks.get(asdict(view), replica)
        if count > 1:
            told["note"] = f"engine {replica} of 0 to {count - 1}: --replica"
        return JSONResponse(told, headers={"Cache-Control": "no-store"})

    @app.get("/health")
    async def health() -> Response:
        if llm.errored:
            return error_response(as_api_error(llm.dead_error))
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if llm.errored:
            return error_response(as_api_error(llm.dead_error))
        if app.state.draining:
            return error_response(APIError(503, "the server is shutting down", code="draining"))
        if not llm.stats.takes_requests:
            return error_response(APIError(503, "the engine sleeps, or has no weights", code="asleep"))
        return JSONResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics_page() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)
