"""An engine's counters and load as metrics, under vLLM's names where we measure the same thing.

The server gives these to Prometheus; :meth:`tritonllm.LLM.get_metrics` gives them to a script, in classes that have the
names and fields of vLLM's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tritonllm.engine.data.stats import EngineStats

ACCEPTED_PER_POS = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class Metric:
    """One value of one engine.

    Attributes:
        name: as Prometheus has it, without ``_total`` behind a counter's.
        labels: ``model_name`` and ``engine``, the replica's number.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows; in seconds if the name says so."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Counters in an order; of ``..._per_pos`` the places of drafts."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A value that is so at the moment, and may rise and fall."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """For ``isinstance`` in scripts written for vLLM. A script has no metric of this class:
    :attr:`tritonllm.RequestOutput.metrics` has the times of each request.

    Attributes:
        count, sum: how many observations there were, and the sum of all of them.
        buckets: for each bound, how many observations were at most as large.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def gauges(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    """Name, description and value of each gauge: what an engine's state is at the moment.

    Args:
        stats: the statistics of the engine.
    """
    host = stats.num_used_host_blocks / max(stats.num_host_blocks, 1)
    used = 1 - stats.num_free_blocks / max(stats.num_blocks, 1) if stats.num_blocks else 0.0
    yield "vllm:num_requests_running", "Sequences in execution.", stats.num_running
    yield "vllm:num_requests_waiting", "Sequences that wait for a seat.", stats.num_waiting
    yield "vllm:kv_cache_usage_perc", "Used part of the KV cache; 1 is all of it.", used
    yield "tritonllm:host_cache_usage_perc", "Used part of the cache in the host's memory.", host


def counters(stats: EngineStats) -> Iterator[tuple[str, str, float]]:
    """Name, description and value of each counter: what an engine has counted since its start."""
    yield "vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_query_tokens
    yield "vllm:prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_cache_hit_tokens
    yield "vllm:num_preemptions", "Preemptions by the engine.", stats.preemptions
    yield "vllm:prompt_tokens", "Prompt tokens of accepted requests.", stats.prompt_tokens
    yield "vllm:generation_tokens", "Generated tokens.", stats.generated_tokens
    yield "tritonllm:forced_tokens", "Generated tokens that grammars left no choice of.", stats.forced_tokens
    yield "vllm:spec_decode_num_drafts", "Sequences of steps that had drafts.", stats.num_drafts
    yield "vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", stats.num_draft_tokens
    yield "vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.", stats.num_accepted_tokens
    yield "tritonllm:spec_decode_draft_seconds", "Time on the device of making drafts.", stats.draft_seconds
    yield "tritonllm:host_cache_stored_bytes", "Copied to the cache in the host's memory.", stats.stored_bytes
    yield "tritonllm:host_cache_loaded_bytes", "Copied back from there.", stats.loaded_bytes
    yield (
        "tritonllm:kv_transfer_saved_blocks",
        "Blocks computed here that the KV connector kept.",
        stats.kv_saved_blocks,
    )
    yield "tritonllm:kv_transfer_fetched_blocks", "Blocks that the KV connector brought.", stats.kv_fetched_blocks
    yield "tritonllm:kv_transfer_missed_blocks", "Blocks that it should have brought.", stats.kv_missed_blocks
    host = stats.step_seconds - stats.wait_seconds
    yield "tritonllm:steps", "Steps that were launched.", stats.steps
    yield "tritonllm:step_seconds", "Time of steps.", stats.step_seconds
    yield "tritonllm:step_host_seconds", "Of it, what was no waiting for the device.", host
    yield "tritonllm:compilations_after_ready", "Kernels compiled in service.", stats.compilations_after_ready


def metrics_of(stats: EngineStats, model_name: str, engine: int) -> list[Metric]:
    """All metrics of one engine.

    Args:
        stats: as of :func:`gauges`.
        model_name: the name of the model, a label of each metric.
        engine: the number of the replica, another label.
    """
    labels = {"model_name": model_name, "engine": str(engine)}
    found: list[Metric] = [Gauge(name, labels, value) for name, _, value in gauges(stats)]
    found += [Counter(name, labels, value) for name, _, value in counters(stats)]
    return [*found, Vector(ACCEPTED_PER_POS, labels, list(stats.num_accepted_tokens_per_pos))]
