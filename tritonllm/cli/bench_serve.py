"""``tritonllm bench serve``: requests to a running server, as users would send them. Options have vLLM's names.

Every time is taken where the client reads, so the network and the server's API process are in it.
"""

import argparse
import asyncio
import json
import math
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tritonllm import env
from tritonllm.cli.bench_files import check_file, write_report
from tritonllm.cli.bench_runs import spread
from tritonllm.cli.bench_serve_client import PlannedRequest, Told, model_of, send
from tritonllm.cli.bench_serve_plot import check_drawing, draw
from tritonllm.cli.remote import base_of
from tritonllm.system.extras import install
from tritonllm.version import __version__

DESCRIPTION = """\
Send requests to a running server and measure what its users see. Prompts are random token ids and outputs have exactly
the length that is asked for. Without --request-rate all requests are sent at once."""
EPILOG = """\
results, each with mean and percentiles:
  time to first token: from sending a request to its first token (ms)
  time per output token: from a request's first token to its last, over the tokens after the first (ms)
  inter-token latency: between two events of a stream (ms)
  end-to-end latency: from sending a request to its last token (ms)
  goodput: requests/s that kept every limit of --goodput"""
EXTRA = f"tritonllm bench serve needs aiohttp ({{}}): {install('bench')}"
LIMITS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2el_ms"}
NUMBERS: dict[str, tuple[Any, float, str]] = {  # option: default, least value, help
    "num-prompts": (100, 1, "requests"),
    "input-len": (128, 1, "tokens of a prompt"),
    "output-len": (64, 1, "tokens to generate for each"),
    "vocab-size": (1000, 1, "prompts are of the ids below this"),
    "seed": (0, 0, "of prompts, lengths and arrivals"),
}
# What --trace says instead, and what holds without it. The parser leaves None, which tells that it was not given.
WITHOUT_TRACE: dict[str, float] = {
    **{name: NUMBERS[name.replace("_", "-")][0] for name in ("num_prompts", "input_len", "output_len")},
    "random_range_ratio": 0.0,
    "request_rate": math.inf,
    "burstiness": 1.0,
}


def add_parser(kinds: Any) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        "serve",
        help="requests to a running server: latencies and goodput",
        description=DESCRIPTION,
        epilog=EPILOG,
        usage="tritonllm bench serve [MODEL] [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error, names_of_servers=True)
    group = parser.add_argument_group("server", "MODEL is a name that it serves (default: its first)")
    group.add_argument(
        "--base-url", default="http://127.0.0.1:8000", metavar="URL", help="with or without /v1 (default: %(default)s)"
    )
    group.add_argument("--api-key", metavar="KEY", help="default: TRITONLLM_API_KEY")
    group = parser.add_argument_group("requests")
    for name, (default, _, what) in NUMBERS.items():
        at_first = None if name.replace("-", "_") in WITHOUT_TRACE else default
        group.add_argument(f"--{name}", type=int, default=at_first, metavar="N", help=f"{what} ({default})")
    group.add_argument("--random-range-ratio", type=float, metavar="X", help="lengths vary by this share (0)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: the most likely token (0.0)")
    group = parser.add_argument_group("arrivals")
    group.add_argument("--request-rate", type=float, metavar="X", help="requests/s (default: all at once)")
    group.add_argument(
        "--burstiness",
        type=float,
        metavar="X",
        help="shape of the gamma distribution between arrivals: 1 is Poisson (default), less comes in bursts",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="instead: JSON lines with timestamp (ms), input_length and output_length say when to send what",
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests at once; others wait")
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits of ttft, tpot and e2el that count as good"
    )
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the results there too, see docs/cli.md")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw them there, too (.svg, .png); needs matplotlib")
    return parser


