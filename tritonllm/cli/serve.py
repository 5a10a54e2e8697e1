"""``tritonllm serve``: an OpenAI-compatible server."""

import argparse
import dataclasses
import json
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tritonllm import env
from tritonllm.cli.options import ENGINE, LIMITS, SEVERAL, add_options, given
from tritonllm.cli.pooling_options import POOLING
from tritonllm.config.checks import json_mapping
from tritonllm.config.engine import POLICIES, EngineConfig
from tritonllm.system.extras import install
from tritonllm.system.starting import no_searches, stopped_by_sigterm

DESCRIPTION = """\
Serve a model over HTTP with OpenAI's API. It listens on this machine only unless you give --host. SIGTERM or Ctrl-C
ends it when the running requests are done, at the latest after --drain-seconds."""
EXAMPLES = """\
examples:
  tritonllm serve
  tritonllm serve Qwen/Qwen3-0.6B --served-model-name qwen --port 8080
  TRITONLLM_API_KEY=secret tritonllm serve ./my-model --host 0.0.0.0"""
EXTRA = f"tritonllm serve needs more packages ({{}}): {install('serve')}"
# Option -> keywords of add_argument; the name is that of the field of ServerConfig.
SERVER: dict[str, dict[str, Any]] = {
    "host": {"metavar": "NAME", "help": "address to listen on (default: 127.0.0.1, this machine only)"},
    "port": {"type": int, "metavar": "N", "help": "default: 8000; 0 takes a free one"},
    "uds": {"metavar": "PATH", "help": "listen on a Unix socket instead"},
    "root-path": {"metavar": "PATH", "help": "where what stands before the server offers its paths, as /llm"},
    "ssl-certfile": {"metavar": "FILE", "help": "certificate for TLS"},
    "ssl-keyfile": {"metavar": "FILE", "help": "its key"},
    "tool-call-parser": {
        "metavar": "NAME",
        "help": "how calls of tools are read, as hermes or qwen3_coder (docs/serving.md has all), none, or auto: by "
        "the chat template, or do not start (default: by the chat template where that is clear)",
    },
    "tool-parser-plugin": {"metavar": "FILE", "help": "Python file with parsers of your own, see docs/serving.md"},
    "enable-auto-tool-choice": {"action": "store_true", "help": "refuse to start if nothing can read calls of tools"},
    "reasoning-parser": {
        "metavar": "NAME",
        "help": "how thoughts are read, as qwen3 or glm45 (docs/serving.md has all), none, or auto: by the chat "
        "template, or do not start (default: by the chat template where that is clear)",
    },
    "reasoning-parser-plugin": {"metavar": "FILE", "help": "Python file with parsers of your own, see docs/serving.md"},
    "trust-request-chat-template": {
        "action": "store_true",
        "help": "a request may bring a chat template, which is a program",
    },
    "strict-fields": {
        "action": "store_true",
        "help": "refuse requests with fields that change nothing (default: ignore, log and count them)",
    },
    "api-server-count": {
        "type": int,
        "metavar": "N",
        "help": "processes that speak HTTP, in front of one engine (default: 1)",
    },
    "server-dev-mode": {
        "action": "store_true",
        "help": "clients may use /sleep, /wake_up, /reload_weights, /reset_prefix_cache, /expert_load, /server_info",
    },
    "enable-tokenizer-info-endpoint": {
        "action": "store_true",
        "help": "clients may read the tokenizer's configuration and the chat template (/tokenizer_info)",
    },
    **LIMITS,
    "drain-seconds": {
        "type": float,
        "metavar": "S",
        "help": "how long running requests may take after SIGTERM (default: 30)",
    },
    "otlp-traces-endpoint": {"metavar": "URL", "help": "OpenTelemetry collector that gets a span for each request"},
    "request-timeout": {"type": float, "metavar": "S", "help": "how long a request may take (default: no limit)"},
    "restart": {
        "type": int,
        "metavar": "N",
        "help": "start an engine that has died anew, at most N times within ten minutes (default: 0; the server ends)",
    },
}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "serve",
        help="serve a model with OpenAI's API",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="tritonllm serve [MODEL] [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
    group = parser.add_argument_group("server")
    group.add_argument("--model", dest="named_model", help=argparse.SUPPRESS)  # of the file; and scripts of others
    group.add_argument(
        "--config", metavar="FILE", help="options in YAML, as `port: 8080`; those of the command line count more"
    )
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the model in requests (default: MODEL)"
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="what clients must send; repeatable (default: TRITONLLM_API_KEY, which other users of the machine cannot "
        "see in the list of processes)",
    )
    group.add_argument(
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        help="whose pages in browsers may ask, as https://chat.example, or '*' (default: nobody's)",
    )
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the tokenizer's")
    group.add_argument(
        "--default-chat-template-kwargs",
        metavar="JSON",
        help='variables of the template for requests that do not bring these: {"enable_thinking": false}',
    )
    group.add_argument(
        "--max-queue", type=int, default=1024, metavar="N", help="most sequences that wait (default: 1024); then: 429"
    )
    group.add_argument(
        "--profiler-config",
        metavar="JSON",
        help='clients may use /start_profile and /stop_profile: {"torch_profiler_dir": "FOLDER"}, see docs/serving.md',
    )
    group.add_argument("--quiet", action="store_true", help="log warnings only")
    add_options(group, SERVER)
    group = parser.add_argument_group("engine")
    add_options(group, ENGINE)
    add_options(
        group,
        {
            "scheduling-policy": {"choices": POLICIES, "dest": "policy", "help": "fcfs (default), or priority"},
            "scheduler-cls": {
                "metavar": "MODULE.NAME",
                "help": "another order of requests, as a class of your own, see docs/engine.md",
            },
            "generation-config": {
                "metavar": "NAME",
                "help": "where sampling defaults come from: auto (default: the model), vllm (none), or a folder",
            },
            "override-generation-config": {
                "metavar": "JSON",
                "help": 'counts more than the model\'s generation_config.json: {"temperature": 0.5}',
            },
            "seed": {"type": int, "metavar": "N", "help": "of requests that bring none (default: 0)"},
            **SEVERAL,
            "enable-sleep-mode": {"action": "store_true", "help": "the engine can sleep, see docs/serving.md"},
            "skip-tokenizer-init": {"action": "store_true", "help": "no tokenizer: token ids in and out, no text"},
            **POOLING,
        },
    )
    return parser


