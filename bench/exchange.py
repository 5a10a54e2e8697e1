"""``python -m bench.exchange``: rows to the GPUs of this machine that have their experts, and back, in microseconds.

Ours (:mod:`tritonllm.kernels.collective.exchange`) and NCCL's, which gathers all rows, weights and ids on all ranks,
and on the way back sends all parts to where their rows came from, or reduces and scatters them. The way back ends with
the residual addition and RMS norm: ours in the same launch, behind NCCL's our launch of them. Experts are chosen at
random, each rank has as many rows, in bfloat16. A time is that of one call out of a CUDA graph of many of the same
kind; each is written only if the values were right. (Calls of one kind in a row are wrong in a model, where the other
kind comes between; here each brings what the one before has brought.) Beside it stand the bytes a second of those rows
that went from a GPU to others which have their experts, whatever else was sent.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autotune.revision import commit
from bench.all_reduce import check, microseconds, rows_of, tell_rows
from bench.engine_worker import machine
from tritonllm.dist.connect import connect
from tritonllm.dist.exchange import Exchange
from tritonllm.dist.group import ConnectedGroup
from tritonllm.dist.symmetric_exchange import SymmetricExchange
from tritonllm.kernels import fused_add_rms_norm
from tritonllm.kernels.collective import AddedNorm, combine_rows_ref, dispatch_rows_ref

SHAPES = {2048: 128, 7168: 256}  # experts, by columns
ROWS = [1, 8, 64, 256, 1024, 4096]
TOP_K = 8
VARIANTS = (
    "ours, dispatch",
    "ours, combine with norm",
    "NCCL, dispatch",
    "NCCL, combine with norm",
    "NCCL, reduce-scatter with norm",
)
DTYPE = torch.bfloat16
CALLS = 20


class Job(NamedTuple):
    """One row of the results."""

    variant: str
    columns: int
    rows: int

    def __str__(self) -> str:
        return f"{self.variant}: {self.rows} rows of {self.columns}"


class Tensors(NamedTuple):
    """What a call works on: what all ranks send and what their experts have made of it, and this rank's stream."""

    sent: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    parts: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor
    held: int


