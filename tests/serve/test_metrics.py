"""What the engine counts, under the names that Prometheus reads."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from tritonllm.serve.messages import Stats
from tritonllm.serve.metrics import EngineStatsCollector


def test_the_cache_in_the_hosts_memory():
    stats = Stats(num_blocks=10, num_free_blocks=5, num_host_blocks=8, num_used_host_blocks=2)
    stats.stored_bytes, stats.loaded_bytes = 3000, 1000
    stats.kv_saved_blocks, stats.kv_fetched_blocks, stats.kv_missed_blocks = 5, 6, 7
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
    stats.num_host_blocks = stats.num_used_host_blocks = 0  # an engine without
    assert f"tritonllm:host_cache_usage_perc{labels} 0.0" in generate_latest(registry).decode()


def test_each_replica_has_its_label():
    stats = [Stats(steps=3, num_running=1), Stats(steps=5)]
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
