"""Spans of requests, as a collector gets them."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch
from support.engines import tiny_checkpoint
from support.imported_processes import imported_processes
from support.waiting import PATIENCE

from tritonllm import AsyncEngineArgs, AsyncLLM, SamplingParams
from tritonllm.cli import main
from tritonllm.config.sampling_params import RequestOutputKind
from tritonllm.engine.data.outputs import PoolingOutput, PoolingRequestOutput
from tritonllm.serve.api import tracing
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}


LONG = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)


class Collector:
    """Keeps the spans that it is sent."""

    def __init__(self):
        self.spans = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def attributes(span):
    found = {}
    for entry in span.attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind)
        found[entry.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


async def _ask(llm, url):
    app = make_app(llm, ServerConfig(model_names=("tiny",), otlp_traces_endpoint=url))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=PATIENCE) as client,
    ):
        header = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        assert (await client.post("/v1/completions", json={**BODY, "n": 2}, headers=header)).status_code == 200
        reply = await client.post("/v1/completions", json={**BODY, "prompt": [[5, 6], [7, 8]], "stream": True})
        assert reply.status_code == 200
        task = asyncio.create_task(anext(llm.generate([5, 6], LONG, "left")))
        while not llm.stats.num_running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_spans():
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    collector = Collector()
    settings = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with asyncio.Runner() as runner:
        with imported_processes():
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_checkpoint()), **settings))
        try:
            runner.run(_ask(llm, collector.url))
        finally:
            llm.shutdown()
            collector.close()
    assert [span.name for span in collector.spans] == ["llm_request"] * 4
    first = next(span for span in collector.spans if span.trace_id.hex() == TRACE)
    assert first.parent_span_id.hex() == PARENT and first.kind == 2  # of a server
    assert first.end_time_unix_nano > first.start_time_unix_nano
    found = attributes(first)
    assert found["gen_ai.request.id"].startswith("cmpl-mine-")
    assert {
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 6,
    }.items() <= found.items()
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 12)
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    others = [attributes(span) for span in collector.spans if span is not first]
    assert sorted(one["gen_ai.response.finish_reasons"][0] for one in others) == ["abort", "length", "length"]
    assert all(not span.parent_span_id for span in collector.spans if span is not first)


def test_spans_of_requests_without_an_output_of_tokens():
    """A span says when one was lost, and no latency that nobody took."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = tracing.Traces(provider, "tiny")
    for name in ("lost", "pooled"):
        traces.added(name, 3, SamplingParams())
    traces.failed("lost", "replica 0: killed")
    traces.updated(PoolingRequestOutput("pooled", PoolingOutput(torch.empty(0)), ()))
    lost, pooled = exporter.get_finished_spans()
    assert (lost.status.is_ok, lost.status.description) == (False, "replica 0: killed")
    assert pooled.status.is_ok and pooled.attributes["gen_ai.usage.prompt_tokens"] == 3
    for span in (lost, pooled):
        assert not [name for name in span.attributes if "latency" in name]


def test_without_the_extra(monkeypatch, capsys):
    def missing():
        raise ImportError(tracing.EXTRA.format("No module named 'opentelemetry'"))

    monkeypatch.setattr(tracing, "require_packages", missing)
    assert main(["serve", "--otlp-traces-endpoint", "http://localhost:4318/v1/traces"]) == 1
    assert "pip install '.[otel]'" in capsys.readouterr().err


def test_another_url(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--otlp-traces-endpoint", "grpc://localhost:4317"])
    assert "--otlp-traces-endpoint must be a URL" in capsys.readouterr().err
