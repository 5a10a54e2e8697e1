"""What the engine counts and requests take, under the names that Prometheus reads."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.outputs import (
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from tritonllm.engine.data.stats import EngineStats
from tritonllm.serve.api import metrics
from tritonllm.serve.api.metrics import EngineStatsCollector


def test_the_cache_in_the_hosts_memory():
    stats = EngineStats(num_blocks=10, num_free_blocks=5, num_host_blocks=8, num_used_host_blocks=2)
    stats = replace(stats, stored_bytes=3000, loaded_bytes=1000)
    stats = replace(stats, kv_saved_blocks=5, kv_fetched_blocks=6, kv_missed_blocks=7)
    registry = CollectorRegistry()
    engines = SimpleNamespace(replica_stats=[stats], replicas_living=[True], replica_restarts=[0])
    registry.register(EngineStatsCollector(engines, "m"))
    text = generate_latest(registry).decode()
    labels = '{engine="0",model_name="m"}'
    assert f"tritonllm:host_cache_usage_perc{labels} 0.25" in text
    assert f"tritonllm:host_cache_stored_bytes_total{labels} 3000.0" in text
    assert f"tritonllm:host_cache_loaded_bytes_total{labels} 1000.0" in text
    assert f"vllm:kv_cache_usage_perc{labels} 0.5" in text
    for name, count in (("saved", 5.0), ("fetched", 6.0), ("missed", 7.0)):
        assert f"tritonllm:kv_transfer_{name}_blocks_total{labels} {count}" in text
    engines.replica_stats = [replace(stats, num_host_blocks=0, num_used_host_blocks=0)]  # an engine without
    assert f"tritonllm:host_cache_usage_perc{labels} 0.0" in generate_latest(registry).decode()


def test_each_replica_has_its_label():
    stats = [EngineStats(steps=3, num_running=1), EngineStats(steps=5)]
    registry = CollectorRegistry()
    engines = SimpleNamespace(replica_stats=stats, replicas_living=[True, False], replica_restarts=[2, 0])
    registry.register(EngineStatsCollector(engines, "m"))
    text = generate_latest(registry).decode()
    for number, (steps, running, up) in enumerate([(3, 1, 1), (5, 0, 0)]):
        assert f'tritonllm:engine_restarts_total{{engine="{number}",model_name="m"}} {2 - 2 * number}.0' in text
        labels = f'{{engine="{number}",model_name="m"}}'
        assert f"tritonllm:steps_total{labels} {steps}.0" in text
        assert f"vllm:num_requests_running{labels} {running}.0" in text
        assert f"tritonllm:engine_up{labels} {up}.0" in text


class Clock:
    """Shows what a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(metrics, "monotonic", clock)
    return clock


def update(counts, finished=False, **times):
    """Of a request: how many new tokens its continuations have."""
    reason = "length" if finished else None
    outputs = [CompletionOutput(i, "", [1] * count, finish_reason=reason) for i, count in enumerate(counts)]
    return RequestOutput("r", None, (), None, outputs, finished, RequestMetrics(0.0, **times))


class Followed:
    """What the metrics say of one request, which is given to them step by step."""

    def __init__(self):
        engines = SimpleNamespace(replica_stats=[], replicas_living=[], replica_restarts=[], observer=None)
        self.metrics = metrics.ServerMetrics(engines, "m")

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "m", "engine": "0", **labels})

    def sum_of(self, name):
        assert self.value(f"{name}_count") == 1
        return self.value(f"{name}_sum")


def test_the_parts_of_a_requests_time(clock):
    followed = Followed()
    clock.now = 100.0
    followed.metrics.added("r", 7, SamplingParams(max_tokens=30))
    clock.now = 103.5
    followed.metrics.updated(update([1], first_token_time=103.0, first_scheduled_time=102.0))
    clock.now = 104.0
    followed.metrics.updated(update([1], first_token_time=103.0, first_scheduled_time=102.0))
    end = {"first_token_time": 103.0, "first_scheduled_time": 102.0, "finished_time": 110.0}
    followed.metrics.updated(update([3], finished=True, **end))
    times = {"queue": 2.0, "prefill": 1.0, "decode": 7.0, "inference": 8.0}
    assert {name: followed.sum_of(f"request_{name}_time_seconds") for name in times} == times
    assert followed.sum_of("e2e_request_latency_seconds") == 10.0
    assert followed.sum_of("time_to_first_token_seconds") == 3.0
    assert followed.sum_of("request_time_per_output_token_seconds") == 7.0 / 4
    assert followed.value("inter_token_latency_seconds_sum") == 0.5  # between outputs, as they come here
    assert followed.sum_of("request_prompt_tokens") == 7
    assert followed.sum_of("request_generation_tokens") == 5
    assert followed.sum_of("request_params_max_tokens") == 30
    for bound, below in (("5.0", 1), ("2.0", 0)):
        assert followed.value("request_generation_tokens_bucket", le=bound) == below
    assert followed.value("request_success_total", finished_reason="length") == 1


@pytest.mark.parametrize("whole", [False, True])
def test_the_time_of_a_token_with_several_continuations(clock, whole):
    """One of three ends early. Each step of a second brings each a token."""
    followed, lengths = Followed(), [2, 9, 5]
    followed.metrics.added("r", 4, SamplingParams(n=3, max_tokens=9))
    if whole:
        followed.metrics.updated(update(lengths, finished=True, first_token_time=2.0, finished_time=10.0))
    else:
        for step in range(9):
            clock.now = 2.0 + step
            counts = [int(step < length) for length in lengths]
            followed.metrics.updated(update(counts, step == 8, first_token_time=2.0, finished_time=clock.now))
    assert followed.sum_of("request_time_per_output_token_seconds") == 1.0
    assert followed.sum_of("request_generation_tokens") == 16
    assert followed.sum_of("request_max_num_generation_tokens") == 9
    assert followed.sum_of("request_params_n") == 3
    assert followed.value("request_success_total", finished_reason="length") == 3


@pytest.mark.parametrize("how", ["refused", "pooled"])
def test_a_request_without_an_output_of_tokens(clock, how):
    """One that was refused, or whose engine has died, took no time; one that is pooled took some."""
    followed = Followed()
    followed.metrics.added("r", 4, SamplingParams())
    clock.now = 2.5
    if how == "refused":
        followed.metrics.failed("r", "too long")
    else:
        followed.metrics.updated(PoolingRequestOutput("r", PoolingOutput(torch.empty(0)), ()))
    counted = int(how == "pooled")
    assert followed.value("e2e_request_latency_seconds_count") == counted
    assert followed.value("e2e_request_latency_seconds_sum") == 2.5 * counted
    assert followed.value("time_to_first_token_seconds_count") == 0
    followed.metrics.aborted("r")
    assert followed.value("request_success_total", finished_reason="abort") is None, "it has ended"


def test_a_request_without_a_token_has_no_times(clock):
    followed = Followed()
    followed.metrics.added("r", 4, SamplingParams())
    followed.metrics.updated(update([0], finished=True, finished_time=3.0))
    for name in ("queue", "prefill", "decode", "inference"):
        assert followed.value(f"request_{name}_time_seconds_count") == 0
    assert followed.sum_of("e2e_request_latency_seconds") == 3.0
