"""``tritonllm bench``: how fast a model runs here. Options and results have vLLM's names where it has them too.

Prompts are random token ids and outputs have exactly the length that is asked for, so text, tokenizer and stop
conditions play no part.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritonllm.cli import bench_serve
from tritonllm.cli.bench_files import check_file, write_report
from tritonllm.cli.bench_runs import KINDS, Bench
from tritonllm.cli.options import ENGINE, add_options, given
from tritonllm.config.engine import EngineConfig
from tritonllm.version import __version__

# What the commands share with `generate`; a tokenizer is never needed here.
OPTIONS = {name: keywords for name, keywords in ENGINE.items() if name != "tokenizer"}

RESULTS = """\
results:
{results}
  time to first token: from a request's arrival to its first token, waiting included (ms)
  time per output token: from a request's first token to its last, over the tokens after the first (ms)"""
DESCRIPTIONS = {
    "throughput": "All requests at once: how many tokens a second when the engine is full.",
    "latency": "A batch of equal requests, again and again: how long one user waits when the engine is almost empty.",
    "prefix": "Requests that begin alike, first when nothing of them is known and then when the shared part is cached.",
    "prefill": "Long prompts with one token of output: how fast prompts are read.",
}
EXPLAINED = {
    "throughput": "  requests/s, output tokens/s, total tokens/s (prompts too): over the time to the last token",
    "latency": "  latency: from a batch's arrival to its last token (s); mean and percentiles over the iterations",
    "prefix": "  cold, warm: requests/s before and after the shared part was cached\n"
    "  cached: prompt tokens that were not computed again",
    "prefill": "  prompt tokens/s: over the time to the last request's first token",
}
# Option -> type and default, by command; every one is an integer unless it says otherwise.
LENGTHS: dict[str, dict[str, tuple[Any, str]]] = {
    "throughput": {
        "num-prompts": (64, "requests"),
        "input-len": (128, "tokens of a prompt"),
        "output-len": (64, "tokens to generate for each"),
        "random-range-ratio": (0.0, "lengths vary evenly by this share up and down, 0 to 1"),
    },
    "latency": {
        "input-len": (32, "tokens of a prompt"),
        "output-len": (64, "tokens to generate for each"),
        "batch-size": (1, "requests at a time"),
        "num-iters-warmup": (1, "iterations before those that count"),
        "num-iters": (5, "iterations that count"),
    },
    "prefix": {
        "num-prompts": (16, "requests"),
        "prefix-len": (512, "tokens that all prompts begin with"),
        "input-len": (64, "tokens of a prompt after these"),
        "output-len": (16, "tokens to generate for each"),
        "repeat-count": (1, "runs with the shared part cached"),
    },
    "prefill": {
        "num-prompts": (8, "requests"),
        "input-len": (1024, "tokens of a prompt"),
    },
}


def add_parsers(commands: Any) -> list[argparse.ArgumentParser]:
    """``bench`` and its commands; returns those, which take a model."""
    bench = commands.add_parser(
        "bench",
        help="measure speed: throughput, latency, prefix cache, prefill, a server",
        description="Measure how fast a model runs here. `tritonllm bench throughput --help` explains the numbers.",
    )
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    return [*(_add_parser(kinds, kind) for kind in DESCRIPTIONS), bench_serve.add_parser(kinds)]


def _add_parser(kinds: Any, kind: str) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        kind,
        help=DESCRIPTIONS[kind],
        description=f"{DESCRIPTIONS[kind]}\nPrompts are random tokens; defaults are small, for a first try.",
        epilog=RESULTS.format(results=EXPLAINED[kind]),
        usage=f"tritonllm bench {kind} [MODEL] [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
    group = parser.add_argument_group("requests")
    for name, (default, what) in LENGTHS[kind].items():
        letter = "N" if isinstance(default, int) else "X"
        group.add_argument(
            f"--{name}", type=type(default), default=default, metavar=letter, help=f"{what} (%(default)s)"
        )
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: the most likely token (0.0)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and lengths (0)")
    add_options(parser.add_argument_group("engine"), OPTIONS)
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the results there too, see docs/cli.md")
    return parser


