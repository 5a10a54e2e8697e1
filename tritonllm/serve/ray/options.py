"""What the application of Ray Serve is told (:mod:`tritonllm.serve.ray.ray_serve`): one dict, as its command line and
YAML give it, becomes the configurations of engine, server and deployment."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tritonllm import env
from tritonllm.config.checks import at_least
from tritonllm.config.engine import PARTS, EngineConfig
from tritonllm.engine.start.arg_utils import EngineArgs
from tritonllm.route.config import RouterConfig
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.api.template import read_template
from tritonllm.serve.engines.async_llm import MAX_QUEUE

# Of ServerConfig, what means the same here.
SERVER = (
    "tool_call_parser",
    "reasoning_parser",
    "tool_parser_plugin",
    "reasoning_parser_plugin",
    "enable_auto_tool_choice",
    "trust_request_chat_template",
    "strict_fields",
    "max_body_bytes",
    "max_concurrency",
    "otlp_traces_endpoint",
    "request_timeout",
)
# Options of ``tritonllm serve`` and engine arguments that Ray Serve has its own for, and what to do instead.
ELSEWHERE = {
    "host": "it is an option of Serve's proxies (http_options)",
    "port": "it is an option of Serve's proxies (http_options)",
    "uds": "Serve's proxies listen on ports",
    **dict.fromkeys(("max_header_bytes", "max_header_count", "header_timeout"), "Serve's proxies read the headers"),
    "ssl_certfile": "it is an option of Serve's proxies (http_options)",
    "ssl_keyfile": "it is an option of Serve's proxies (http_options)",
    "api_server_count": "set num_ingress_replicas instead",
    "restart": "Serve starts a replica anew whose engine has died",
    "drain_seconds": "set graceful_shutdown_timeout_s instead",
    "server_dev_mode": "what it allows would reach one replica of several",
    "allowed_origins": "let what stands before Serve's proxies answer browsers",
    "profiler_config": "what it allows would reach one replica of several",
    "data_parallel_size": "set num_replicas or autoscaling_config instead",
}
TEXTS = ("served_model_name", "api_key")  # one, or a list


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How Ray Serve runs the engines. Names are Serve's where it has one.

    Args:
        num_replicas: how many engines there are, each with the whole model.
        autoscaling_config: how many there are by load (``min_replicas``, ``max_replicas``, ``target_ongoing_requests``
            and others of Serve's), in the place of ``num_replicas``. The target is half of ``max_ongoing_requests``
            unless it says another.
        max_ongoing_requests: how many requests a replica answers at once; others go to the next replica, or wait.
        max_queued_requests: how many requests may wait at an ingress when all replicas are full; one more is refused
            (429).
        health_check_period_s, health_check_timeout_s: the seconds between two looks at a replica, and for one look.
        graceful_shutdown_timeout_s: how long running requests may take when a replica has to end.
        num_ingress_replicas: how many processes read requests and choose a replica for each.
        ingress_num_cpus: how many CPUs Ray keeps for each of them.
        num_cpus: how many CPUs Ray keeps for each engine; by default one for each of its ranks.
        sticky_header, sticky_chars, balance_epsilon, balance_min_tokens: as of ``tritonllm route``.
        max_retries: how many other replicas a request may be sent to after the first one failed.

    Raises:
        ValueError: a bad value; the message names the argument.
    """

    num_replicas: int = 1
    autoscaling_config: Mapping[str, Any] | None = None
    max_ongoing_requests: int = 256
    max_queued_requests: int = MAX_QUEUE
    health_check_period_s: float = 5.0
    health_check_timeout_s: float = 30.0
    graceful_shutdown_timeout_s: float = 30.0
    num_ingress_replicas: int = 1
    ingress_num_cpus: float = 1.0
    num_cpus: float | None = None
    sticky_header: str = RouterConfig.sticky_header
    sticky_chars: int = RouterConfig.sticky_chars
    balance_epsilon: float = RouterConfig.balance_epsilon
    balance_min_tokens: int = RouterConfig.balance_min_tokens
    max_retries: int = RouterConfig.max_retries

    def __post_init__(self) -> None:
        for name in ("num_replicas", "max_ongoing_requests", "num_ingress_replicas", "sticky_chars"):
            at_least(name, getattr(self, name), 1)
        for name in ("max_queued_requests", "balance_min_tokens", "max_retries"):
            at_least(name, getattr(self, name), 0)
        for name in ("health_check_period_s", "health_check_timeout_s"):
            _number(name, getattr(self, name))
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)!r}")
        for name in ("graceful_shutdown_timeout_s", "ingress_num_cpus", "num_cpus", "balance_epsilon"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name))
        if not isinstance(self.sticky_header, str):
            raise ValueError(f"sticky_header must be the name of a header, got {self.sticky_header!r}")
        if self.autoscaling_config is not None and not isinstance(self.autoscaling_config, Mapping):
            raise ValueError(
                'autoscaling_config must be an object, as {"min_replicas": 1, "max_replicas": 4}, got '
                f"{self.autoscaling_config!r}"
            )


