"""``tritonllm dashboard``: what a server does, on one screen; and ``--dashboard`` of ``tritonllm generate``."""

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from tritonllm import env
from tritonllm.system.extras import install
from tritonllm.teach.viewer import Viewer

URL = "http://127.0.0.1:8000"
MISSING = f"the dashboard needs textual: {install('teach')}"
NO_TERMINAL = "the dashboard needs a terminal, and stdin or stderr is none: give prompts by --prompt or --prompt-file"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "dashboard",
        help="show what a server does",
        description="Show what a running server does: requests, tokens/s, the KV pool, steps and the queue. q quits.",
        usage="tritonllm dashboard [--url URL] [--api-key KEY]",
    )
    parser.set_defaults(run=run, wrong_usage=parser.error, model=None)
    parser.add_argument("--url", default=URL, metavar="URL", help=f"of a server (default: {URL})")
    parser.add_argument("--api-key", metavar="KEY", help="default: TRITONLLM_API_KEY")
    parser.add_argument(
        "--every", type=float, default=0.5, metavar="S", help="seconds between two looks (default: 0.5)"
    )
    parser.add_argument("--replica", type=int, default=0, metavar="N", help="of several engines behind it (default: 0)")
    return parser


def check() -> None:
    """Check that the dashboard can be shown.

    Raises:
        ValueError: a package or a terminal is missing.
    """
    if find_spec("textual") is None:
        raise ValueError(MISSING)
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr is not None and sys.stderr.isatty()):
        raise ValueError(NO_TERMINAL)


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    if not args.url.startswith(("http://", "https://")):
        args.wrong_usage(f"--url must begin with http:// or https://, got {args.url!r}")
    if not 0.05 <= args.every <= 3600:
        args.wrong_usage(f"--every must be from 0.05 to 3600 seconds, got {args.every:g}")
    try:
        check()
    except ValueError as error:
        args.wrong_usage(str(error))
    from tritonllm.teach.dashboard.app import Dashboard
    from tritonllm.teach.dashboard.source_server import ServerSource

    with ServerSource(args.url, args.api_key or env.API_KEY, args.every, args.replica) as source:
        app = Dashboard(source, min(args.every, 0.5))
        app.run(mouse=False)
    return app.return_code or 0


def add_options(group: Any) -> None:
    """Add the options of the dashboard to ``tritonllm generate``."""
    group.add_argument(
        "--dashboard", action="store_true", help="show requests, tokens/s, the KV pool and steps on one screen"
    )
    group.add_argument(
        "--dashboard-speed",
        type=float,
        metavar="STEPS",
        help="at most so many steps a second (default: as fast as the engine is); + and - change it",
    )


def make_viewer(args: argparse.Namespace) -> Viewer | None:
    """The viewer of ``--dashboard``; ``None`` without that option.

    Raises:
        ValueError: a bad value, or a package or a terminal is missing.
    """
    speed = args.dashboard_speed
    if not args.dashboard:
        if speed is not None:
            raise ValueError("--dashboard-speed needs --dashboard")
        return None
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"--dashboard-speed must be a number of steps a second above 0, got {speed:g}")
    check()
    from tritonllm.teach.dashboard.source_engine import DashboardViewer

    return DashboardViewer(speed or 0.0)
