"""A span for each request, for OpenTelemetry (``--otlp-traces-endpoint``). Needs the extra ``otel``.

Names of attributes are vLLM's, which are those of OpenTelemetry's conventions for generative models where these have
some. A span is a child of the one that the client's header ``traceparent`` names.
"""

import time
from dataclasses import dataclass
from typing import Any

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.outputs import EngineOutput, RequestMetrics, RequestOutput
from tritonllm.system.extras import install

EXTRA = f"--otlp-traces-endpoint needs more packages ({{}}): {install('otel')}"
SPAN = "llm_request"


def require_packages() -> None:
    """Check that the packages of OpenTelemetry are installed.

    Raises:
        ImportError: the extra is not installed.
    """
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ImportError(EXTRA.format(error)) from error


def make_provider(endpoint: str, service: str) -> Any:
    """What makes spans and sends them to a collector, in a thread, as protobuf over HTTP.

    Args:
        endpoint: the collector's URL, as ``http://localhost:4318/v1/traces``.
        service: the name under which the spans come.

    Returns:
        A provider of OpenTelemetry's SDK; its ``shutdown`` sends what is left.

    Raises:
        ImportError: the packages are missing.
    """
    require_packages()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


class WithParent:
    """ASGI middleware: what runs behind it has the client's span for a parent.

    Args:
        app: what comes behind it.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        token = context.attach(TraceContextTextMapPropagator().extract(headers))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


@dataclass(slots=True)
class _Running:
    span: Any
    prompt_tokens: int
    tokens: int = 0


class Traces:
    """Follows requests (an :class:`~tritonllm.serve.engines.open_requests.Observer`).

    Args:
        provider: the OpenTelemetry provider that spans are made with.
        model_name: an attribute of every span.
    """

    def __init__(self, provider: Any, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tritonllm")
        self._model_name = model_name
        self._running: dict[str, _Running] = {}

    def added(self, request_id: str, prompt_tokens: int, params: SamplingParams) -> None:
        from opentelemetry.trace import SpanKind

        attributes = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.prompt_tokens": prompt_tokens,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        span = self._tracer.start_span(SPAN, kind=SpanKind.SERVER, attributes=attributes)
        self._running[request_id] = _Running(span, prompt_tokens)

    def failed(self, request_id: str, why: str) -> None:
        if request_id in self._running:
            self._end(request_id, why)

    def updated(self, output: EngineOutput) -> None:
        one = self._running.get(output.request_id)
        if one is None:
            return
        if isinstance(output, RequestOutput):
            one.tokens += sum(len(completion.token_ids) for completion in output.outputs)
            if not output.finished:
                return
            reasons = [completion.finish_reason or "" for completion in output.outputs]
            one.span.set_attribute("gen_ai.response.finish_reasons", reasons)
            if output.metrics is not None:
                one.span.set_attributes(_latencies(output.metrics))
        self._end(output.request_id, output.error)

    def aborted(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].span.set_attribute("gen_ai.response.finish_reasons", ["abort"])
            self._end(request_id)

    def close(self) -> None:
        """End what runs, and send what is left."""
        for request_id in list(self._running):
            self._end(request_id, "the server ended")
        self._provider.shutdown()

    def _end(self, request_id: str, error: str | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        one = self._running.pop(request_id)
        one.span.set_attribute("gen_ai.usage.completion_tokens", one.tokens)
        if error is not None:
            one.span.set_status(Status(StatusCode.ERROR, error))
        one.span.end()


def _latencies(times: RequestMetrics) -> dict[str, float]:
    """The latencies of a request in seconds, as the engine took them."""
    end = times.finished_time or time.monotonic()
    found = {"gen_ai.latency.e2e": end - times.arrival_time}
    if times.first_token_time is not None:
        found["gen_ai.latency.time_to_first_token"] = times.first_token_time - times.arrival_time
        found["gen_ai.latency.time_in_model_decode"] = end - times.first_token_time
    return found


class Observers:
    """Several of them as one.

    Args:
        observers: are told in this order.
    """

    def __init__(self, *observers: Any) -> None:
        self._observers = observers

    def added(self, request_id: str, prompt_tokens: int, params: SamplingParams) -> None:
        for one in self._observers:
            one.added(request_id, prompt_tokens, params)

    def updated(self, output: EngineOutput) -> None:
        for one in self._observers:
            one.updated(output)

    def failed(self, request_id: str, why: str) -> None:
        for one in self._observers:
            one.failed(request_id, why)

    def aborted(self, request_id: str) -> None:
        for one in self._observers:
            one.aborted(request_id)
