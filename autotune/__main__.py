"""``python -m autotune``: search launch configurations on this machine's GPU and write the tables that are shipped."""

import argparse
import functools
import itertools
import math
import os
import sys
import time
from pathlib import Path

from autotune import ops, table
from autotune.ahead import CompiledAhead, write_list
from autotune.search import Compilers, Result, Task, prepare, tune
from autotune.worker import Failed, Worker
from tritonllm.kernels.compile.cache_folder import keep_binaries
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.chip import SHARED_MEMORY

START_SECONDS = 120.0  # importing torch on a cold machine
COMPILER_ENVIRON = {"TRITONLLM_CPU_BACKEND": "compile", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def parse(argv: list[str] | None) -> argparse.Namespace:
    what_it_does = "Search launch configurations on this machine's GPU and write the tables that are shipped."
    parser = argparse.ArgumentParser(prog="python -m autotune", description=what_it_does)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--op", action="append", choices=ops.names(), metavar="NAME", help="tune this one (repeatable)")
    what.add_argument("--all", action="store_true", help="tune all of them")
    what.add_argument("--list", action="store_true", help="print what can be tuned, and for which problems")
    what.add_argument("--check", action="store_true", help="report tables that do not fit the kernels any more")
    parser.add_argument("--gpu-table-dir", type=Path, default=tuning.TABLES, metavar="DIR", help="where tables lie")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, metavar="S", help="end within about S seconds")
    ahead = parser.add_mutually_exclusive_group()
    ahead.add_argument("--compile-only", type=Path, metavar="DIR", help="compile all candidates into DIR; needs no GPU")
    ahead.add_argument("--compiled", type=Path, metavar="DIR", help="do not compile again what --compile-only did")
    targets = [f"sm_{arch}" for arch in sorted(SHARED_MEMORY)]
    parser.add_argument("--target", choices=targets, default="sm_90", help="for --compile-only (default: %(default)s)")
    jobs = max(1, (os.cpu_count() or 1) - 2)
    parser.add_argument("--jobs", type=int, default=jobs, help="processes that compile (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if not args.limit_seconds > 0:
        parser.error(f"--limit-seconds must be positive, got {args.limit_seconds}")
    return args


def list_ops() -> None:
    for name in ops.names():
        print(name)
        for problem in ops.load(name).problems:
            print(f"    {problem.name}")


def entry(task: Task, result: Result) -> dict[str, object]:
    tuned = {} if result.config == task.compiled[0][0] else {"config": result.config}  # the default's is not repeated
    return {
        "key": task.key,
        **tuned,
        "us": round(result.us, 3),
        "default_us": round(result.default_us, 3),
        "tried": result.tried,
        "failed": len(result.failed),
    }


def line(task: Task, result: Result) -> str:
    gain = result.default_us / result.us
    return f"{task.name:<60} {result.default_us:>10.2f} {result.us:>10.2f} {gain:>6.2f}x"


def report(task: Task, result: Result | Failed) -> None:
    if isinstance(result, Failed):
        print(f"{task.name}: FAILED: {result}", flush=True)
        return
    tried = f"{result.tried} of {len(task.compiled)} tried" + (", time up" if result.cut_short else "")
    failed = f"; {len(result.failed)} failed, as {result.failed[0]}" if result.failed else ""
    print(f"{task.name}: {result.default_us:.2f} -> {result.us:.2f} us {result.config} ({tried}{failed})", flush=True)


def compile_ops(names: list[str], folder: Path, arch: int, jobs: int) -> int:
    """Compile every candidate into ``folder``; returns how many problems cannot be described."""
    folder.mkdir(parents=True, exist_ok=True)
    kernels = {"kernels": str(folder)}
    compilers = Compilers(jobs, lambda: Worker("autotune.measure:Compiler", COMPILER_ENVIRON, kernels))
    try:
        tasks, errors = prepare([ops.load(name) for name in names], compilers, arch, SHARED_MEMORY[arch])
        for what in errors:
            print(f"FAILED: {what}", flush=True)
        for task, failures in write_list(folder, tasks, arch):
            print(f"{task.name}: {len(task.compiled)} candidates, {failures} failed", flush=True)
    finally:
        compilers.close()
    keep_binaries(folder)
    return len(errors)


def tune_ops(names: list[str], folder: Path, limit: float, jobs: int, compiled: Path | None) -> int:
    """Tune, write a table for each operation as it ends, print a summary; returns how many problems failed."""
    until = time.monotonic() + limit

    def compiler() -> Worker:
        return Worker("autotune.measure:Compiler", COMPILER_ENVIRON)

    compilers = Compilers(jobs, compiler) if compiled is None else CompiledAhead(compiled, jobs, compiler)
    gpu = Worker("autotune.measure:Gpu", arguments={} if compiled is None else {"kernels": str(compiled)})
    summary: list[str] = []
    try:
        machine = gpu.call("info", START_SECONDS)
        print(f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}", flush=True)
        tunables = [ops.load(name) for name in names]
        before = functools.partial(table.tuned, folder, machine["gpu"])
        tasks, errors = prepare(tunables, compilers, machine["arch"], machine["shared_limit"], before)
        for what in errors:
            print(f"FAILED: {what}", flush=True)
        failures = len(errors)
        by_op = itertools.groupby(tune(tasks, gpu, until), key=lambda done: done[0].tunable)
        for tunable, done in by_op:
            entries = []
            for task, result in done:
                report(task, result)
                if isinstance(result, Failed):
                    failures += 1
                else:
                    entries.append(entry(task, result))
                    summary.append(line(task, result))
            if entries:
                print(f"wrote {table.write(table.build(tunable, machine, entries), folder)}", flush=True)
    finally:
        gpu.close()
        compilers.close()
    print(f"\n{'':<60} {'default us':>10} {'tuned us':>10}", *summary, sep="\n")
    return failures


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        list_ops()
        return 0
    if args.check:
        wrong = table.check(args.gpu_table_dir, ops.load)
        print("\n".join(wrong) or "every table fits its kernels")
        return 1 if wrong else 0
    names = ops.names() if args.all else list(dict.fromkeys(args.op))
    if args.compile_only:
        return 1 if compile_ops(names, args.compile_only, int(args.target.removeprefix("sm_")), args.jobs) else 0
    try:
        table.check_folder(args.gpu_table_dir)
        failures = tune_ops(names, args.gpu_table_dir, args.limit_seconds, args.jobs, args.compiled)
    except (ValueError, OSError) as reason:
        print(reason, file=sys.stderr)
        return 1
    except Failed as reason:
        print(f"no GPU to tune on: {reason}", file=sys.stderr)
        return 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
