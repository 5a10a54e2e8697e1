"""The server as an application of Ray Serve: replicas with an engine each, as many as the load asks for, behind
ingresses that place requests by the beginning of their prompts (docs/distributed.md, extra ``ray``).

    serve run tritonllm.serve.ray.ray_serve:build_app model=Qwen/Qwen3-0.6B num_replicas=2

Serve starts what is missing, replaces what has died, and lets a replica that has to end finish its requests.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tritonllm.dist.ray_cluster import import_ray
from tritonllm.serve.ray.options import Plan, ServeOptions, read_plan
from tritonllm.system.extras import install

WISH = "tritonllm.serve.ray.ray_serve"
ENGINES, INGRESS = "engines", "ingress"  # the names of the deployments
BETWEEN_LOOKS = 0.5  # seconds between looks whether a replica that has to end still answers requests
EXTRA_SECONDS = 5.0  # that an ingress may live longer than the replicas: it tells clients if these were cut off


def build_app(args: dict[str, Any]) -> Any:
    """The application, which ``serve.run`` and ``serve run`` take; nothing has been started yet.

    Args:
        args: engine arguments as of ``LLM``, options of ``tritonllm serve`` with underscores, and those of
            :class:`~tritonllm.serve.ray.options.ServeOptions`.

    Raises:
        ValueError: Ray Serve is not installed, or a bad argument; the message names it.
        OSError: the file of ``chat_template`` cannot be read.
    """
    serve = import_serve()
    plan = read_plan(args)
    options = of_engines(plan), of_ingress(plan)
    from tritonllm.serve.ray.ingress import Ingress
    from tritonllm.serve.ray.replica import EngineReplica

    # Keys stay at the ingress: nobody else reaches the replicas.
    server = replace(plan.server, api_keys=())
    engines = serve.deployment(**options[0])(EngineReplica).bind(plan.engine, server, plan.max_queue)
    placing = plan.serve.sticky_header, plan.serve.sticky_chars, plan.serve.max_retries
    return serve.deployment(**options[1])(Ingress).bind(engines, plan.server, *placing)


def of_engines(plan: Plan) -> dict[str, Any]:
    """Serve's options of the deployment of engines.

    A replica's GPUs are one bundle, its actor's own, so they are on one machine and all its ranks see them. No
    placement group is needed for that.

    Raises:
        ValueError: a bad ``autoscaling_config``; the message names the entry.
    """
    options = plan.serve
    return {
        "name": ENGINES,
        "ray_actor_options": {"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        "max_ongoing_requests": options.max_ongoing_requests,
        "max_queued_requests": options.max_queued_requests,
        "request_router_config": _routing(options),
        **_looks_and_ends(options),
        **_count(options),
    }


def of_ingress(plan: Plan) -> dict[str, Any]:
    """Serve's options of the deployment of ingresses."""
    options = plan.serve
    return {
        "name": INGRESS,
        "num_replicas": options.num_ingress_replicas,
        "ray_actor_options": {"num_cpus": options.ingress_num_cpus},
        "max_ongoing_requests": plan.server.max_concurrency,
        **_looks_and_ends(options, EXTRA_SECONDS),
    }


def _looks_and_ends(options: ServeOptions, longer: float = 0.0) -> dict[str, Any]:
    return {
        "health_check_period_s": options.health_check_period_s,
        "health_check_timeout_s": options.health_check_timeout_s,
        "graceful_shutdown_timeout_s": options.graceful_shutdown_timeout_s + longer,
        "graceful_shutdown_wait_loop_s": BETWEEN_LOOKS,
    }


def import_serve() -> Any:
    """Import ``ray.serve``.

    Raises:
        ValueError: Ray Serve is not installed, or too old.
    """
    import_ray(WISH)
    try:
        from ray import serve
        from ray.serve.request_router import RequestRouter
    except ImportError as error:
        raise ValueError(f"{WISH} needs a newer Ray with Serve ({error}): {install('ray', options='-U')}") from error
    if not hasattr(RequestRouter, "on_request_completed"):
        raise ValueError(
            f"{WISH} needs a newer Ray, whose routers learn of a request's end: pip install -U 'ray[serve]'"
        )
    return serve


def _routing(options: ServeOptions) -> dict[str, Any]:
    return {
        "request_router_class": "tritonllm.serve.ray.prefix.PrefixRouter",
        "request_router_kwargs": {
            "balance_epsilon": options.balance_epsilon,
            "balance_min_tokens": options.balance_min_tokens,
        },
    }


def _count(options: ServeOptions) -> dict[str, Any]:
    """How many engines there are, as arguments of Ray Serve's deployment.

    Raises:
        ValueError: a bad ``autoscaling_config``; the message names the entry.
    """
    if options.autoscaling_config is None:
        return {"num_replicas": options.num_replicas}
    if options.num_replicas != ServeOptions.num_replicas:
        raise ValueError("num_replicas and autoscaling_config exclude each other: give one")
    return {"autoscaling_config": _autoscaling(options.autoscaling_config, options.max_ongoing_requests)}


def _autoscaling(given: Mapping[str, Any], most: int) -> Any:
    from pydantic import ValidationError
    from ray.serve.config import AutoscalingConfig

    known = AutoscalingConfig.model_fields
    for name in given:
        if name not in known:
            raise ValueError(f"autoscaling_config: unknown entry {name!r}: there are {', '.join(known)}")
    try:
        return AutoscalingConfig(**{"target_ongoing_requests": max(1, most // 2), **given})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"autoscaling_config{'.' + where if where else ''}: {message}") from error
