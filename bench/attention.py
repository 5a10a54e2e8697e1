"""``python -m bench.attention``: attention at K1, K2 and over a sweep of sizes, beside every peer that is installed.

Each case first has to match float32; one that does not gets no time and makes the exit code 1. A case or a peer that
crashes the GPU or hangs costs its own result only. Percent is of the floor: the least bytes over the copy bandwidth or
the FLOPs over the rate of bfloat16 products, both measured in the same run, whichever takes longer. Reads alone can
pass 100, since a copy's bytes are half writes. ``2.00x`` behind a peer's time: ours is twice as fast.
"""

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

from autotune.revision import commit
from autotune.search import Caller
from autotune.worker import Failed, Worker
from bench import reports
from bench.attention_cases import PRECISIONS, ROWS, SWEEP, Attention
from bench.attention_peers import PEERS, installed
from bench.attention_runner import CASES
from bench.runner import rates

START_SECONDS = 180.0
CASE_SECONDS = 120.0  # compiling included
PEER_SECONDS = 300.0  # FlashInfer compiles CUDA
SWEEP_MEMORY = 0.4  # of the GPU's, for a case's inputs
HERE = Path(__file__).parent
LISTED: dict[str, dict[str, float]] = reports.LISTED["us"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    what = "Check and time attention beside every peer that is installed."
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description=what)
    default = HERE / "results" / "attention.json"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help="where results go (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="K1 and K2 only, without the sweep")
    parser.add_argument(
        "--precision", metavar="bf16,fp8", help=f"cases of these queries and caches alone ({', '.join(PRECISIONS)})"
    )
    parser.add_argument("--group", choices=("K1", "K2"), help="decodes (K1) or prefills (K2) alone")
    parser.add_argument("--list", action="store_true", help="print the cases")
    args = parser.parse_args(argv)
    args.precision = [*PRECISIONS] if args.precision is None else args.precision.split(",")
    if unknown := [name for name in args.precision if name not in PRECISIONS]:
        parser.error(f"no such precision: {', '.join(unknown)}; there are {', '.join(PRECISIONS)}")
    return args


def chosen(args: argparse.Namespace) -> list[tuple[int, Attention]]:
    """The cases to measure, each with its place in all of them."""
    cases = ROWS if args.quick else CASES
    wanted = [(index, problem) for index, problem in enumerate(cases) if problem.precision in args.precision]
    return [(index, problem) for index, problem in wanted if args.group in (None, problem.group)]


