"""``python -m bench.kv_link``: blocks of the cache from one GPU to another one of a host, with the connector CudaIpc.

Two processes, a GPU each. One keeps blocks in its GPU's memory for others, the other one loads them into slots of its
own, as engines do, without their models. ``link`` is what one plain copy between the GPUs takes, through the same
driver and beside nothing else. ``loads`` are blocks of a model's shape: the time of one ``load`` from the question to
the last block that has been proved, in milliseconds, in GB/s, and as a share of the plain copy. Their slots lie side by
side, as a tier hands them out while it has some left, or scattered (``shuffled``). A row is written only if every block
that came is the one that was saved. Each figure is the median of some repetitions, after one that does not count.
"""

import argparse
import datetime
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autotune.revision import commit
from bench.engine_worker import machine
from bench.swap import BLOCK_SIZE, LAYOUTS
from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.dist.device_copies import load_cuda
from tritonllm.engine.transfer.connector import DeviceSlots
from tritonllm.engine.transfer.ipc import DeviceReads
from tritonllm.engine.transfer.ipc_memory import MakeDevice
from tritonllm.engine.transfer.peer import Peer, PeerSettings

PATIENCE = 300.0  # seconds without an answer
Start = Callable[[], MakeDevice]  # of a process
Say = Callable[[Any], None]


class Job(NamedTuple):
    """What both processes know.

    Attributes:
        blocks: of each load.
        block_bytes: a multiple of 8.
        link_bytes: of a plain copy.
    """

    blocks: tuple[int, ...]
    block_bytes: int
    link_bytes: int
    repeats: int

    @property
    def most(self) -> int:
        return max(self.blocks)

    @property
    def keys(self) -> list[bytes]:
        return [number.to_bytes(16, "little") for number in range(self.most)]


