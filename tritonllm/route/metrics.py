"""Prometheus metrics of the router; docs/routing.md says what each one means."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tritonllm.route.pool import Pool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _Gauges(Collector):
    """The backends as they are when somebody asks."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        gauges = (
            ("in_flight", "Requests that the backend is answering.", lambda backend: backend.in_flight),
            ("tokens_in_flight", "Their tokens, estimated.", lambda backend: backend.tokens),
            ("backend_up", "1 if requests can go to the backend.", lambda backend: int(backend.usable)),
        )
        for name, text, value in gauges:
            family = GaugeMetricFamily(f"tritonllm:route_{name}", text, labels=("backend",))
            for backend in self._pool.all:
                family.add_metric((backend.label,), value(backend))
            yield family


class RouterMetrics:
    """The metrics of a router, for Prometheus.

    Args:
        pool: the pool whose load is shown.
    """

    def __init__(self, pool: Pool) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(pool))
        self._requests = self._counter("requests", "Answers of backends, by status.", "backend", "status")
        self._failures = self._counter("failures", "Requests that a backend did not answer.", "backend", "reason")
        self._retries = self._counter("retries", "Requests sent again, after this backend failed.", "backend")
        self._ejections = self._counter("ejections", "Times that no more was sent to it.", "backend", "reason")
        self._broken = self._counter("broken_answers", "Answers that broke off after they began.", "backend")
        self._refused = self._counter("refused", "Requests that the router ended with an error.", "code")
        self._reloads = self._counter("reloads", "Configurations that were read again.", "result")
        self._prefills = self._counter("prefills", "Requests whose prompts went to a prefill backend first.", "result")
        self._first = self._histogram("first_byte_seconds", "From sending a request to its answer's first byte.")
        self._whole = self._histogram("request_seconds", "From sending a request to its answer's end.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tritonllm:route_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"tritonllm:route_{name}", text, ("backend",), buckets=SECONDS, registry=self._registry)

    def answered(self, backend: str, status: int, seconds: float) -> None:
        self._requests.labels(backend, str(status)).inc()
        self._first.labels(backend).observe(seconds)

    def ended(self, backend: str, seconds: float) -> None:
        self._whole.labels(backend).observe(seconds)

    def failed(self, backend: str, reason: str) -> None:
        self._failures.labels(backend, reason).inc()

    def retried(self, backend: str) -> None:
        self._retries.labels(backend).inc()

    def ejected(self, backend: str, reason: str) -> None:
        self._ejections.labels(backend, reason).inc()

    def broke(self, backend: str) -> None:
        self._broken.labels(backend).inc()

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def reloaded(self, result: str) -> None:
        self._reloads.labels(result).inc()

    def prefilled(self, result: str) -> None:
        self._prefills.labels(result).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
