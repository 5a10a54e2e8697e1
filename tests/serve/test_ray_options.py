"""Arguments of the application of Ray Serve are refused before anything starts, and requests are placed as the router
does it; no cluster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rendezvous import placed_slowly, ranked

from tritonllm.demo import model_path
from tritonllm.serve.ray.options import read_plan
from tritonllm.serve.ray.ray_serve import build_app, of_engines, of_ingress

pytest.importorskip("ray.serve")
MODEL = str(model_path())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "model is missing: name one"),
        ({"model": MODEL, "num_replica": 2}, "unknown argument 'num_replica': did you mean num_replicas?"),
        ({"model": MODEL, "max_num_sequences": 2}, r"unknown argument 'max_num_sequences' .*did you mean max_num_seqs"),
        ({"model": MODEL, "num_replicas": 0}, "num_replicas must be an integer of at least 1, got 0"),
        ({"model": MODEL, "num_replicas": "two"}, "num_replicas must be of type int, got 'two'"),
        ({"model": MODEL, "num_replicas": 2, "autoscaling_config": {}}, "num_replicas and autoscaling_config exclude"),
        ({"model": MODEL, "autoscaling_config": "4"}, "autoscaling_config must be an object"),
        ({"model": MODEL, "autoscaling_config": {"max": 4}}, "autoscaling_config: unknown entry 'max': there are"),
        (
            {"model": MODEL, "autoscaling_config": {"max_replicas": 0}},
            r"autoscaling_config\.max_replicas: .*greater than",
        ),
        (
            {"model": MODEL, "autoscaling_config": {"min_replicas": 3, "max_replicas": 2}},
            "autoscaling_config: .*max_rep",
        ),
        ({"model": MODEL, "max_num_seqs": "0"}, "max_num_seqs must be"),
        ({"model": MODEL, "tensor_parallel_size": "1.5"}, "tensor_parallel_size must be an integer"),
        ({"model": MODEL, "data_parallel_size": 2}, "data_parallel_size is no argument here: set num_replicas"),
        ({"model": MODEL, "distributed_executor_backend": "ray"}, "distributed_executor_backend='ray': a replica's"),
        ({"model": MODEL, "device": "cuda:1"}, "device='cuda:1': Ray chooses the GPU"),
        ({"model": MODEL, "port": 8000}, "port is no argument here: it is an option of Serve's proxies"),
        ({"model": MODEL, "drain_seconds": 3}, "set graceful_shutdown_timeout_s instead"),
        ({"model": MODEL, "restart": 1}, "Serve starts a replica anew"),
        ({"model": MODEL, "server_dev_mode": True}, "would reach one replica of several"),
        ({"model": MODEL, "health_check_period_s": 0}, "health_check_period_s must be greater than 0"),
        ({"model": MODEL, "balance_epsilon": -1}, "balance_epsilon must be a number of at least 0"),
        ({"model": MODEL, "max_queue": -1}, "max_queue must be an integer of at least 0"),
        ({"model": MODEL, "api_key": ""}, "api_key must be text or a list of texts"),
        ({"model": MODEL, "served_model_name": [3]}, "served_model_name must be text"),
        ({"model": MODEL, "tool_call_parser": "x"}, "--tool-call-parser must be one of hermes"),
        ({"model": MODEL, "sticky_header": 3}, "sticky_header must be the name of a header"),
    ],
)
def test_bad_arguments_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        build_app(args)


def test_a_template_that_is_not_there():
    with pytest.raises(OSError, match="cannot read nowhere"):
        build_app({"model": MODEL, "chat_template": "nowhere"})


def test_text_is_read_as_what_it_stands_for(monkeypatch):
    monkeypatch.setattr("tritonllm.env.API_KEY", "of-the-environment")
    typed = {"tensor_parallel_size": 2, "enforce_eager": True, "balance_epsilon": 0.5, "enable_prefix_caching": False}
    scaling = {"autoscaling_config": '{"max_replicas": 4}', "served_model_name": "7"}
    plan = read_plan({"model": MODEL, **{name: str(value) for name, value in typed.items()}, **scaling})
    assert plan == read_plan(
        {"model": MODEL, **typed, "autoscaling_config": {"max_replicas": 4}, "served_model_name": ["7"]}
    )
    assert plan.engine.enforce_eager is True and plan.engine.parallel.tensor_parallel_size == 2
    assert plan.server.api_keys == ("of-the-environment",) and plan.server.model_names == ("7",)
    assert read_plan({"model": MODEL, "api_key": ["a", "b"]}).server.api_keys == ("a", "b")


def test_what_serve_is_told():
    on_gpus = read_plan({"model": MODEL, "tensor_parallel_size": 4, "graceful_shutdown_timeout_s": 60})
    assert on_gpus.engine.model.device == "cuda"
    engines, ingress = of_engines(on_gpus), of_ingress(on_gpus)
    assert engines["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 4} and engines["num_replicas"] == 1
    assert ingress["graceful_shutdown_timeout_s"] > engines["graceful_shutdown_timeout_s"] == 60
    scaled = {"min_replicas": 0, "max_replicas": 3}
    on_cpus = read_plan({"model": MODEL, "device": "cpu", "num_cpus": 2, "autoscaling_config": scaled})
    engines = of_engines(on_cpus)
    assert engines["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0} and "num_replicas" not in engines
    found = engines["autoscaling_config"]
    assert (found.min_replicas, found.max_replicas, found.target_ongoing_requests) == (0, 3, 128)


NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True)


@given(st.binary(max_size=8), NAMES, st.lists(st.sampled_from("abcdefgh")), st.lists(st.integers(1, 50), max_size=20))
def test_each_order_has_all_replicas_and_begins_as_the_router_does(key, names, tried, requests):
    from tritonllm.serve.ray.prefix import Loads

    loads = Loads(0.25, 10)
    for i, tokens in enumerate(requests):
        loads.begin(names[i % len(names)], str(i), tokens)
    order = loads.order(key, names, tried)
    assert sorted(order) == sorted(names)
    good = [name for name in names if name not in tried] or names
    assert set(order[: len(good)]) == set(good), "those that have failed it come last"
    if key:
        assert order[0] == placed_slowly(key, {name: loads.of(name) for name in good}, 0.25, 10)
        assert order[1 : len(good)] == [name for name in ranked(key, good) if name != order[0]]
    else:
        assert loads.of(order[0]) == min(map(loads.of, good))
    for i, _ in enumerate(requests):
        loads.end(names[i % len(names)], str(i))
        loads.end(names[i % len(names)], str(i))
    assert not any(map(loads.of, names)), "what has ended is not counted, nor taken off twice"


def test_metrics_of_replicas_are_told_apart():
    from tritonllm.serve.ray.metrics import together

    page = b'# HELP a:x_total Things.\n# TYPE a:x_total counter\na:x_total{k="v"} %d.0\n'
    kind, text = together([("two", page % 2), ("one", page % 1)])
    assert kind.startswith("text/plain")
    lines = text.decode().splitlines()
    assert lines[0].startswith("# HELP a:x_total") and lines[1].startswith("# TYPE a:x_total")
    assert lines[2:] == ['a:x_total{k="v",replica="one"} 1.0', 'a:x_total{k="v",replica="two"} 2.0']
