"""``python -m bench.engine``: whole workloads through the engine, beside the roofline floor and what vLLM takes.

W1 to W6 are defined in bench/engine_workloads.py: bfloat16 models of published shapes with made-up weights, token ids
in and out, nothing detokenized. Each model gets a process of its own, in which the engine starts once; one small
request runs first, then each workload so often as it says, every repetition with other tokens. Reported is the median
repetition:

- throughput (W1, W2, W5): all requests at once, output tokens over the time to the last one;
- turn (T8, T128): milliseconds to the first token of a prompt whose first 32,768 tokens are in the prefix cache;
- join (J128, J20, JS128): milliseconds to the first tokens of prompts that join 70 requests which decode;
- latency (W3a, W3b, W5b; L1, L8, L8m with long contexts; F2 to F16 with few sequences):
  (time of 256 tokens - time of 1 token) / 255;
- speculation (S1, S8, S64): the same with 4 drafts a step of which each is right with probability 0.8, and beside it
  ``times_plain``, how much faster that is than an engine without drafts in the same process (bench/speculation.py);
- speculation (D1, D8): the same, and the drafts come from a model of Llama-3.2-1B's shape;
- prefix (W4): requests a second when the shared beginning has not been seen before, and (warm) when it has;
- prefill (W6): prompt tokens a second;
- start: seconds to import and start, with empty caches for compiled kernels (cold) and with full ones (warm).

``--engine vllm`` runs the same requests through vLLM where it is installed: compare the checksums.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.revision import commit
from autotune.worker import Failed, Worker
from bench.engine_floors import floor
from bench.engine_workloads import LATENCIES, MODELS, WORKLOADS, requests
from bench.reports import LISTED, gpus_of, number, without_others

HERE = Path(__file__).parent
ENGINES = ("tritonllm", "vllm")
START = "start"
START_MODEL = "qwen3-0.6b"
CEILING_SECONDS = 180.0
UNITS = {
    "throughput": "output tok/s",
    "latency": "ms/token",
    "speculation": "ms/token",
    "prefix": "req/s",
    "prefill": "prompt tok/s",
    "turn": "ms",
    "join": "ms",
}
# Where engines keep what they compiled: a folder of ours instead makes a start cold.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Process:
    """One engine start: which model and workloads, and what its start is called if that is a row."""

    model: str
    workloads: tuple[str, ...]
    start: str | None = None


def processes(names: list[str]) -> list[Process]:
    """One for each model, in the order of the names, and one for its workloads with drafts of each kind; ``start`` adds
    one with empty caches before its model's."""
    by_model: dict[tuple[str, bool, str | None], list[str]] = {}
    for name in names:
        model = START_MODEL if name == START else WORKLOADS[name].model
        drafts = name != START and WORKLOADS[name].kind == "speculation"
        draft = WORKLOADS[name].draft if drafts else None
        by_model.setdefault((model, drafts, draft), []).append(name)
    found = []
    for (model, *_), chosen in by_model.items():
        workloads = tuple(name for name in chosen if name != START)
        timed = START in chosen
        found += [Process(model, (), "start cold")] if timed else []
        found.append(Process(model, workloads, "start warm" if timed else None))
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*WORKLOADS, START]
    usual = [name for name in every if name == START or WORKLOADS[name].gpus == 1]
    parser.add_argument("--workload", metavar="W1,W3a", help=f"some of them ({','.join(usual)})")
    parser.add_argument("--engine", choices=ENGINES, default="tritonllm")
    parser.add_argument("--repeats", type=int, metavar="N", help="instead of each workload's own number")
    parser.add_argument(
        "--ceilings",
        choices=("measured", "listed"),
        default="measured",
        help="what the floor is computed from: this GPU's copy and product rates, or an H200's (%(default)s)",
    )
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help='more arguments of LLM: {"max_num_seqs": 512}'
    )
    parser.add_argument("--timeout", type=float, default=1200, metavar="S", help="for one process (%(default)s s)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="results (bench/results/engine.json, engine-vllm.json)"
    )
    parser.add_argument("--list", action="store_true", help="print the workloads and their floors")
    args = parser.parse_args(argv)
    args.workload = args.workload.split(",") if args.workload is not None else every if args.list else usual
    if unknown := [name for name in args.workload if name not in every]:
        parser.error(f"--workload must name some of {', '.join(every)}, got {', '.join(map(repr, unknown))}")
    if args.repeats is not None and args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if not isinstance(args.options, dict):
        parser.error(f"--options must be a JSON object, got {args.options!r}")
    args.out = args.out or HERE / "results" / ("engine.json" if args.engine == "tritonllm" else "engine-vllm.json")
    return args


def run_process(process: Process, args: argparse.Namespace, caches: Path) -> dict[str, Any]:
    """Run one process to its end and return its report.

    Raises:
        Failed: it crashed, or took too long.
    """
    environ = dict(os.environ)
    if process.start is not None:
        environ |= {name: str(caches / name.lower()) for name in CACHES}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "bench.engine_worker", "--engine", args.engine, "--model", process.model]
        command += ["--workloads", ",".join(process.workloads), "--options", json.dumps(args.options)]
        command += ["--out", str(out)] + (["--repeats", str(args.repeats)] if args.repeats else [])
        try:
            code = subprocess.run(command, env=environ, timeout=args.timeout, check=False).returncode
        except subprocess.TimeoutExpired as error:
            raise Failed(f"no result within {args.timeout:.0f} s") from error
        if code:
            raise Failed(f"its process ended with exit code {code}")
        return json.loads(out.read_text())