def check(args: argparse.Namespace) -> tuple[list[PlannedRequest], dict[str, float]]:
    """The requests, and the limits of goodput.

    Raises:
        ValueError: a bad value.
        OSError: the trace cannot be read.
        ImportError: there is no matplotlib, and a plot is asked for.
    """
    for name, default in WITHOUT_TRACE.items():
        if args.trace is not None and getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not go with --trace, which says when to send what")
        if args.trace is None and getattr(args, name) is None:
            setattr(args, name, default)
    for name, (_, least, _) in NUMBERS.items():
        value = getattr(args, name.replace("-", "_"))
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    if args.trace is None:
        _check_arrivals(args)
    if not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature must be at least 0, got {args.temperature}")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    base_of("--base-url", args.base_url)
    limits = dict(_limit(text) for text in args.goodput)
    chance = random.Random(args.seed)
    asks = read_trace(args.trace) if args.trace is not None else arrivals(args, chance)
    if args.plot is not None:
        check_drawing(args.plot)
    check_file("--output-json", args.output_json)  # last: these may make folders
    check_file("--plot", args.plot)
    return asks, limits


def _check_arrivals(args: argparse.Namespace) -> None:
    if not 0 <= args.random_range_ratio <= 1:
        raise ValueError(f"--random-range-ratio must be from 0 to 1, got {args.random_range_ratio}")
    if not args.request_rate > 0:
        raise ValueError(f"--request-rate must be greater than 0, got {args.request_rate}")
    if not 0 < args.burstiness < math.inf:
        raise ValueError(f"--burstiness must be greater than 0 and finite, got {args.burstiness}")


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if name not in LIMITS or not 0 < limit < math.inf:
        raise ValueError(f"--goodput must be one of {', '.join(LIMITS)} with milliseconds, as ttft:200, got {text!r}")
    return name, limit


def arrivals(args: argparse.Namespace, chance: random.Random) -> list[PlannedRequest]:
    """Gaps are of a gamma distribution with mean 1 / rate; its shape is the burstiness."""
    asks, at = [], 0.0

    def vary(length: int) -> int:
        ratio = args.random_range_ratio
        return max(1, chance.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))

    for _ in range(args.num_prompts):
        asks.append(PlannedRequest(at, vary(args.input_len), vary(args.output_len)))
        if math.isfinite(args.request_rate):
            at += chance.gammavariate(args.burstiness, 1 / (args.request_rate * args.burstiness))
    return asks


def read_trace(path: Path) -> list[PlannedRequest]:
    """The requests by their time; the first one is at 0, whenever the trace began.

    Raises:
        ValueError: a line that is not as it should be; the message names it.
        OSError: it cannot be read.
    """
    asks = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):  # JSON may hold other breaks
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            ask = PlannedRequest(entry["timestamp"] / 1e3, int(entry["input_length"]), int(entry["output_length"]))
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise ValueError(f"--trace: line {number} needs timestamp, input_length and output_length") from error
        if min(ask.input_len, ask.output_len) < 1 or not 0 <= ask.at < math.inf:
            raise ValueError(
                f"--trace: line {number}: lengths must be at least 1, and timestamp finite and not negative"
            )
        asks.append(ask)
    if not asks:
        raise ValueError(f"--trace: {path} has no requests")
    begin = min(ask.at for ask in asks)
    return sorted((replace(ask, at=ask.at - begin) for ask in asks), key=lambda ask: ask.at)


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        asks, limits = check(args)
    except ValueError as error:
        args.wrong_usage(str(error))
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ImportError(EXTRA.format(error)) from error
    model, told, seconds = asyncio.run(_measure(args, asks))
    report = {**_about(args, model), **results(told, seconds, limits)}
    try:
        write_report(report, args.output_json)
        if args.plot is not None:
            draw(told, seconds, f"{model} at {args.base_url}", args.plot)
    finally:  # the files come first, as whoever reads stdout may go away; and the results are shown without files, too
        print(table(report))
    failed = [one for one in told if one.error is not None]
    if failed:
        print(
            f"error: {len(failed)} of {len(told)} requests failed, the first with: {failed[0].error}", file=sys.stderr
        )
    return 1 if failed else 0


