"""Prometheus metrics, under vLLM's names and with its meanings where we measure the same thing."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.outputs import EngineOutput, RequestMetrics, RequestOutput
from tritonllm.engine.data.stats import EngineStats
from tritonllm.engine.loop.metrics import ACCEPTED_PER_POS, counters, gauges
from tritonllm.serve.engines.async_llm import AsyncLLM

LABELS = ("model_name", "engine")
# Upper ends of the buckets are vLLM's, so that its dashboards have theirs.
TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
LENGTHS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))


def _gauges(stats: EngineStats, lives: bool) -> Iterator[tuple[str, str, float]]:
    """Name, description and value of what an engine is now."""
    yield from gauges(stats)
    yield "tritonllm:engine_up", "1 while the engine's process lives.", float(lives)


RESTARTS = "tritonllm:engine_restarts", "Times that the engine was started anew."


class EngineStatsCollector(Collector):
    """The engines' counters and load, as they are when somebody asks; the label ``engine`` is the replica's number."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        replicas = self._llm.replica_stats
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for number, (stats, lives) in enumerate(zip(replicas, self._llm.replicas_living, strict=True)):
            labels = self._model_name, str(number)
            counted = *counters(stats), (*RESTARTS, self._llm.replica_restarts[number])
            for kind, values in ((GaugeMetricFamily, _gauges(stats, lives)), (CounterMetricFamily, counted)):
                for name, text, value in values:
                    families.setdefault(name, kind(name, text, labels=LABELS)).add_metric(labels, value)
        yield from families.values()
        labels_of_places = (*LABELS, "position")
        counter = CounterMetricFamily(ACCEPTED_PER_POS, "Accepted drafts by their place.", labels=labels_of_places)
        for number, stats in enumerate(replicas):
            for place, value in enumerate(stats.num_accepted_tokens_per_pos):
                counter.add_metric((self._model_name, str(number), str(place)), value)
        yield counter


@dataclass(slots=True)
class _Times:
    """The times and sizes of a request that runs."""

    arrival: float
    n: int
    prompt_tokens: int
    max_tokens: int | None
    first: float | None = None
    last: float = 0.0
    tokens: dict[int, int] = field(default_factory=dict)  # of each continuation


class ServerMetrics:
    """Follows the requests of one :class:`AsyncLLM`.

    Args:
        llm: the engine whose requests are counted; its :attr:`AsyncLLM.observer` is set.
        model_name: a label of every metric.
        folder: where several API processes count together; ``None``: there is one.
    """

    def __init__(self, llm: AsyncLLM, model_name: str, folder: str | None = None) -> None:
        self._folder = folder
        self.registry = CollectorRegistry(auto_describe=True)
        labels = (model_name, "0")
        self._engine = EngineStatsCollector(llm, model_name)
        if folder is None:
            self.registry.register(self._engine)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=buckets, registry=self.registry).labels(*labels)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between two outputs of a stream.", ITL)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Of a request's longest answer, after its first token.", ITL
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", E2E)
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival until it left the queue.", E2E)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From then to the first token.", E2E)
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the end.", E2E)
        self._inference = histogram("vllm:request_inference_time_seconds", "From the queue to the end.", E2E)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTHS)
        self._generation = histogram("vllm:request_generation_tokens", "Generated tokens of a request.", LENGTHS)
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of a request's longest answer.", LENGTHS
        )
        self._max_tokens = histogram("vllm:request_params_max_tokens", "The parameter max_tokens.", LENGTHS)
        self._n = histogram("vllm:request_params_n", "The parameter n.", (1, 2, 5, 10, 20))
        self._success = Counter(
            "vllm:request_success", "Ended requests.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._ignored = Counter(
            "tritonllm:ignored_fields",
            "Requests with a field that changes nothing.",
            (*LABELS, "field"),
            registry=self.registry,
        )
        self._labels = labels
        self._requests: dict[str, _Times] = {}
        llm.observer = self

    def text(self) -> bytes:
        """All metrics in Prometheus' format."""
        if self._folder is None:
            return generate_latest(self.registry)
        together = CollectorRegistry()
        MultiProcessCollector(together, self._folder)
        together.register(self._engine)
        return generate_latest(together)

    def ignored(self, field: str) -> None:
        """A request has a field that changes nothing; whoever tells keeps the number of names small."""
        self._ignored.labels(*self._labels, field).inc()

    def added(self, request_id: str, prompt_tokens: int, params: SamplingParams) -> None:
        self._requests[request_id] = _Times(monotonic(), params.n, prompt_tokens, params.max_tokens)

    def aborted(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is not None:
            self._success.labels(*self._labels, "abort").inc()

    def failed(self, request_id: str, why: str) -> None:
        self._requests.pop(request_id, None)

    def updated(self, output: EngineOutput) -> None:
        times = self._requests.get(output.request_id)
        if times is None:
            return
        if not isinstance(output, RequestOutput):
            self._finish(times, output.request_id)
            return
        new, tokens = 0, times.tokens
        for completion in output.outputs:
            count = len(completion.token_ids)
            new += count
            tokens[completion.index] = tokens.get(completion.index, 0) + count
        if new:
            now = monotonic()
            if times.first is None:
                times.first = (output.metrics and output.metrics.first_token_time) or now
                self._ttft.observe(max(times.first - times.arrival, 0.0))
            else:
                self._itl.observe(now - times.last)
            times.last = now
        if output.finished:
            self._finish(times, output.request_id, output.metrics)
            for completion in output.outputs:
                self._success.labels(*self._labels, completion.finish_reason or "abort").inc()

    def _finish(self, times: _Times, request_id: str, told: RequestMetrics | None = None) -> None:
        """``told``: the engine's own times."""
        del self._requests[request_id]
        end = (told and told.finished_time) or monotonic()
        self._e2e.observe(end - times.arrival)
        self._prompt.observe(times.prompt_tokens)
        longest = max(times.tokens.values(), default=0)
        self._generation.observe(sum(times.tokens.values()))
        self._longest.observe(longest)
        self._n.observe(times.n)
        if times.max_tokens is not None:
            self._max_tokens.observe(times.max_tokens)
        if times.first is not None and longest > 1:  # of the answer that went on to the end
            self._tpot.observe((end - times.first) / (longest - 1))
        if times.first is not None and told is not None and told.first_scheduled_time is not None:
            scheduled = max(told.first_scheduled_time, times.arrival)
            self._queue.observe(scheduled - times.arrival)
            self._prefill.observe(times.first - scheduled)
            self._decode.observe(end - times.first)
            self._inference.observe(end - scheduled)
