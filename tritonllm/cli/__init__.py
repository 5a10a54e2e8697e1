"""The command ``tritonllm``: ``generate`` text, ``embed`` it, ``chat``, ``complete`` texts, ``serve`` a model over
HTTP, ``route`` requests to several servers, look at a server (``dashboard``), answer a ``batch`` of requests, measure
speed (``bench``), build kernels ahead (``precompile``), write a model with narrow weights (``quantize``), place experts
on ranks (``rebalance-experts``), show what there is (``info``) and what a ``trace`` says, teach how it works
(``tutorial``).

Results go to stdout, everything else to stderr. Exit status: 0 all done; 1 something failed (one line on stderr;
``--debug`` adds the traceback); 2 wrong usage; 130 interrupted. torch is imported after the arguments are known to be
good, so a mistake and ``--help`` answer at once.
"""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

try:
    from tritonllm import env as env  # reads the variables; a bad one is no traceback
except ValueError as error:
    sys.exit(f"error: {error}")
from tritonllm.cli import (
    batch,
    bench,
    chat,
    dashboard,
    embed,
    generate,
    info,
    precompile,
    quantize,
    rebalance_experts,
    route,
    serve,
    trace,
    tutorial,
)
from tritonllm.cli.config_file import expanded
from tritonllm.cli.options import SEVERAL
from tritonllm.system.log_text import OTHERS, OneLineFormatter
from tritonllm.system.starting import no_searches
from tritonllm.version import __version__

FAILED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141  # argparse exits with 2; the last two are 128 + the signal's number


class Parser(argparse.ArgumentParser):
    """Says of an option that a command lacks which ones have it."""

    def error(self, message: str) -> NoReturn:
        words = {word.partition("=")[0] for word in message.split()} if "unrecognized" in message else set()
        for name, keywords in SEVERAL.items():
            if words & {f"--{name}", keywords["also"]}:
                message += f": serve and batch have --{name}, and LLM has {name.replace('-', '_')}"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tritonllm", description="LLM inference on Triton kernels.")
    parser.add_argument("--version", action="version", version=f"tritonllm {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    alone = [command.add_parser(commands) for command in (generate, embed, serve, batch, info, precompile, quantize)]
    of_models = [*alone, *chat.add_parsers(commands), *bench.add_parsers(commands)]
    for added in of_models:
        added.add_argument(
            "model",
            nargs="?",
            metavar="MODEL",
            help="folder, GGUF file or hub id (default: the small model in this package)",
        )
    alone = [command.add_parser(commands) for command in (dashboard, trace, route, rebalance_experts)]
    for added in [*of_models, *alone, *tutorial.add_parser(commands)]:
        added.add_argument(
            "-v", "--verbose", action="count", default=0, help="tell on stderr what the engine does; -vv: in detail"
        )
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def default_model() -> str:
    from tritonllm.demo import model_path

    return str(model_path())


def make_llm(model: str, **kwargs: Any) -> Any:
    with no_searches(ours=True):
        from tritonllm.offline.llm import LLM

    return LLM(model, **kwargs)


@contextmanager
def logging_to_stderr(verbosity: int) -> Iterator[None]:
    """Inside the block the package's messages go to stderr: warnings, with 1 information too, with 2 everything. So do
    warnings of the packages that speak HTTP, which would go there as they are."""
    logger, handler = logging.getLogger("tritonllm"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    before = logger.level
    for each in (logger, *map(logging.getLogger, OTHERS)):
        each.addHandler(handler)
    logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))
    try:
        yield
    finally:
        for each in (logger, *map(logging.getLogger, OTHERS)):
            each.removeHandler(handler)
        logger.setLevel(before)


def check(args: argparse.Namespace) -> None:
    """What commands need: somewhere for their results, and most of them a model."""
    if sys.stdout is None:  # `>&-`
        args.wrong_usage("stdout is closed, and results go there")
    if not hasattr(args, "model"):  # route loads none
        return
    if args.model is None:
        args.model = getattr(args, "named_model", None)
    if args.model is None:  # a server has its own
        elsewhere = getattr(args, "url", None) is not None or getattr(args, "names_of_servers", False)
        args.model = None if elsewhere else default_model()
    elif not args.model.strip():
        args.wrong_usage("MODEL is empty: name a folder or a hub id, or leave it out")


def drop_unwritable() -> None:
    """Throw away what can no longer be written, or Python's last flush would fail with a traceback of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(argv: Sequence[str] | None = None, *, make_llm: Callable[..., Any] = make_llm) -> int:
    """Run a command line and return its exit status.

    Args:
        argv: the arguments, by default the process's.
        make_llm: ``make_llm(model, **options)`` builds the :class:`LLM`.

    Raises:
        SystemExit: wrong usage, ``--help`` and ``--version``, as argparse does it.
    """
    if sys.stderr is None:  # `2>&-`: or errors would go where results go
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    args = None
    try:
        try:
            words = list(sys.argv[1:] if argv is None else argv)
            parser = build_parser()
            try:
                args = parser.parse_args(expanded(words) if words[:1] == ["serve"] else words)
            except (ValueError, OSError) as error:  # of the file that --config names
                parser.error(str(error))
            check(args)
            with logging_to_stderr(args.verbose):
                return args.run(args, make_llm)
        finally:  # an error is seen here and not at Python's own last flush; `--help` has a reader, too
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has seen enough
        drop_unwritable()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        drop_unwritable()
        if args is not None and args.debug:
            traceback.print_exc()
        print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return FAILED