async def _measure(args: argparse.Namespace, asks: Sequence[PlannedRequest]) -> tuple[str, list[Told], float]:
    import aiohttp

    chance = random.Random(args.seed)
    prompts = [chance.choices(range(args.vocab_size), k=ask.input_len) for ask in asks]
    key = args.api_key or env.API_KEY
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base = base_of("--base-url", args.base_url)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
    room = asyncio.Semaphore(args.max_concurrency or len(asks))
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        model = args.model or await model_of(session, base)
        body = {"model": model, "temperature": args.temperature, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}  # an event for every token
        first = await send(
            session, base, {**body, "prompt": prompts[0], "max_tokens": 2}, PlannedRequest(0, len(prompts[0]), 2)
        )
        if first.error is not None:  # and whatever happens only once has happened
            raise RuntimeError(f"the server does not answer: {first.error}")
        begin = time.perf_counter()

        async def one(ask: PlannedRequest, prompt: list[int]) -> Told:
            await asyncio.sleep(begin + ask.at - time.perf_counter())
            async with room:
                return await send(session, base, {**body, "prompt": prompt, "max_tokens": ask.output_len}, ask)

        told = await asyncio.gather(*(one(*pair) for pair in zip(asks, prompts, strict=True)))
    ends = [one.arrivals[-1] for one in told if one.arrivals]
    return model, list(told), max(ends, default=begin) - begin


def results(told: Sequence[Told], seconds: float, limits: dict[str, float]) -> dict[str, Any]:
    """The report's fields; of failed requests only their number is in it."""
    done = [one for one in told if one.error is None]
    prompt, output = sum(one.ask.input_len for one in done), sum(one.output_tokens for one in done)
    span = max(seconds, 1e-9)
    good = [one for one in done if all(getattr(one, LIMITS[name]) <= limit for name, limit in limits.items())]
    return {
        "elapsed_time": seconds,
        "num_requests": len(done),
        "failed_requests": len(told) - len(done),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "total_num_tokens": prompt + output,
        "requests_per_second": len(done) / span,
        "output_tokens_per_second": output / span,
        "tokens_per_second": (prompt + output) / span,
        "goodput": {"limits_ms": limits, "requests_per_second": len(good) / span} if limits else None,
        "time_to_first_token_ms": spread([one.ttft_ms for one in done]),
        "time_per_output_token_ms": spread([one.tpot_ms for one in done if one.output_tokens > 1]),
        "inter_token_latency_ms": spread([gap for one in done for gap in one.gaps_ms()]),
        "end_to_end_latency_ms": spread([one.e2el_ms for one in done]),
    }


def _about(args: argparse.Namespace, model: str) -> dict[str, Any]:
    names = [*(name.replace("-", "_") for name in NUMBERS), "random_range_ratio", "temperature", "burstiness"]
    arguments = {name: getattr(args, name) for name in [*names, "max_concurrency", "base_url", "goodput"]}
    arguments["request_rate"] = None if args.request_rate == math.inf else args.request_rate
    arguments["trace"] = None if args.trace is None else str(args.trace)
    return {
        "benchmark": "serve",
        "model": model,
        "device": _device(),
        "versions": {"tritonllm": __version__, "torch": _version("torch"), "python": platform.python_version()},
        "arguments": arguments,
    }


def _device() -> str:
    """The name of this machine's device; the server's may be another."""
    try:
        import torch
    except ImportError:
        return "cpu"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(report: dict[str, Any]) -> str:
    """The results as plain text."""
    lines = [f"bench serve: {report['model']} at {report['arguments']['base_url']}"]
    for key, name in (
        ("elapsed_time", "seconds"),
        ("num_requests", "requests"),
        ("failed_requests", "failed requests"),
        ("output_tokens", "output tokens"),
        ("requests_per_second", "requests/s"),
        ("output_tokens_per_second", "output tokens/s"),
        ("tokens_per_second", "total tokens/s"),
    ):
        lines.append(f"{name:<36}{report[key]:>14,.4g}")
    if report["goodput"] is not None:
        lines.append(f"{'goodput, requests/s':<36}{report['goodput']['requests_per_second']:>14,.4g}")
    for key, name in (
        ("time_to_first_token_ms", "time to first token, ms"),
        ("time_per_output_token_ms", "time per output token, ms"),
        ("inter_token_latency_ms", "inter-token latency, ms"),
        ("end_to_end_latency_ms", "end-to-end latency, ms"),
    ):
        if report[key] is not None:
            values = [("mean", report[key]["mean"])]
            values += [(label, report[key]["percentiles"][at]) for at, label in (("50", "median"), ("99", "99%"))]
            lines += [f"{f'{name}, {label}':<36}{value:>14,.4g}" for label, value in values]
    return "\n".join(lines)
