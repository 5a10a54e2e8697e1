"""``tritonllm route``: one address in front of several servers."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritonllm import env
from tritonllm.cli.options import LIMITS, add_options, given
from tritonllm.route.config import POLICIES, BackendConfig, RouterConfig, default_keys, read_config
from tritonllm.system.extras import install

DESCRIPTION = """\
Route requests to servers that speak OpenAI's API. It listens on this machine only unless you give --host. SIGTERM or
Ctrl-C ends it when the running requests are done, at the latest after --drain-seconds. docs/routing.md says what
clients see when a backend fails."""
EXAMPLES = """\
examples:
  tritonllm route --backend http://127.0.0.1:8000 --backend http://127.0.0.1:8001
  tritonllm route --config router.toml --host 0.0.0.0"""
EXTRA = f"tritonllm route needs more packages ({{}}): {install('route')}"
# Option -> keywords of add_argument; the name is that of the field of RouterConfig.
OPTIONS: dict[str, dict[str, Any]] = {
    "host": {"metavar": "NAME", "help": "address to listen on (default: 127.0.0.1, this machine only)"},
    "port": {"type": int, "metavar": "N", "help": "default: 8080; 0 takes a free one"},
    "ssl-certfile": {"metavar": "FILE", "help": "certificate for TLS"},
    "ssl-keyfile": {"metavar": "FILE", "help": "its key"},
    "policy": {"choices": POLICIES, "help": "how a backend is chosen (default: prefix)"},
    "sticky-chars": {
        "type": int,
        "metavar": "N",
        "help": "characters of a prompt's beginning that place it (default: 1024)",
    },
    "sticky-header": {"metavar": "NAME", "help": "a header that places a request instead (default: x-session-id)"},
    "balance-epsilon": {
        "type": float,
        "metavar": "X",
        "help": "how far a backend's load may be above the mean before its prefixes go elsewhere (default: 0.25)",
    },
    "balance-min-tokens": {
        "type": int,
        "metavar": "N",
        "help": "tokens in flight up to which a backend never counts as too full (default: 8192)",
    },
    "prefill-min-tokens": {
        "type": int,
        "metavar": "N",
        "help": "tokens of a prompt from which on a backend with the role prefill computes it (default: 256)",
    },
    "max-retries": {"type": int, "metavar": "N", "help": "backends to ask after the first one failed (default: 2)"},
    "retry-ratio": {"type": float, "metavar": "X", "help": "most retries, as a part of the requests (default: 0.2)"},
    "retry-reserve": {"type": int, "metavar": "N", "help": "retries beyond that (default: 10)"},
    "connect-timeout": {"type": float, "metavar": "S", "help": "seconds for a connection (default: 5)"},
    "first-byte-timeout": {"type": float, "metavar": "S", "help": "until an answer begins (default: 600)"},
    "between-bytes-timeout": {"type": float, "metavar": "S", "help": "that an answer may stand still (default: 120)"},
    "host-timeout": {
        "type": float,
        "metavar": "S",
        "help": "that a backend's host may give no sign of life (default: 30)",
    },
    "health-interval": {"type": float, "metavar": "S", "help": "seconds between two probes (default: 5)"},
    "health-timeout": {"type": float, "metavar": "S", "help": "that a probe may take (default: 2)"},
    "unhealthy-threshold": {"type": int, "metavar": "N", "help": "failed probes until a backend is down (default: 2)"},
    "healthy-threshold": {"type": int, "metavar": "N", "help": "good probes until it is used again (default: 1)"},
    "failure-threshold": {
        "type": int,
        "metavar": "N",
        "help": "failed requests in a row that open a backend's circuit (default: 5)",
    },
    "backoff-seconds": {"type": float, "metavar": "S", "help": "how long it is open at first (default: 1)"},
    "max-backoff-seconds": {"type": float, "metavar": "S", "help": "and at most (default: 60)"},
    **LIMITS,
    "max-held-bytes": {
        "type": int,
        "metavar": "N",
        "help": "longest JSON answer that is held until it is whole (default: 64 MiB)",
    },
    "drain-seconds": {
        "type": float,
        "metavar": "S",
        "help": "how long running requests may take after SIGTERM (default: 30)",
    },
}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "route",
        help="route requests to several servers",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="tritonllm route (--backend URL ... | --config FILE) [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--backend", action="append", metavar="URL", help="a server, without /v1; repeatable")
    where.add_argument("--config", type=Path, metavar="FILE", help="backends and options as TOML, read again on change")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="what clients must send; repeatable (default: TRITONLLM_API_KEY, which other users of the machine cannot "
        "see in the list of processes; without one the backends check keys)",
    )
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    add_options(parser, OPTIONS)
    return parser


def check(args: argparse.Namespace) -> tuple[RouterConfig, dict[str, Any]]:
    """The configuration that the arguments ask for, and those of its options that win over a file's.

    Raises:
        ValueError: a bad value, or the file cannot be read.
    """
    options = given(args, OPTIONS)
    if args.api_key is not None:
        options["api_keys"] = tuple(args.api_key)
    if args.config is not None:
        try:
            return read_config(args.config, options), options
        except OSError as error:
            raise ValueError(f"--config {args.config}: {error.strerror}: name a TOML file") from error
    backends = tuple(BackendConfig(url=url, api_key=env.BACKEND_API_KEY) for url in args.backend)
    return RouterConfig(backends=backends, **{"api_keys": default_keys(), **options}), options


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        config, options = check(args)
    except ValueError as error:
        args.wrong_usage(str(error))
    try:
        from tritonllm.route.run import route
    except ImportError as error:
        raise ImportError(EXTRA.format(error)) from error
    package = logging.getLogger("tritonllm")
    if not args.quiet:  # a router tells where it listens, and a line for each request
        package.setLevel(min(package.level, logging.INFO))
    return route(config, args.config, options)
