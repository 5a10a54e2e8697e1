"""What says how the server is: for probes, for Prometheus, and the page for people."""

import asyncio
from dataclasses import asdict
from importlib import resources
from time import monotonic
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tritonllm.serve.api.errors import APIError, as_api_error, error_response
from tritonllm.serve.api.metrics import ServerMetrics
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.engines.shared_count import SharedCount
from tritonllm.telemetry.snapshot import View
from tritonllm.version import __version__

# Of the status page: its own styles and script, and what this server answers; nothing from elsewhere. A browser that is
# told of no icon asks for one.
PAGE_MAY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ANSWERS_WITHIN = 5.0  # seconds; an engine that compiles takes longer, and one that hangs
NO_ANSWER = f"the engine has not answered for {ANSWERS_WITHIN:g} seconds: a step takes long, or hangs"
BETWEEN_LOOKS = 0.05  # seconds at least: a look takes 2 ms of the engine's time with 256 sequences of 64 blocks


class ActivityQuestions:
    """Asks what an engine does (:mod:`tritonllm.serve.engines.activity`), once at a time, however many want to look:
    who asks what is asked already gets the same answer."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._asked: dict[tuple[View, int | None], asyncio.Task[dict[str, Any]]] = {}
        self._turn = asyncio.Lock()
        self._last = 0.0

    async def get(self, view: View, replica: int | None = None) -> dict[str, Any]:
        """What the engine does; the answer is that of :meth:`AsyncLLM.activity`.

        Raises:
            EngineDeadError: the engine process has died.
            APIError: it does not answer.
        """
        self._asked = {question: task for question, task in self._asked.items() if not task.done()}
        task = self._asked.get((view, replica))
        if task is None:
            task = self._asked[view, replica] = asyncio.create_task(self._ask(view, replica))
        try:
            async with asyncio.timeout(ANSWERS_WITHIN):
                return await asyncio.shield(task)  # others may wait for it, too
        except TimeoutError:
            raise APIError(503, NO_ANSWER, code="engine_busy") from None

    async def _ask(self, view: View, replica: int | None) -> dict[str, Any]:
        async with self._turn:
            await asyncio.sleep(self._last + BETWEEN_LOOKS - monotonic())
            try:
                return await self._llm.activity(asdict(view), replica)
            finally:
                self._last = monotonic()


def add_status(app: FastAPI, llm: AsyncLLM, metrics: ServerMetrics, running: SharedCount) -> None:
    """The paths of who looks after a server.

    Args:
        running: requests that are being answered.
    """
    page = (resources.files("tritonllm.serve.api") / "status.html").read_bytes()
    looks = ActivityQuestions(llm)

    @app.get("/", include_in_schema=False)
    async def page_of_status() -> Response:
        headers = {"Content-Security-Policy": PAGE_MAY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return Response(page, media_type="text/html", headers=headers)

    @app.get("/activity")
    async def activity(
        first_row: int = 0, rows: int = 20, cells: int = 400, steps: int = 80, replica: int | None = None
    ) -> Response:
        view, count = View(first_row, rows, cells, steps), len(llm.replica_stats)
        if replica is not None and not 0 <= replica < count:
            raise APIError(400, f"replica must be from 0 to {count - 1}, got {replica}", param="replica")
        told = await looks.get(view, replica)
        if count > 1:
            which = "one" if replica is None else f"engine {replica}"
            told = {**told, "note": f"{which} of engines 0 to {count - 1}: --replica"}
        return JSONResponse(told, headers={"Cache-Control": "no-store"})

    @app.get("/health")
    async def health() -> Response:
        if llm.unavailable is not None:
            return error_response(as_api_error(llm.unavailable))
        return JSONResponse({"status": "ok"})

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:  # as SageMaker's and Vertex's probes ask
        return await health()

    @app.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": running.total})

    @app.get("/ready")
    async def ready() -> Response:
        if llm.unavailable is not None:
            return error_response(as_api_error(llm.unavailable))
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
