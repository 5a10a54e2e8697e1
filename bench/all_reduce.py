"""``python -m bench.all_reduce``: sums over the GPUs of this machine, in microseconds.

Ours (:mod:`tritonllm.kernels.collective`) in one shot and in two, alone and with the residual addition and RMS norm;
NCCL's, alone and with our launch of addition and norm behind it; and those of ``torch.ops.symm_mem``. Rows are of
4096 elements in bfloat16 (of 2048 where there is less than one). A time is that of one call out of a CUDA graph of
many; each is written only if the sum was right. The ranks are processes. If one hangs, they are ended, the row says so,
and new ones go on with the next.
"""

import argparse
import datetime
import json
import multiprocessing
import queue
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autotune.revision import commit
from bench.engine_worker import machine
from tritonllm.dist.connect import connect
from tritonllm.dist.group import ConnectedGroup
from tritonllm.dist.symmetric import SymmetricGroup
from tritonllm.kernels import fused_add_rms_norm
from tritonllm.kernels.collective import AddedNorm, all_reduce_ref, sum_rows

SIZES = [1 << power for power in (12, 13, 14, 16, 18, 19, 20, 21, 22, 23, 24, 25)]
VARIANTS = (
    "one-shot",
    "one-shot, norm",
    "two-shot",
    "two-shot, norm",
    "one-shot, norm apart",
    "NCCL",
    "NCCL, norm apart",
    "torch one-shot",
    "torch two-shot",
)
DTYPE = torch.bfloat16
CALLS, REPLAYS = 20, 10
RIGHT = 1e-2  # relative error of a norm