def check(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options, after everything that can be checked without a model.

    Raises:
        ValueError: a value out of range, options that do not go together, or a file that cannot be written.
    """
    for name, (default, _) in LENGTHS[args.kind].items():
        value = getattr(args, name.replace("-", "_"))
        if isinstance(default, float):
            if not 0 <= value <= 1:
                raise ValueError(f"--{name} must be from 0 to 1, got {value}")
        elif value < (0 if name in ("num-iters-warmup", "prefix-len") else 1):
            raise ValueError(
                f"--{name} must be at least {0 if 'warmup' in name or 'prefix' in name else 1}, got {value}"
            )
    if not 0 <= args.temperature < float("inf"):
        raise ValueError(f"--temperature must be at least 0, got {args.temperature}")
    options = given(args, OPTIONS)
    EngineConfig.from_kwargs(model=args.model, **options)
    check_file("--output-json", args.output_json)
    return options | {"skip_tokenizer_init": True}


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        options = check(args)
    except ValueError as error:
        args.wrong_usage(str(error))
    from tritonllm.models import checkpoint
    from tritonllm.models.loading import read_spec

    trusted = options.get("trust_remote_code", False)
    form = options.get("load_format", "auto")
    how = {"load_format": form, "download_dir": options.get("download_dir")}
    folder = checkpoint.resolve(args.model, options.pop("revision", None), trust_remote_code=trusted, **how)
    spec = read_spec(folder, trust_remote_code=trusted, model_impl=options.get("model_impl", "auto"))
    begin = time.perf_counter()
    llm = make_llm(str(folder), **options)
    start = time.perf_counter() - begin
    print(f"ready after {start:.1f} s; measuring", file=sys.stderr)
    bench = Bench(llm, spec.vocab_size, args.temperature, args.seed)
    bench.run(bench.batch(1, 8, 4))  # whatever happens only once happens here
    results = KINDS[args.kind](bench, args)
    report = {**about(args, start), **results}
    try:
        write_report(report, args.output_json)
    finally:  # the file comes first, as whoever reads stdout may go away; and the results are shown without it, too
        print(table(report))
    return 0


def about(args: argparse.Namespace, start: float) -> dict[str, Any]:
    """What the results are of."""
    import torch

    arguments = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in LENGTHS[args.kind]}
    arguments |= {"temperature": args.temperature, "seed": args.seed, **given(args, OPTIONS)}
    cpu = getattr(args, "device", "auto") == "cpu" or not torch.cuda.is_available()
    return {
        "benchmark": args.kind,
        "model": args.model,
        "device": "cpu" if cpu else torch.cuda.get_device_name(),
        "versions": {"tritonllm": __version__, "torch": torch.__version__},
        "arguments": arguments,
        "start_seconds": start,
    }


# Key of the results -> its line; what is not here is not in the table.
LINES = {
    "elapsed_time": "seconds",
    "num_requests": "requests",
    "prompt_tokens": "prompt tokens",
    "output_tokens": "output tokens",
    "requests_per_second": "requests/s",
    "prompt_tokens_per_second": "prompt tokens/s",
    "output_tokens_per_second": "output tokens/s",
    "tokens_per_second": "total tokens/s",
    "cached_tokens": "cached prompt tokens",
    "avg_latency": "mean latency, s",
    "percentiles": "latency, s",
    "time_to_first_token_ms": "time to first token, ms",
    "time_per_output_token_ms": "time per output token, ms",
}


def table(report: dict[str, Any]) -> str:
    """The results as plain text, one or two columns of numbers."""
    columns = [report[name] for name in ("cold", "warm")] if "cold" in report else [report]
    lines = [f"bench {report['benchmark']}: {report['model']} on {report['device']}"]
    if len(columns) > 1:
        lines.append(f"{'':<34}{'cold':>14}{'warm':>14}")
    for key, name in LINES.items():
        values: list[Any] = [column[key] for column in columns if column.get(key) is not None]
        if values and isinstance(values[0], dict):
            for percent, label in (("50", "median"), ("99", "99%")):
                parts = [value.get("percentiles", value)[percent] for value in values]
                lines.append(f"{f'{name}, {label}':<34}" + "".join(f"{number(part):>14}" for part in parts))
        elif values:
            lines.append(f"{name:<34}" + "".join(f"{number(value):>14}" for value in values))
    return "\n".join(lines)


def number(value: float) -> str:
    """A number as text: whole numbers and large ones without digits after the point, others with four digits."""
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.4g}"