def tensors(job: Job, size: int) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(job.columns + job.rows)
    options: dict[str, Any] = {"generator": generator, "device": "cuda"}
    experts, sent, parts = SHAPES[job.columns], [], []
    for _ in range(size):
        x = torch.randn(job.rows, job.columns, **options).to(DTYPE)
        weights = torch.rand(job.rows, TOP_K, **options)
        ids = torch.rand(job.rows, experts, **options).topk(TOP_K).indices.int()
        sent.append((x, weights, ids, torch.zeros(job.rows, dtype=torch.int64, device="cuda")))
        parts.append(torch.randn(size * job.rows, job.columns, **options).to(DTYPE))
    residual = torch.randn(job.rows, job.columns, **options).to(DTYPE)
    weight = torch.randn(job.columns, **options).to(DTYPE)
    return Tensors(sent, parts, residual, weight, experts // size)


def bytes_sent(job: Job, t: Tensors, rank: int) -> int:
    """Of the rows that have an expert on another rank, once for each of those ranks."""
    there = t.sent[rank][2] // t.held
    others = [other for other in range(len(t.sent)) if other != rank]
    return sum(int((there == other).any(1).sum()) for other in others) * job.columns * DTYPE.itemsize


def dispatch_call(job: Job, exchange: Exchange, t: Tensors) -> Callable[[], Any]:
    """A call, once it has given the right rows."""

    def call() -> Any:
        return exchange.dispatch(*t.sent[exchange.rank], t.held, job.rows)

    found, expected = call(), dispatch_rows_ref(t.sent, exchange.rank, t.held, job.rows)
    here = (expected[2] >= 0).any(1)
    same = [torch.equal(one[here], other[here]) for one, other in zip(found, expected, strict=True)]
    if not all(same) or not torch.equal(found.ids, expected[2]):
        raise RuntimeError("wrong rows have arrived")
    return call


def combine_call(job: Job, exchange: Exchange, t: Tensors, *, scatters: bool) -> Callable[[], Any]:
    """A call, once it has given the right norm."""
    rank = exchange.rank
    choice = *t.sent[rank][2:], t.held, job.rows
    added, before = AddedNorm(t.residual, t.weight), AddedNorm(t.residual.clone(), t.weight)
    place = exchange.parts(job.rows, t.residual)
    parts = t.parts[rank] if place is None else place.copy_(t.parts[rank])
    if scatters:  # what is no expert's is zero
        ids = dispatch_rows_ref(t.sent, rank, t.held, job.rows)[2]
        parts = parts.masked_fill((ids < 0).all(1, keepdim=True), 0.0)
        out, options = torch.empty_like(t.residual), dist.ReduceScatterOptions()
        options.asyncOp = False
        backend: Any = exchange.group._backend  # type: ignore[attr-defined]

        def call() -> torch.Tensor:
            work = backend._reduce_scatter_base(out, parts, options)
            if work is not None:  # NCCL's, on the current stream, is none
                work.wait()
            return fused_add_rms_norm(out, t.residual, t.weight)[0]
    else:

        def call() -> torch.Tensor:
            return exchange.combine_normed(parts, *choice, added)

    exchange.dispatch(*t.sent[rank], t.held, job.rows)  # in turns
    check(call(), combine_rows_ref(t.parts, rank, *choice, added=before))
    return call


def measure(job: Job, group: ConnectedGroup, ours: SymmetricExchange, repeats: int) -> dict[str, Any]:
    """Check and time one job on this rank."""
    way, _, what = job.variant.partition(", ")
    exchange = Exchange(group)
    if way == "ours":
        ours.reserve(job.columns, DTYPE, TOP_K, max(ROWS))
        if ours.memory is None:
            raise RuntimeError("the GPUs do not share memory")
        exchange = ours
    t = tensors(job, group.size)
    if what == "dispatch":
        call = dispatch_call(job, exchange, t)
    else:
        call = combine_call(job, exchange, t, scatters=what.startswith("reduce-scatter"))
    call()
    torch.cuda.synchronize()
    group.least(0)
    times = microseconds(call, group, repeats, CALLS if job.rows <= 256 else CALLS // 4)
    median, sent = statistics.median(times), bytes_sent(job, t, group.rank)
    return {"min_us": min(times), "median_us": median, "bytes": sent, "gb_per_s": sent / median / 1e3}


def run_rank(rank: int, size: int, ports: tuple[int, int], jobs: list[Job], repeats: int, told: Any) -> None:
    """A rank's process."""

    def start() -> Callable[[Job], dict[str, Any]]:
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        store = dist.TCPStore("127.0.0.1", ports[0], is_master=False)
        group = connect(store, rank, size, device, timeout=120.0)
        assert isinstance(group, ConnectedGroup)
        group.introduce_all()
        ours = SymmetricExchange(group, device)
        return lambda job: measure(job, group, ours, repeats)

    tell_rows(rank, jobs, start, told)


def line(row: dict[str, Any]) -> str:
    name = f"{row['rows']:>5} rows of {row['columns']:>5}  {row['variant']:<31}"
    times = "{median_us:8.2f} us (min {min_us:.2f})  {gb_per_s:6.1f} GB/s"
    return name + (row.get("failed") or times.format(**row))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.exchange", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4", metavar="2,4", help="GPUs; those that are not there are left out")
    columns = ",".join(map(str, SHAPES))
    parser.add_argument("--columns", default=columns, metavar="N,...", help="some of them (%(default)s)")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), metavar="N,...", help="of a rank (%(default)s)")
    parser.add_argument("--variants", default=";".join(VARIANTS), metavar="A;B", help="some of them (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    parser.add_argument("--patience", type=float, default=45.0, metavar="S", help="without a sign of a rank")
    out = Path(__file__).parent / "results" / "exchange.json"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="(%(default)s)")
    args = parser.parse_args(argv)
    args.ranks, args.columns, args.rows = (
        [int(number) for number in given.split(",")] for given in (args.ranks, args.columns, args.rows)
    )
    args.variants = args.variants.split(";")
    if unknown := [name for name in args.variants if name not in VARIANTS]:
        parser.error(f"--variants must name some of {'; '.join(VARIANTS)}, got {unknown}")
    if unknown := [number for number in args.columns if number not in SHAPES]:
        parser.error(f"--columns must be some of {columns}, got {unknown}")
    if unknown := [number for number in args.rows if not 1 <= number <= max(ROWS)]:
        parser.error(f"--rows must be from 1 to {max(ROWS)}, got {unknown}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    sizes = [size for size in args.ranks if 2 <= size <= torch.cuda.device_count()]
    if not sizes:
        print(f"needs two GPUs or more: there are {torch.cuda.device_count()}, and --ranks is {args.ranks}")
        return 1
    report: dict[str, Any] = {"machine": machine(), "commit": commit(), "top_k": TOP_K, "experts": SHAPES}
    report |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "ways": []}
    for size in sizes:
        print(f"{size} ranks", flush=True)
        jobs = [Job(*job) for job in ((v, n, r) for n in args.columns for v in args.variants for r in args.rows)]
        for row in rows_of(size, jobs, args.repeats, args.patience, run_rank):
            print(line(row), flush=True)
            report["ways"].append({"ranks": size} | row)
            args.out.write_text(json.dumps(report, indent=1) + "\n")  # also if this is ended
    return int(any("failed" in row for row in report["ways"]))


if __name__ == "__main__":
    sys.exit(main())
