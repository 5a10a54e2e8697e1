"""``python -m bench.kernels``: check and time every kernel at the sizes of real models, and write the results.

Each case first has to match its reference; one that does not gets no time. A case that crashes the GPU or hangs costs
its own result only. Percent is of the ceiling that binds (copy bandwidth or bfloat16 matrix products), which are
measured in the same run; reads alone can pass 100, since a copy's bytes are half writes.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from autotune.revision import commit
from autotune.search import Caller
from autotune.worker import Failed, Worker
from bench.cases import CASES
from bench.reports import GROUPS
from bench.runner import rates

START_SECONDS = 180.0
CASE_SECONDS = 120.0  # compiling the kernel and torch's composite included
RESULTS = Path(__file__).parent / "results"


def parse(argv: list[str] | None) -> argparse.Namespace:
    what = "Check and time every kernel at the sizes of real models."
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=what)
    default = RESULTS / "kernels.json"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help="where results go (%(default)s)")
    groups = ", ".join(f"{group}: {what}" for group, what in GROUPS.items())
    parser.add_argument("--only", default=",".join(GROUPS), metavar="K1,K3", help=f"the groups to run ({groups})")
    parser.add_argument("--list", action="store_true", help="print the cases")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    unknown = sorted(set(args.only) - GROUPS.keys())
    if unknown:
        parser.error(f"--only must name groups of {', '.join(GROUPS)}, got {', '.join(unknown)}")
    return args


def line(result: dict[str, Any]) -> str:
    name = f"{result['group']} {result['case']:<56}"
    if "failed" in result:
        return f"{name} FAILED: {result['failed']}"
    rate = f"{result['gb_per_s']:.0f} GB/s" if "gb_per_s" in result else f"{result['tflop_per_s']:.0f} TFLOP/s"
    beside = f"torch failed: {result['torch_failed']}" if "torch_failed" in result else ""
    if "torch_us" in result:
        beside = f"torch {result['torch_us']:.1f} us, {result['times_faster_than_torch']:.2f}x"
    return f"{name} {result['us']:>9.1f} us {rate:>12} {result['percent']:>4.0f}%  err {result['error']:.1e}  {beside}"


def run(gpu: Caller, cases: list[int], out: Path) -> int:
    """Measure the cases with these indices, writing what is there after each; returns how many failed."""
    report: dict[str, Any] = {
        "machine": gpu.call("machine", START_SECONDS),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ceilings": gpu.call("ceilings", START_SECONDS),
        "cases": [],
    }
    copy, matmul = report["ceilings"].values()
    print(f"{report['machine']['gpu']}: copy {copy:.0f} GB/s, bfloat16 products {matmul:.0f} TFLOP/s", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    for index in cases:
        try:
            result = rates(gpu.call("measure", CASE_SECONDS, case=index), copy, matmul)
        except Failed as reason:
            failures += 1
            result = {"group": CASES[index].group, "case": CASES[index].problem.name, "failed": str(reason)}
        report["cases"].append(result)
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(line(result), flush=True)
    return failures


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    cases = [index for index, case in enumerate(CASES) if case.group in args.only]
    if args.list:
        print("\n".join(CASES[index].name for index in cases))
        return 0
    gpu = Worker("bench.runner:Runner")
    try:
        failures = run(gpu, cases, args.out)
    except Failed as reason:
        print(f"no GPU to measure on: {reason}", file=sys.stderr)
        return 1
    finally:
        gpu.close()
    print(f"wrote {args.out}: {len(cases) - failures} of {len(cases)} cases")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