def ceilings(how: str) -> dict[str, float]:
    """Rates of copies and of products, measured on this GPU or listed.

    Raises:
        Failed: there is no GPU to measure.
    """
    if how == "listed":
        return LISTED["ceilings"]
    gpu = Worker("bench.runner:Runner")
    try:
        return gpu.call("ceilings", CEILING_SECONDS)
    finally:
        gpu.close()


def compared(row: dict[str, Any], rates: dict[str, Any], gpus: int) -> dict[str, Any]:
    """A workload's row with its unit, the floor, and of one GPU our aim and the listed figure of vLLM.

    ``times_better_than_listed`` is 2 for twice the rate or half the time. Several GPUs divide the work among them, and
    nothing that they exchange counts: their floor is that of one with all their rates.
    """
    rates = {name: gpus * rate for name, rate in rates.items()}
    workload = WORKLOADS[row["workload"]]
    batch, config, latency = requests(workload), MODELS[workload.model], workload.kind in LATENCIES

    def percent(bound: float) -> float:
        return 100 * (bound / row["value"] if latency else row["value"] / bound)

    bound = floor(workload, config, **rates).value(workload, batch)
    row = row | {"unit": UNITS[workload.kind], "floor": bound, "percent": percent(bound)}
    if workload.shared and workload.kind != "turn":
        shared = floor(workload, config, **rates, share=True).value(workload, batch)
        row |= {"floor_shared_reads": shared, "percent_of_floor_shared_reads": percent(shared)}
    return row | (beside(row["workload"], row["value"], less_is_better=latency) if gpus == 1 else {})


def beside(name: str, value: float, less_is_better: bool) -> dict[str, Any]:
    """What ``listed_peers.json`` says of a row."""
    listed = LISTED["engine"]["rows"].get(name, {})
    found = {}
    if "goal" in listed:
        met = value <= listed["goal"] if less_is_better else value >= listed["goal"]
        found |= {"goal": listed["goal"], "goal_met": met}
    if "peer" in listed:
        ratio = listed["peer"] / value if less_is_better else value / listed["peer"]
        found |= {"listed": listed["peer"], "times_better_than_listed": ratio}
    return found


def start_row(process: Process, seconds: dict[str, float]) -> dict[str, Any]:
    value = seconds["import"] + seconds["start"]
    assert process.start is not None
    row = {"workload": process.start, "model": process.model, "kind": START, "value": value, "unit": "s"}
    return row | {"seconds": seconds} | beside(process.start, value, less_is_better=True)


def line(row: dict[str, Any]) -> str:
    name = f"{row['workload']:<10} {row['model']:<13}"
    if "failed" in row:
        return f"{name} FAILED: {row['failed']}"
    text = f"{name} {number(row['value']):>8} {row['unit']:<12}"
    text += f" floor {number(row['floor']):>7} {row['percent']:>4.0f}%" if "floor" in row else " " * 20
    text += f" goal {number(row['goal']):>7} {'met' if row['goal_met'] else 'missed':<6}" if "goal" in row else ""
    if "listed" in row:
        text += f" | {LISTED['engine']['peer']} {number(row['listed']):>7} {row['times_better_than_listed']:.2f}x"
    if "times_plain" in row:
        text += f" | {row['times_plain']:.2f}x plain, steps {row['step_ratio']:.2f}x"
    if "warm_value" in row:
        text += f" | warm {number(row['warm_value'])}"
    if "floor_shared_reads" in row:
        text += f" | floor reading the shared part once {number(row['floor_shared_reads'])}"
    if row.get("kernels_compiled"):
        text += f" | {row['kernels_compiled']} kernels compiled meanwhile"
    return text


def failures(process: Process, reason: Failed) -> list[dict[str, Any]]:
    names = [*process.workloads, *([process.start] if process.start else [])]
    return [{"workload": name, "model": process.model, "failed": str(reason)} for name in names]


def run(args: argparse.Namespace) -> int:
    """Measure everything, writing what is there after each process; returns how many rows failed."""
    rates, gpus = ceilings(args.ceilings), gpus_of(args.options)
    print("copy {:.0f} GB/s, bfloat16 products {:.0f} TFLOP/s".format(*rates.values()), args.ceilings, flush=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"machine": {}, "engine": {"name": args.engine}, "commit": commit(), "date": now}
    report |= {"ceilings": rates, "ceilings_are": args.ceilings, "options": args.options, "rows": []}
    report |= {"start_seconds": {}}  # of one process for each model, with the folders of compiled kernels as they are
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as caches:
        for process in processes(args.workload):
            try:
                done = run_process(process, args, Path(caches))
                rows = [start_row(process, done["start_seconds"])] if process.start else []
                rows += [compared(row, rates, gpus) for row in done["rows"]]
                rows = without_others(rows, done["machine"]["gpu"])
                report |= {"machine": done["machine"], "engine": done["engine"]}
                report["start_seconds"][process.model] = done["start_seconds"]
            except Failed as reason:
                rows = failures(process, reason)
            report["rows"] += rows
            args.out.write_text(json.dumps(report, indent=1) + "\n")
            print("\n".join(map(line, rows)), flush=True)
    return sum("failed" in row for row in report["rows"])


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        for name in args.workload:
            if name != START:
                workload = WORKLOADS[name]
                bound = floor(workload, MODELS[workload.model], **LISTED["ceilings"])
                value = number(bound.value(workload, requests(workload)))
                print(f"{name:<4} {workload.model:<14} {workload.kind:<11} floor {value} {UNITS[workload.kind]}")
        return 0
    begin = time.monotonic()
    try:
        failed = run(args)
    except Failed as reason:
        print(f"no GPU to measure on: {reason}; --ceilings listed needs none", file=sys.stderr)
        return 1
    print(f"wrote {args.out} after {time.monotonic() - begin:.0f} s; {failed} rows failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
