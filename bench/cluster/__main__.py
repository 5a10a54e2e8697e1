"""``python -m bench.cluster``: 8 to 1,024 GPUs behind routers, simulated from measured step times and link rates.

Chats with several turns and shared system prompts (bench/cluster/traffic.py) come to replicas of Llama-3.1-8B whose
steps take as long as they took on an H200 (step_times.py). The studies (studies.py) vary how requests are routed, where
the cache's blocks are kept, whether prompts and answers have GPUs of their own, how fast the links are, how many router
processes there are, and what fails. The first table holds a simulated GPU beside the measured one. Everything but the
microseconds of ``placing`` follows from ``--seed``. One core needs about 10 minutes for all of it.
"""

import argparse
import datetime
import json
import multiprocessing
import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autotune.revision import commit
from bench.cluster.checked import compared
from bench.cluster.measures import Objective
from bench.cluster.step_times import measured
from bench.cluster.studies import RATE, Span, all_runs, memory, placing, router_process, row
from bench.cluster.table import TITLES, cluster, figures
from bench.cluster.traffic import Traffic, chats
from bench.host import processor
from bench.reports import RESULTS

SIZES = (8, 64, 256, 1024)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", default=",".join(map(str, SIZES)), metavar="N,N", help="sizes (%(default)s)")
    parser.add_argument("--only", default=",".join(TITLES), metavar="STUDY,STUDY", help="studies (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the chats and of all choices (%(default)s)")
    parser.add_argument("--warm-up", type=float, default=10.0, metavar="S", help="not counted (%(default)s s)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="counted (%(default)s s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once, a core each (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "cluster-simulation.json", metavar="FILE")
    args = parser.parse_args(argv)
    try:
        args.gpus = sorted({int(size) for size in args.gpus.split(",")})
    except ValueError:
        parser.error(f"--gpus must be numbers with commas between them, got {args.gpus!r}")
    if not 1 <= args.gpus[0] <= args.gpus[-1] <= 10_000:
        parser.error(f"--gpus must be from 1 to 10000, got {args.gpus}")
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(TITLES):
        parser.error(f"--only: there is no study {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if args.warm_up < 0 or args.seconds <= 0:
        parser.error("--warm-up must be at least 0 and --seconds more than 0")
    return args


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Run the studies."""
    times, span = measured(), Span(args.warm_up, args.seconds)
    traffic = Traffic(requests_per_second=RATE * args.gpus[0])
    tokens = float(chats(Traffic(requests_per_second=1000.0), 60.0, args.seed).answer.mean())
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = {"cpu": processor(), "python": platform.python_version(), "numpy": np.__version__}
    facts: dict[str, Any] = {"machine": machine, "commit": commit(), "date": now, "seed": args.seed}
    facts |= {"span": asdict(span), "rate": RATE, "objective": asdict(Objective()), "traffic": asdict(traffic)}
    facts |= {"step_times": times.facts(), "memory": memory(times), "router": router_process(tokens)}
    facts |= {"placing": placing(args.gpus), "checked": compared(times)}
    runs = [run for run in all_runs(times, args.gpus, span, args.seed) if run.study in args.only]
    rows: list[dict[str, Any]] = []
    simulate = partial(row, times=times, span=span)
    with ExitStack() as stack:
        found: Iterator[dict[str, Any]] = map(simulate, runs)
        if args.jobs > 1:
            context = multiprocessing.get_context("spawn")
            found = stack.enter_context(ProcessPoolExecutor(args.jobs, context)).map(simulate, runs)
        for run, came in zip(runs, found, strict=True):
            rows.append(came)
            label = ", ".join(f"{name} {value}" for name, value in run.label.items())
            print(f"{run.study}: {label}: {' '.join(figures(came))}", flush=True)
            text = json.dumps({**facts, "cluster": rows}, indent=1)  # each time: the next one may not be awaited
            args.out.write_text(text + "\n")
    return {**facts, "cluster": rows}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = report(args)
    print(f"\n{cluster(found)}\n\nwrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