def check(args: argparse.Namespace) -> tuple[EngineConfig, Any]:
    """The two configurations that the arguments ask for.

    Raises:
        ValueError: a bad value.
        OSError: a file cannot be read.
    """
    from tritonllm.serve.api.config import ServerConfig
    from tritonllm.serve.api.template import read_template
    from tritonllm.serve.engines.profiling import ProfilerConfig

    options = given(args, ENGINE)
    more = (
        "policy",
        "scheduler_cls",
        "generation_config",
        "override_generation_config",
        "seed",
        "skip_tokenizer_init",
        "enable_sleep_mode",
        "data_parallel_size",
        *(name.replace("-", "_") for name in POOLING),
    )
    options |= {name: getattr(args, name) for name in more if hasattr(args, name)}
    engine = EngineConfig.from_kwargs(model=args.model, **options)
    if args.max_queue < 0:
        raise ValueError(f"--max-queue must be at least 0, got {args.max_queue}")
    keys = args.api_key if args.api_key is not None else [env.API_KEY] if env.API_KEY else []
    template = None if args.chat_template is None else read_template(args.chat_template)
    profiler = None if args.profiler_config is None else ProfilerConfig.of(args.profiler_config)
    if profiler is not None:
        profiler.check_folder()
    name, variables = "--default-chat-template-kwargs", args.default_chat_template_kwargs
    config = ServerConfig(
        model_names=tuple(args.served_model_name or [args.model]),
        api_keys=tuple(keys),
        allowed_origins=origins_of(args.allowed_origins or ()),
        chat_template=template,
        default_chat_template_kwargs={} if variables is None else json_mapping(name, variables),
        profiler_config=profiler,
    )
    config = dataclasses.replace(config, **given(args, SERVER))
    if config.api_server_count > 1 and engine.parallel.data_parallel_size > 1:
        raise ValueError(
            "--api-server-count: several processes speak HTTP before one engine only: leave one of it and "
            "--data-parallel-size at 1"
        )
    if config.ssl_certfile is not None and config.ssl_keyfile is not None:
        check_tls(config.ssl_certfile, config.ssl_keyfile)
    return engine, config


def origins_of(given: Sequence[str]) -> tuple[str, ...]:
    """Origins one by one, or as a list in JSON, which vLLM takes.

    Raises:
        ValueError: something that begins like such a list is none.
    """
    if len(given) != 1 or not given[0].startswith("["):
        return tuple(given)
    try:
        origins = json.loads(given[0])
    except json.JSONDecodeError as error:
        raise ValueError(f"--allowed-origins: {given[0]!r} is no JSON: {error}") from error
    if not all(isinstance(origin, str) for origin in origins):
        raise ValueError(f"--allowed-origins must be texts, got {given[0]}")
    return tuple(origins)


def check_tls(certfile: str, keyfile: str) -> None:
    """Check the files of a certificate and its key.

    Raises:
        OSError: a file cannot be read, or they are no certificate and its key.
    """
    for option, name in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            Path(name).read_bytes()
        except OSError as error:
            raise OSError(f"{option}: cannot read {name}: {error.strerror}") from error

    def no_password() -> str:
        raise OSError(f"--ssl-keyfile: {keyfile} is encrypted: give one without a password")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, no_password)
    except ssl.SSLError as error:
        why = error.reason or str(error)
        raise OSError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} are no certificate and its key, in PEM: {why}"
        ) from error


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    with stopped_by_sigterm("stopped before the model was loaded") as go_on:
        return _run(args, go_on)


def _run(args: argparse.Namespace, go_on: Callable[[], None]) -> int:
    try:
        engine, config = check(args)
    except ValueError as error:
        args.wrong_usage(str(error))
    try:
        with no_searches(ours=True):
            from tritonllm.serve.engines.child_process import end_without_threads
            from tritonllm.serve.processes.run import serve
    except ImportError as error:
        raise ImportError(EXTRA.format(error)) from error
    if config.otlp_traces_endpoint is not None:
        from tritonllm.serve.api.tracing import require_packages

        require_packages()
    package = logging.getLogger("tritonllm")
    if not args.quiet:  # a server tells where it listens, and a line for each request
        package.setLevel(min(package.level, logging.INFO))
    go_on()
    return serve(engine, config, max_queue=args.max_queue, log_level=package.level, end=end_without_threads)
