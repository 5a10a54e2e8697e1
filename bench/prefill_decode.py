"""``python -m bench.prefill_decode``: GPUs split into prefill and decode, beside the same GPUs without a split.

Llama-3.1-8B's shape with made-up weights; prompts are token ids, so nothing is fetched. Each group of servers
(bench/prefill_decode_groups.py) gets the same requests: chats that decode all the time, and prompts of 8,192 tokens
beside them, both Poisson, at several rates of the long ones. The question is whether the split group has half the time
between two tokens at the 99th percentile, with as many tokens a second.

A row is one group at one rate. Rates and times are those of a window that begins after ``--warm-up`` seconds of the
same traffic: tokens that came in it, gaps between two events of a stream that ended in it, and the first tokens of
requests that were sent in it. Behind the window no request is sent, and all streams are read to their end. Requests
fail wherever they were sent; ``blocks`` are those of all requests of the row.

  python -m bench.prefill_decode                               # four GPUs, all three groups, 1, 2 and 4 prompts/s
  python -m bench.prefill_decode --groups shared --long-rates 8  # more rows for the same file
  python -m bench.prefill_decode --rehearsal --out FILE          # on the CPU, with a tiny model: times say nothing

Expected with a warm folder of compiled kernels: for each group 40 s for the start, and for each rate ``--warm-up`` +
``--window`` + 6 s. With an empty folder the first group takes 60 to 120 s more. The file is written after every row; a
file of the same commit, machine and traffic is continued. Needs the extras ``serve``, ``route`` and ``bench``. The exit
status is 1 if a request failed, a split group brought no blocks, or a group did not start.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.revision import commit
from bench.engine_worker import machine
from bench.engine_workloads import write_model
from bench.prefill_decode_groups import CONNECTORS, GROUPS, Group, Setup, started
from bench.prefill_decode_table import judged
from bench.serve_load import CLIENTS, different_errors, latest_send, model_config, num_gpus, send_all
from tritonllm.cli.bench_serve import PlannedRequest, Told

MODEL = "llama-3.1-8b"
DEFAULT_GROUPS = ("split", "shared", "chunked")
BLOCK_SIZE = 16
FIRST_ASKS = 8  # of each kind, before anything is measured: each server sees both kinds, and peers meet


@dataclass(frozen=True)
class Traffic:
    """Requests of two kinds; lengths are tokens in and tokens out.

    Attributes:
        short_rate, long_rate: requests a second, Poisson.
        warm_up, window: seconds; the window is measured.
    """

    short_rate: float
    long_rate: float
    short: tuple[int, int]
    long: tuple[int, int]
    warm_up: float
    window: float

    def asks(self) -> list[PlannedRequest]:
        """The same ones each time, in order; the short ones do not depend on the rate of the long ones."""
        kinds = (("short", self.short_rate, self.short), ("long", self.long_rate, self.long))
        asks = [ask for name, rate, lengths in kinds for ask in self._stream(random.Random(name), rate, *lengths)]
        return sorted(asks, key=lambda ask: ask.at)

    def _stream(self, chance: random.Random, rate: float, input_len: int, output_len: int) -> Iterator[PlannedRequest]:
        at = chance.expovariate(rate)
        while at < self.warm_up + self.window:
            yield PlannedRequest(at, input_len, output_len)
            at += chance.expovariate(rate)

    def kind(self, ask: PlannedRequest) -> str:
        return "long" if ask.input_len == self.long[0] else "short"

    @property
    def blocks(self) -> int:
        """Of all long prompts, as far as another server can have computed them: each one's last token is computed."""
        return sum((ask.input_len - 1) // BLOCK_SIZE for ask in self.asks() if self.kind(ask) == "long")


REHEARSED = Traffic(short_rate=4.0, long_rate=2.0, short=(16, 8), long=(320, 8), warm_up=0.5, window=2.0)


def percentiles(values: Sequence[float], *percents: int) -> dict[str, float] | None:
    """With the largest one; ``None`` of nothing."""
    if not values:
        return None
    found = np.percentile(values, percents).tolist()
    return {**{str(at): value for at, value in zip(percents, found, strict=True)}, "max": max(values)}


def numbers(told: Sequence[Told], begin: float, traffic: Traffic) -> dict[str, Any]:
    """Of some of the requests: how many were sent in the window, and what their users saw in it.

    Args:
        begin: of the traffic, by the clients' clock.
    """
    start = begin + traffic.warm_up
    end = start + traffic.window
    done = [one for one in told if one.error is None]
    sent = [one for one in done if start <= begin + one.ask.at < end]
    gaps = [
        1e3 * (after - before)
        for one in done
        for before, after in zip(one.arrivals, one.arrivals[1:], strict=False)
        if start <= after < end
    ]
    # an event may hold several tokens, of which the clients know the sum
    tokens = sum(
        one.output_tokens / len(one.arrivals)
        for one in done
        if one.arrivals
        for at in one.arrivals
        if start <= at < end
    )
    return {
        "requests": len(sent),
        "output_tokens_per_second": tokens / traffic.window,
        "time_to_first_token_ms": percentiles([one.ttft_ms for one in sent], 50, 99),
        "inter_token_latency_ms": percentiles(gaps, 50, 90, 99),
    }


def run_traffic(group: Group, traffic: Traffic, clients: Executor, vocab: int, seed: int) -> dict[str, Any]:
    """A row of the results; times are the clients'.

    Args:
        seed: of the prompts, which the group has not seen with another one.
    """
    before, asks = group.counts(), traffic.asks()
    told, begin = send_all(asks, group.url, clients, vocab, seed)
    counted = {name: total - before[name] for name, total in group.counts().items()}
    kinds = {name: [one for one in told if traffic.kind(one.ask) == name] for name in ("short", "long")}
    last = max((one.arrivals[-1] for one in told if one.arrivals), default=begin)
    everything = numbers(told, begin, traffic)
    asked = sum(ask.output_len for ask in asks if ask.at >= traffic.warm_up) / traffic.window
    return {
        "output_tokens_per_second": everything.pop("output_tokens_per_second"),
        "asked_output_tokens_per_second": asked,
        "failed_requests": sum(one.error is not None for one in told),
        "errors": different_errors(told),
        "all": everything,
        **{name: numbers(some, begin, traffic) for name, some in kinds.items()},
        "seconds_behind_the_window": last - begin - traffic.warm_up - traffic.window,
        "latest_send_seconds": latest_send(told, begin),
        "preemptions": counted.pop("preemptions"),
        "blocks": {**counted, "of_long_prompts": traffic.blocks},
    }


def warm_up(group: Group, traffic: Traffic, clients: Executor, vocab: int) -> None:
    """Raises:
    RuntimeError: the group does not answer.
    """
    asks = [PlannedRequest(0.1 * at, *lengths) for at in range(FIRST_ASKS) for lengths in (traffic.short, traffic.long)]
    told, _ = send_all(asks, group.url, clients, vocab, seed=0)
    errors = different_errors(told)
    if errors:
        raise RuntimeError(f"the group does not answer: {errors[0]}")


def why_failed(name: str, row: dict[str, Any]) -> str | None:
    where = f"{name} at {row['long_rate']:g} long prompts/s"
    if row["failed_requests"]:
        return f"{where}: {row['failed_requests']} requests failed, with {row['errors']}"
    if name == "split" and row["blocks"]["of_long_prompts"] and not row["blocks"]["fetched"]:
        return f"{where}: no block came from the servers that compute prompts"
    return None


class Report:
    """Rows in a file, which is written after each of them.

    Raises:
        ValueError: the file is there, and says that its rows were measured otherwise.
    """

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._out, rows = out, []
        facts = json.loads(json.dumps(facts))  # as a file has them
        if out.exists():
            there = json.loads(out.read_text())
            other = [name for name in facts if there.get(name) != facts[name]]
            if other:
                raise ValueError(f"--out: {out} has rows of another {' and '.join(other)}: give another name")
            rows = there["prefill_decode"]
        self.data: dict[str, Any] = {**facts, "date": now, "prefill_decode": rows}
        out.parent.mkdir(parents=True, exist_ok=True)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data["prefill_decode"]

    def add(self, row: dict[str, Any]) -> None:
        """In the place of one of the same group and rate."""
        names = ("group", "settings", "long_rate")
        self.rows[:] = [one for one in self.rows if any(one[name] != row[name] for name in names)]
        self.rows.append(row)
        self._out.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")


def brief(row: dict[str, Any]) -> str:
    """What the terminal shows of a row."""
    shown = {name: row[name] for name in ("group", "long_rate", "failed_requests")}
    shown |= {"tokens/s": round(row["output_tokens_per_second"]), "asked": round(row["asked_output_tokens_per_second"])}
    for name, where, what in (
        ("between", "all", "inter_token_latency_ms"),
        ("first of long", "long", "time_to_first_token_ms"),
        ("first of short", "short", "time_to_first_token_ms"),
    ):
        spread = row[where][what]
        shown[name] = None if spread is None else {at: round(value, 1) for at, value in spread.items()}
    shown |= {name: round(row[name], 2) for name in ("seconds_behind_the_window", "latest_send_seconds")}
    return json.dumps(shown | {"blocks": row["blocks"], "preemptions": row["preemptions"]})


def measure(args: argparse.Namespace, report: Report) -> list[str]:
    """All groups, one after the other. Returns what failed."""
    config, vocab = model_config(MODEL, args.rehearsal)
    failed, spawn = [], multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as root, ProcessPoolExecutor(CLIENTS, mp_context=spawn) as clients:
        folder = write_model(MODEL, config, Path(root))
        for name in args.groups:
            try:
                with started(name, args.setup, folder) as group:
                    print(f"{name}: started after {group.start_seconds:.1f} s", flush=True)
                    warm_up(group, args.traffic, clients, vocab)
                    for seed, rate in enumerate(args.long_rates, 1):
                        traffic = replace(args.traffic, long_rate=rate)
                        row = {"group": name, "settings": args.setup.of_group(name), "long_rate": rate}
                        row |= {"start_seconds": group.start_seconds}
                        row |= run_traffic(group, traffic, clients, vocab, seed)
                        row["warnings"] = group.warnings()
                        report.add(row)
                        print(brief(row), *row["warnings"], sep="\n  ", flush=True)
                        failed += [why for why in [why_failed(name, row)] if why is not None]
            except (
                RuntimeError,
                OSError,
            ) as error:  # OSError: a server has died; the other groups' rows are worth having
                failed.append(f"{name}: {error}")
                print(failed[-1], file=sys.stderr, flush=True)
    return failed


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefill_decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, default: Any, what: str, **more: Any) -> None:
        parser.add_argument(name, default=default, help=f"{what} (%(default)s)", **more)

    add("--gpus", "0,1,2,3", "an even number of them, as CUDA_VISIBLE_DEVICES names them", metavar="A,B")
    add("--groups", ",".join(DEFAULT_GROUPS), f"of {', '.join(GROUPS)}", metavar="NAME,NAME")
    add("--connector", CONNECTORS[0], "between the servers of the split group", choices=CONNECTORS)
    add("--long-rates", "1,2,4", "long prompts a second for the whole group", metavar="X,X")
    add("--short-rate", 32.0, "chats a second", type=float, metavar="X")
    add("--long", "8192,128", "tokens in and out of a long prompt", metavar="IN,OUT")
    add("--short", "128,256", "of a chat", metavar="IN,OUT")
    add("--warm-up", 4.0, "seconds of traffic before the window", type=float, metavar="S")
    add("--window", 25.0, "seconds that are measured", type=float, metavar="S")
    add("--chunk", 512, "--max-num-batched-tokens of the group chunked", type=int, metavar="N")
    add("--tier-gib", 8.0, "--kv-offloading-size of the split group's servers", type=float, metavar="GIB")
    add("--prefill-min-tokens", 256, "shorter prompts are not split", type=int, metavar="N")
    add("--kept-gib", 8.0, "max_bytes of those that compute prompts", type=float, metavar="GIB")
    out = Path(__file__).parent / "results" / "prefill-decode.json"
    add("--out", out, "where the rows go", type=Path, metavar="FILE")
    parser.add_argument("--sees-all", action="store_true", help="each server sees all GPUs, not only its own")
    parser.add_argument("--rehearsal", action="store_true", help="a tiny model on the CPU, and few requests")
    args = parser.parse_args(argv)
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Also makes ``traffic`` and ``setup``."""
    args.groups, gpus = args.groups.split(","), args.gpus.split(",")
    for name in args.groups:
        if name not in GROUPS:
            parser.error(f"--groups must be some of {', '.join(GROUPS)}, got {name!r}")
    if len(gpus) % 2:
        parser.error(f"--gpus must name an even number of them, got {args.gpus}")
    for name in ("long_rates", "long", "short"):
        try:
            setattr(args, name, tuple(map(float if name == "long_rates" else int, getattr(args, name).split(","))))
        except ValueError:
            parser.error(f"--{name.replace('_', '-')} must be numbers with commas between them")
    if len(args.long) != 2 or len(args.short) != 2 or args.long[0] <= args.short[0] or min(args.long + args.short) < 1:
        parser.error("--long and --short must be two lengths each, and a long prompt longer than a short one")
    for name in ("short_rate", "window", "tier_gib", "kept_gib", "chunk"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be greater than 0, got {getattr(args, name)}")
    if min(args.long_rates) <= 0 or args.warm_up < 0:
        parser.error("--long-rates must be greater than 0, and --warm-up not negative")
    args.traffic = Traffic(args.short_rate, args.long_rates[0], args.short, args.long, args.warm_up, args.window)
    options = ["--max-queue", "4096"]
    if args.rehearsal:
        gpus, args.traffic, args.chunk = ["cpu"] * 2, REHEARSED, 64
        args.long_rates, args.tier_gib, args.kept_gib = (REHEARSED.long_rate,), 0.1, 0.1
        args.connector = "Peer" if args.connector == "CudaIpc" else args.connector  # that one needs GPUs
        options += ["--device", "cpu", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
    lengths = [sum(kind) for kind in (args.traffic.long, args.traffic.short)]
    options += ["--max-model-len", str(max(lengths) + BLOCK_SIZE)]
    sizes = args.tier_gib, args.kept_gib, args.prefill_min_tokens, args.chunk
    args.setup = Setup(tuple(gpus), args.connector, *sizes, args.sees_all, tuple(options))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    begin, gpus = time.monotonic(), args.setup.gpus
    if not args.rehearsal and num_gpus() < len(gpus):
        print(f"needs {len(gpus)} GPUs, which --gpus names: there are {num_gpus()}", file=sys.stderr)
        return 1
    traffic = {name: value for name, value in asdict(args.traffic).items() if name != "long_rate"}
    facts = {"machine": machine(), "commit": commit(), "rehearsal": args.rehearsal, "model": MODEL, "gpus": len(gpus)}
    facts |= {"traffic": traffic, "tier_gib": args.tier_gib, "kept_gib": args.kept_gib}
    try:
        report = Report(args.out, facts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    failed = measure(args, report)
    print(*judged(report.rows), *(f"FAILED: {why}" for why in failed), sep="\n")
    print(f"{len(report.rows)} rows in {args.out} after {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