class Job(NamedTuple):
    """One row of the results."""

    variant: str
    nbytes: int

    @property
    def shape(self) -> tuple[int, int]:
        columns = min(4096, self.nbytes // DTYPE.itemsize)
        return self.nbytes // DTYPE.itemsize // columns, columns

    def __str__(self) -> str:
        return f"{self.variant} of {self.nbytes} bytes"


class Tensors(NamedTuple):
    """What a call works on, and what it should give."""

    part: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    total: torch.Tensor
    normed: torch.Tensor


def tensors(job: Job, rank: int, size: int) -> Tensors:
    generator = torch.Generator("cuda").manual_seed(job.nbytes)
    rows, columns = job.shape
    parts = torch.randn(size, rows, columns, generator=generator, device="cuda").to(DTYPE)
    residual = torch.randn(rows, columns, generator=generator, device="cuda").to(DTYPE)
    weight = torch.randn(columns, generator=generator, device="cuda").to(DTYPE)
    total = all_reduce_ref(list(parts))
    normed = all_reduce_ref(list(parts), added=AddedNorm(residual.clone(), weight))
    return Tensors(parts[rank].clone(), residual, weight, total, normed)


def call_of(job: Job, group: SymmetricGroup, t: Tensors) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
    """A call, which returns its result, and the right one."""
    kind, _, with_norm = job.variant.partition(", ")
    expected = t.normed if with_norm else t.total
    if kind.startswith("torch"):
        return _of_torch(kind, t.part), expected
    if kind == "NCCL":
        add_up: Callable[[], torch.Tensor] = lambda: ConnectedGroup.all_reduce(group, t.part)  # noqa: E731
    else:
        inbox, two_shot = group.inbox, kind == "two-shot"
        if inbox is None:
            raise RuntimeError("the GPUs do not share memory")
        added = AddedNorm(t.residual, t.weight) if with_norm == "norm" else None

        def add_up() -> torch.Tensor:
            sum_rows(t.part, inbox, added, t.part, two_shot=two_shot)
            return t.part

    if with_norm == "norm apart":
        return lambda: fused_add_rms_norm(add_up(), t.residual, t.weight)[0], expected
    return add_up, expected


def _of_torch(kind: str, part: torch.Tensor) -> Callable[[], torch.Tensor]:
    import torch.distributed._symmetric_memory as symmetric

    world = dist.group.WORLD
    assert world is not None
    x = symmetric.empty(part.numel(), dtype=part.dtype, device=part.device)
    symmetric.rendezvous(x, world)
    x.copy_(part.view(-1))
    operation = torch.ops.symm_mem
    if kind == "torch one-shot":
        return lambda: operation.one_shot_all_reduce(x, "sum", world.group_name).view_as(part)
    return lambda: operation.two_shot_all_reduce_(x, "sum", world.group_name).view_as(part)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not error < RIGHT:
        raise RuntimeError(f"wrong: the relative error is {error:.3g}")


def microseconds(call: Callable[[], Any], group: ConnectedGroup, repeats: int, calls: int) -> list[float]:
    """Of one call out of a graph, by repetition."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    found = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(1 + repeats):
        group.least(0)  # all are here
        graph.replay()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / (REPLAYS * calls))
    return found[1:]


def measure(job: Job, group: SymmetricGroup, repeats: int) -> dict[str, Any]:
    """Check and time one job on this rank."""
    if job.variant.startswith(("one", "two")):
        group.reserve(job.shape[1], DTYPE)
    t = tensors(job, group.rank, group.size)
    call, expected = call_of(job, group, t)
    check(call(), expected)
    call()
    torch.cuda.synchronize()
    group.least(0)
    times = microseconds(call, group, repeats, CALLS if job.nbytes <= 2 << 20 else CALLS // 4)
    return {"min_us": min(times), "median_us": statistics.median(times)}


def run_rank(rank: int, size: int, ports: tuple[int, int], jobs: list[Job], repeats: int, told: Any) -> None:
    """A rank's process."""

    def start() -> Callable[[Job], dict[str, Any]]:
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        store, others = (dist.TCPStore("127.0.0.1", port, is_master=False) for port in ports)
        group = connect(store, rank, size, device, timeout=120.0)
        assert isinstance(group, SymmetricGroup)
        if any(job.variant.startswith("torch") for job in jobs):
            dist.init_process_group("nccl", store=others, rank=rank, world_size=size, device_id=device)
        return lambda job: measure(job, group, repeats)

    tell_rows(rank, jobs, start, told)


def tell_rows(rank: int, jobs: list[Any], start: Callable[[], Callable[[Any], dict[str, Any]]], told: Any) -> None:
    """Tell of each job when it begins and how it went; ``start`` gives what measures one."""
    try:
        measure_job = start()
        for job in jobs:
            told.put((rank, "begins", job, None))
            try:
                with torch.inference_mode():
                    told.put((rank, "row", job, measure_job(job)))
            except RuntimeError as error:
                told.put((rank, "row", job, {"failed": f"{type(error).__name__}: {str(error)[:300]}"}))
        told.put((rank, "ends", None, None))
    except BaseException:
        told.put((rank, "broken", None, traceback.format_exc()))
    told.close()
    told.join_thread()


def rows_of(
    size: int, jobs: list[Any], repeats: int, patience: float, run: Callable[..., None] = run_rank
) -> Iterator[dict[str, Any]]:
    """Rank 0's row of each job, tuples with names; ranks that give none in time, or end, are started anew for the jobs
    that follow. ``run`` is what their processes do."""
    left = list(jobs)
    while left:
        reason = ""
        for job, row in _of_one_start(size, left, repeats, patience, run):
            if job is None:
                reason = row["failed"]
                break
            left = left[left.index(job) + 1 :]
            yield job._asdict() | row
        if reason and left:
            yield left.pop(0)._asdict() | {"failed": reason}
        elif not reason:
            return


def _of_one_start(
    size: int, jobs: list[Any], repeats: int, patience: float, run: Callable[..., None]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    spawn = multiprocessing.get_context("spawn")
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    told: Any = spawn.Queue()
    arguments = size, (stores[0].port, stores[1].port), jobs, repeats, told
    processes = [spawn.Process(target=run, args=(rank, *arguments), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    ended, stage = set[int](), dict.fromkeys(range(size), "the start")
    try:
        while len(ended) < size:
            try:
                rank, what, job, value = told.get(timeout=patience)
            except queue.Empty:
                yield None, {"failed": f"no sign for {patience:.0f} s, in {stage}"}
                return
            if what == "broken":
                yield None, {"failed": f"rank {rank}: {value}"}
                return
            if what == "begins":
                stage[rank] = str(job)
            elif what == "ends":
                ended.add(rank)
            elif rank == 0:
                yield job, value
    finally:
        for process in processes:
            process.kill()
            process.join()


def line(row: dict[str, Any]) -> str:
    name = f"{row['nbytes']:>9} bytes  {row['variant']:<22}"
    return name + (row.get("failed") or f"{row['median_us']:8.2f} us (min {row['min_us']:.2f})")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.all_reduce", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="GPUs (all of this machine)")
    parser.add_argument("--bytes", default=",".join(map(str, SIZES)), metavar="4096,...", help="of a sum (%(default)s)")
    parser.add_argument("--variants", default=";".join(VARIANTS), metavar="A;B", help="some of them (%(default)s)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    parser.add_argument("--patience", type=float, default=45.0, metavar="S", help="without a sign of a rank")
    out = Path(__file__).parent / "results" / "all-reduce.json"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="(%(default)s)")
    args = parser.parse_args(argv)
    args.bytes, args.variants = list(map(int, args.bytes.split(","))), args.variants.split(";")
    if unknown := [name for name in args.variants if name not in VARIANTS]:
        parser.error(f"--variants must name some of {'; '.join(VARIANTS)}, got {unknown}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    size = torch.cuda.device_count() if args.ranks is None else args.ranks
    if size < 2 or size > torch.cuda.device_count():
        print(f"needs two GPUs or more: there are {torch.cuda.device_count()}, and --ranks is {args.ranks}")
        return 1
    report: dict[str, Any] = {"machine": machine(), "commit": commit(), "ranks": size}
    report |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "sums": []}
    jobs = [Job(variant, nbytes) for variant in args.variants for nbytes in args.bytes]
    for row in rows_of(size, jobs, args.repeats, args.patience):
        print(line(row), flush=True)
        report["sums"].append(row)
        args.out.write_text(json.dumps(report, indent=1) + "\n")  # also if this is ended
    return int(any("failed" in row for row in report["sums"]))


if __name__ == "__main__":
    sys.exit(main())
