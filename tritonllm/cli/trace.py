"""``tritonllm trace FILE``: what a trace says, in numbers or as a picture."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PICTURES = (".svg", ".png", ".pdf")
DESCRIPTION = """\
Summarize a trace that `tritonllm generate --trace FILE` or a server's /start_profile has written: its requests, its
steps, when the device was idle and why, the slowest steps, and kernels. https://ui.perfetto.dev draws the same file."""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "trace",
        help="summarize a trace",
        description=DESCRIPTION,
        usage="tritonllm trace FILE [--json] [--top N] [--plot FILE [--from MS] [--to MS]]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
    parser.add_argument("file", type=Path, metavar="FILE", help="the trace; it may still be written, or break off")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object, see docs/teach.md")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="slowest steps, kernels (default: 10)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a timeline instead: .svg, .png or .pdf")
    parser.add_argument("--from", type=float, dest="begin", metavar="MS", help="where the timeline begins")
    parser.add_argument("--to", type=float, dest="end", metavar="MS", help="where it ends")
    return parser


def check(args: argparse.Namespace) -> None:
    """Check the options.

    Raises:
        ValueError: a bad value.
    """
    if args.top < 1:
        raise ValueError(f"--top must be at least 1, got {args.top}")
    if args.plot is None and (args.begin is not None or args.end is not None):
        raise ValueError("--from and --to need --plot")
    if args.plot is not None and args.json:
        raise ValueError("--plot draws instead of printing: leave out --json")
    if args.plot is not None and args.plot.suffix not in PICTURES:
        raise ValueError(f"--plot must name a file that ends with {', '.join(PICTURES)}, got {args.plot}")
    if args.begin is not None and args.end is not None and not args.begin < args.end:
        raise ValueError(f"--from must be less than --to, got {args.begin:g} and {args.end:g}")


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        check(args)
    except ValueError as error:
        args.wrong_usage(str(error))
    from tritonllm.telemetry.trace_reader import read_trace
    from tritonllm.telemetry.trace_summary import summarize

    data = read_trace(args.file)
    if args.plot is not None:
        from tritonllm.telemetry.trace_plot import plot

        plot(data, args.plot, args.begin, args.end)
        print(f"wrote {args.plot}")
        return 0
    summary = summarize(data, args.top)
    if args.json:
        print(json.dumps(summary, allow_nan=False))
        return 0
    from tritonllm.telemetry.trace_text import show

    show(summary)
    return 0