def _number(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")


@dataclass(frozen=True)
class Plan:
    """All that :func:`read_plan` reads.

    Args:
        engine: the configuration of each replica's engine.
        server: the configuration of the ingress, which checks keys and sizes.
        serve: how many replicas there are, and where.
        max_queue: how many sequences may wait for a seat in an engine.
    """

    engine: EngineConfig
    server: ServerConfig
    serve: ServeOptions
    max_queue: int

    @property
    def gpus(self) -> int:
        """How many GPUs each engine takes."""
        return 0 if self.engine.model.device == "cpu" else self.engine.parallel.world_size

    @property
    def cpus(self) -> float:
        """How many CPUs each engine takes."""
        given = self.serve.num_cpus
        return float(self.engine.parallel.world_size if given is None else given)


def read_plan(args: Mapping[str, Any]) -> Plan:
    """Sort the arguments of an application: those of the engine (``LLM``'s), of the server (``tritonllm serve``'s, with
    underscores), and of :class:`ServeOptions`.

    A value in text (a command line has no other) is read as JSON where the argument is no text: ``2``, ``true``.

    Raises:
        ValueError: an unknown argument, or a bad value; the message names it.
        OSError: the file of ``chat_template`` cannot be read.
    """
    for name in args:
        if name in ELSEWHERE and not (name == "data_parallel_size" and str(args[name]) == "1"):
            raise ValueError(f"{name} is no argument here: {ELSEWHERE[name]}")
    hints = _hints()
    _check_names(args, hints)
    given = {name: _read(name, value, hints.get(name)) for name, value in args.items() if value is not None}
    names = _texts("served_model_name", given.pop("served_model_name", None))
    keys = _texts("api_key", given.pop("api_key", None))
    template = given.pop("chat_template", None)
    max_queue = given.pop("max_queue", MAX_QUEUE)
    at_least("max_queue", max_queue, 0)
    serve = ServeOptions(**{field.name: given.pop(field.name) for field in fields(ServeOptions) if field.name in given})
    server = {name: given.pop(name) for name in SERVER if name in given}
    engine = _engine(given)
    config = ServerConfig(
        model_names=names or (engine.model.model,),
        api_keys=keys or ((env.API_KEY,) if env.API_KEY else ()),
        chat_template=None if template is None else read_template(template),
        drain_seconds=serve.graceful_shutdown_timeout_s,
        **server,
    )
    return Plan(engine, config, serve, max_queue)


def _check_names(names: Iterable[str], known: Mapping[str, Any]) -> None:
    """Check arguments for names that are a misspelled name of an option of the server or of Ray Serve.

    Raises:
        ValueError: a misspelled name of an argument that is no engine's; the engine looks after its own.
    """
    own = (*SERVER, *TEXTS, "chat_template", "max_queue", *(field.name for field in fields(ServeOptions)))
    for name in names:
        if name not in known and name not in own and (near := get_close_matches(name, own, n=1, cutoff=0.8)):
            raise ValueError(f"unknown argument {name!r}: did you mean {near[0]}?")


def _engine(given: dict[str, Any]) -> EngineConfig:
    """Ray says where a GPU is, and who builds the application may have none: ``auto`` is a GPU."""
    if not given.get("model"):
        raise ValueError("model is missing: name one, as model=Qwen/Qwen3-0.6B")
    engine = EngineConfig.from_kwargs(**given)
    if engine.parallel.distributed_executor_backend in ("ray", "external_launcher"):
        raise ValueError(
            f"distributed_executor_backend={engine.parallel.distributed_executor_backend!r}: a replica's ranks are on "
            "one machine and its own processes: leave it out"
        )
    if engine.model.device == "auto":
        return replace(engine, model=replace(engine.model, device="cuda"))
    if engine.model.device not in ("cpu", "cuda"):
        raise ValueError(f"device={engine.model.device!r}: Ray chooses the GPU: leave it out, or take 'cpu'")
    return engine


def _hints() -> dict[str, Any]:
    hints: dict[str, Any] = {"max_queue": int, "chat_template": str}
    for kind in (*PARTS.values(), EngineConfig, EngineArgs, ServerConfig, ServeOptions):
        hints |= get_type_hints(kind)
    return hints


def _read(name: str, value: Any, hint: Any) -> Any:
    """The value that a text stands for, by the option's type; other values are returned as they are."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not isinstance(value, str) or hint is None or str in kinds or Any in kinds or name in TEXTS:
        return value
    try:
        return json.loads(value.lower() if value in ("True", "False", "None") else value)
    except ValueError:
        expected = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not NoneType)
        raise ValueError(f"{name} must be of type {expected}, got {value!r}") from None


def _texts(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(values, list | tuple) or not all(isinstance(each, str) and each for each in values):
        raise ValueError(f"{name} must be text or a list of texts, got {value!r}")
    return tuple(values)