def place_of(gpu: int | None) -> torch.device:
    return torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def contents(blocks: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """``[N, block_bytes // 8]`` int64: what block ``blocks[n]`` holds, different in every word."""
    words = torch.arange(block_bytes // 8, device=blocks.device)
    return blocks[:, None] * (block_bytes // 8) + words


def make_slots(job: Job, place: torch.device) -> tuple[torch.Tensor, DeviceSlots]:
    slots = torch.zeros(job.most, job.block_bytes // 8, dtype=torch.int64, device=place)
    return slots, DeviceSlots(slots.data_ptr(), (job.most, job.block_bytes), place.index, slots)


def make_peer(job: Job, role: str, make: MakeDevice, slots: DeviceSlots) -> Peer:
    config = KVTransferConfig(kv_connector="CudaIpc", kv_role=role, kv_connector_extra_config={"timeout": 60.0})
    size = max(2, job.most) * job.block_bytes
    peer = Peer(config, PeerSettings(peers=["127.0.0.1"], max_bytes=size), DeviceReads(make))
    peer.register([slots])
    return peer


def synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def keep(start: Start, gpu: int | None, job: Job, pipe: Connection) -> None:
    """The process that has blocks, until it is told to end."""

    def work(say: Say) -> None:
        make, place = start(), place_of(gpu)
        slots, described = make_slots(job, place)
        slots.copy_(contents(torch.arange(job.most, device=place), job.block_bytes))
        synchronize(place)
        peer = make_peer(job, "kv_producer", make, described)
        if peer.save(job.keys, range(job.most), lambda: True).result(PATIENCE) != job.most:
            raise RuntimeError("not all blocks could be kept: no result")
        plain = make(gpu)
        address = plain.allocate(job.link_bytes)
        say((peer.offer(), plain.export(address)))
        pipe.recv()
        peer.close()
        plain.free(address)

    told(work, pipe)


def bring(start: Start, gpu: int | None, job: Job, offer: dict[str, Any], handle: bytes, pipe: Connection) -> None:
    """The process that loads: tells of the plain copy, and of each row."""

    def work(say: Say) -> None:
        make, place = start(), place_of(gpu)
        say(link(make, place, handle, job))
        slots, described = make_slots(job, place)
        peer = make_peer(job, "kv_consumer", make, described)
        for blocks in job.blocks:
            for shuffled in (False, True) if blocks > 1 else (False,):
                say(load(peer, slots, offer, job, blocks, shuffled))
        peer.close()

    told(work, pipe)


def told(work: Callable[[Say], None], pipe: Connection) -> None:
    """Do it; the other end hears of each thing that is said, of the end, and of what goes wrong."""
    try:
        work(lambda said: pipe.send(("said", said)))
        pipe.send(("ended", None))
    except BaseException as error:  # told to the parent, which raises it
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


def link(make: MakeDevice, place: torch.device, handle: bytes, job: Job) -> dict[str, Any]:
    """One plain copy of the other GPU's memory."""
    device = make(place.index)
    target = torch.empty(job.link_bytes, dtype=torch.uint8, device=place)
    synchronize(place)
    address, times = device.open(handle), []
    for _ in range(1 + job.repeats):
        begin = time.perf_counter()
        device.copy([(target.data_ptr(), address, job.link_bytes)])()
        times.append(time.perf_counter() - begin)
    device.close(address)
    return {"bytes": job.link_bytes, "gb_per_s": job.link_bytes / statistics.median(times[1:]) / 1e9}


def load(
    peer: Peer, slots: torch.Tensor, offer: dict[str, Any], job: Job, blocks: int, shuffled: bool
) -> dict[str, Any]:
    """A row.

    Raises:
        RuntimeError: a block did not come, or is another one.
    """
    generator = torch.Generator().manual_seed(0)
    where = torch.randperm(job.most, generator=generator)[:blocks] if shuffled else torch.arange(blocks)
    keys, into = job.keys[:blocks], where.tolist()
    numbers, times = torch.arange(blocks, device=slots.device), []
    for _ in range(1 + job.repeats):
        slots.zero_()
        synchronize(slots.device)
        begin = time.perf_counter()
        came = peer.load(keys, into, offer).result(PATIENCE)
        times.append(time.perf_counter() - begin)
        found = slots[where.to(slots.device)]
        if not all(came) or not torch.equal(found, contents(numbers, job.block_bytes)):
            raise RuntimeError(f"{came.count(False)} of {blocks} blocks did not come, or others came: no result")
    seconds, size = statistics.median(times[1:]), blocks * job.block_bytes
    row = {"tokens": blocks * BLOCK_SIZE, "blocks": blocks, "block_bytes": job.block_bytes, "shuffled": shuffled}
    return {**row, "ms": 1e3 * seconds, "gb_per_s": size / seconds / 1e9}


def measure(job: Job, gpus: Sequence[int | None], start: Start, row: Callable[[dict[str, Any]], None]) -> None:
    """Run both processes.

    Args:
        gpus: of the one that has blocks, and of the one that loads them; ``None``: the CPU.
        row: is called with the plain copy and with each load.

    Raises:
        RuntimeError: one of them has failed, or hangs.
    """
    spawn = multiprocessing.get_context("spawn")
    processes = []

    def begin(work: Callable[..., None], *given: Any) -> Connection:
        mine, other = spawn.Pipe()
        processes.append(spawn.Process(target=work, args=(start, *given, other), daemon=True))
        processes[-1].start()
        other.close()
        return mine

    try:
        owner = begin(keep, gpus[0], job)
        offer, handle = heard(owner)
        reader = begin(bring, gpus[1], job, offer, handle)
        while (said := heard(reader)) is not None:
            row(said)
        owner.send("end")
        heard(owner)
    finally:
        for process in processes:
            process.kill()
            process.join()


def heard(pipe: Connection) -> Any:
    """What a process says; ``None`` at its end."""
    if not pipe.poll(PATIENCE):
        raise RuntimeError(f"a process has said nothing for {PATIENCE:.0f} s")
    try:
        kind, value = pipe.recv()
    except EOFError as error:
        raise RuntimeError("a process has ended without a word") from error
    if kind == "failed":
        raise RuntimeError(value)
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_link", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="llama-3.1-8b", choices=LAYOUTS, help="of a block (%(default)s)")
    parser.add_argument("--layers", type=int, default=32, metavar="N", help="of them (%(default)s)")
    parser.add_argument("--tokens", default="16,1024,8192,16384,32768", metavar="N,N", help="of a load (%(default)s)")
    parser.add_argument("--link-bytes", type=int, default=1 << 30, metavar="N", help="of a plain copy (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="%(default)s")
    parser.add_argument("--gpus", default="0,1", metavar="A,B", help="who has blocks, and who loads them (%(default)s)")
    out = Path(__file__).parent / "results" / "kv-link.json"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="(%(default)s)")
    args = parser.parse_args(argv)
    args.gpus = [None if one == "cpu" else int(one) for one in args.gpus.split(",")]
    if len(args.gpus) != 2:
        parser.error(f"--gpus must name two, got {len(args.gpus)}")
    if any(tokens < BLOCK_SIZE for tokens in map(int, args.tokens.split(","))):
        parser.error(f"--tokens must be at least {BLOCK_SIZE} each, which is a block")
    return args


def main(argv: list[str] | None = None, start: Start = load_cuda) -> int:
    """Args:
    start: makes what makes devices, in each process; for tests.
    """
    args = parse(argv)
    here = torch.cuda.device_count()
    if any(gpu is not None and gpu >= here for gpu in args.gpus):
        print(f"needs the GPUs that --gpus names: there are {here}", file=sys.stderr)
        return 1
    layout = LAYOUTS[args.layout]
    block_bytes = 2 * args.layers * BLOCK_SIZE * layout.kv_heads * layout.head_size * 2
    blocks = tuple(int(tokens) // BLOCK_SIZE for tokens in args.tokens.split(","))
    job = Job(blocks, block_bytes, args.link_bytes, args.repeats)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"machine": machine(), "commit": commit(), "date": now}
    report |= {"layout": args.layout, "layers": args.layers, "link": {}, "loads": []}
    if None not in args.gpus and args.gpus[0] != args.gpus[1]:
        report["peer_access"] = torch.cuda.can_device_access_peer(args.gpus[1], args.gpus[0])

    def take(row: dict[str, Any]) -> None:
        if not report["link"]:
            report["link"] = row
        else:
            row["percent_of_link"] = 100 * row["gb_per_s"] / report["link"]["gb_per_s"]
            report["loads"].append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")

    try:
        measure(job, args.gpus, start, take)
    except RuntimeError as error:
        print(f"no result: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