def rounded(value: Any) -> Any:
    """Floats with five digits: more is noise."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write(report: dict[str, Any], out: Path) -> None:
    """As JSON, one case a line."""
    parts = []
    for name, value in report.items():
        text = json.dumps(rounded(value))
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(rounded(case))}" for case in value) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    out.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def measure(gpu: Caller, index: int, peers: list[str], copy: float, matmul: float) -> dict[str, Any]:
    """One case: ours, then each of the peers that can do it.

    Raises:
        Failed: ours is wrong, crashed or hung.
    """
    result = gpu.call("measure", CASE_SECONDS, case=index)
    beside: dict[str, dict[str, Any]] = {}
    for name in peers:
        if PEERS[name].takes(CASES[index]):
            try:
                beside[name] = gpu.call("peer", PEER_SECONDS, case=index, name=name)
            except Failed as reason:
                beside[name] = {"failed": str(reason)}
    by_torch = {name: done["us"] for name, done in beside.items() if PEERS[name].package == "torch" and "us" in done}
    if by_torch:
        best = min(by_torch, key=lambda name: by_torch[name])
        result |= {"torch": best, "torch_us": by_torch[best]}
    for done in beside.values():
        if "us" in done:
            done["times_faster"] = done["us"] / result["us"]
    return rates(result, copy, matmul) | ({"peers": beside} if beside else {})


def beside_listed(result: dict[str, Any]) -> dict[str, Any]:
    """A row in bfloat16 beside the listed peers."""
    if result["precision"] != "bf16":
        return {}
    listed = LISTED[result["case"]]
    best = min(listed, key=lambda name: listed[name])
    return {"listed_us": listed, "listed_best": best, "times_faster_than_listed": listed[best] / result["us"]}


def beside_bf16(result: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    """A case in another precision beside that of its size in bfloat16."""
    if result["precision"] == "bf16":
        return {}
    same = [row for row in before if (row["case"], row["precision"]) == (result["case"], "bf16") and "us" in row]
    return {"of_bf16": result["us"] / same[0]["us"]} if same else {}


def line(result: dict[str, Any]) -> str:
    name = f"{result['group']} {result['case']:<44} {result['precision']:<11}"
    if "failed" in result:
        return f"{name} FAILED: {result['failed']}"
    rate = f"{result['gb_per_s']:.0f} GB/s" if "gb_per_s" in result else f"{result['tflop_per_s']:.0f} TFLOP/s"
    text = f"{name} {result['us']:>8.1f} us {rate:>11} {result['percent']:>4.0f}% err {result['error']:.1e}"
    for peer, done in result.get("peers", {}).items():
        if peer == result.get("torch") or ("us" in done and PEERS[peer].package != "torch"):
            text += f" | {peer} {done['us']:.1f} {done['times_faster']:.2f}x"
    if "listed_best" in result:
        best = result["listed_best"]
        text += f" | listed {best} {result['listed_us'][best]:.1f} {result['times_faster_than_listed']:.2f}x"
    return text + (f" | {result['of_bf16']:.2f} of bf16's time" if "of_bf16" in result else "")


def described(problem: Attention) -> dict[str, Any]:
    names = ("group", "precision", "batch", "new", "length")
    return {"case": problem.size} | {name: getattr(problem, name) for name in names}


def run(gpu: Caller, args: argparse.Namespace) -> int:
    """Measure everything, writing what is there after each case; returns how many cases of ours failed."""
    versions = installed()
    report: dict[str, Any] = {
        "machine": gpu.call("machine", START_SECONDS),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "ceilings": gpu.call("ceilings", START_SECONDS),
        "peers": versions,
        "rows": [],
        "sweep": [],
    }
    copy, matmul = report["ceilings"].values()
    print(f"{report['machine']['gpu']}: copy {copy:.0f} GB/s, bfloat16 products {matmul:.0f} TFLOP/s", flush=True)
    room = SWEEP_MEMORY * 1e9 * gpu.call("memory_gb", START_SECONDS)
    cases, out = chosen(args), args.out
    too_large = {problem for index, problem in cases if index >= len(ROWS) and problem.least_work().bytes > room}
    if too_large:
        print(f"{len(too_large)} of {len(SWEEP)} sizes of the sweep need too much memory", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    failures = 0
    for index, problem in cases:
        is_row = index < len(ROWS)
        if not is_row and problem in too_large:
            continue
        result, before = described(problem), report["rows" if is_row else "sweep"]
        try:
            result |= measure(gpu, index, list(versions) if is_row else [], copy, matmul)
            result |= beside_bf16(result, before) | (beside_listed(result) if is_row else {})
        except Failed as reason:
            failures += 1
            result["failed"] = str(reason)
        before.append(result)
        write(report, out)
        print(line(result), flush=True)
    return failures


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        print("\n".join(f"{problem.group} {problem.name}" for _, problem in chosen(args)))
        return 0
    begin = time.monotonic()
    gpu = Worker("bench.attention_runner:AttentionRunner")
    try:
        failures = run(gpu, args)
    except Failed as reason:
        print(f"no GPU to measure on: {reason}", file=sys.stderr)
        return 1
    finally:
        gpu.close()
    print(f"wrote {args.out} after {time.monotonic() - begin:.0f} s; {failures} of our cases failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
