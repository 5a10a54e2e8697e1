"""The questions that are asked of the simulation, each a list of runs."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.cluster.routing import DEFAULTS, Routing, name_of
from bench.cluster.simulation import Cluster, Simulation
from bench.cluster.step_times import BLOCK, StepTimes
from bench.cluster.table import SHARED
from bench.cluster.traffic import Chats, Traffic, chats
from bench.reports import RESULTS
from tritonllm.http.hashing import placed

WIDE = 2.0  # a bound on a replica's load that long prompts do not reach by themselves
NO_BOUND = 1e9
MANY = 256  # GPUs; runs of more take minutes, so there are fewer
RATE = 4.0  # requests/s for each GPU: most of what the best policy without a shared store answers in time
HOST_BYTES = 250e9  # for each of 8 GPUs of a host with 2 TB
LINKS = {"50 GB/s": 50e9, "12.5 GB/s": 12.5e9, "3.1 GB/s": 3.125e9, "1.25 GB/s": 1.25e9}  # 400, 100, 25, 10 Gbit/s

SHAPE = Traffic(requests_per_second=1.0)  # each run has its own rate


@dataclass(frozen=True, kw_only=True)
class Run:
    """One simulation of a study.

    Attributes:
        label: what distinguishes it from the other runs of its study, by column.
        rate: requests/s for each GPU.
        traffic: with any rate.
    """

    study: str
    label: dict[str, Any]
    cluster: Cluster
    rate: float = RATE
    seed: int = 0
    traffic: Traffic = SHAPE


@dataclass(frozen=True)
class Span:
    """Simulated seconds: before anything is counted, and while it is."""

    warm_up: float = 10.0
    seconds: float = 20.0


@lru_cache(maxsize=1)  # runs that follow each other mostly have the same chats
def _chats(traffic: Traffic, span: Span, seed: int) -> Chats:
    return chats(traffic, span.warm_up + span.seconds, seed)


def row(run: Run, times: StepTimes, span: Span) -> dict[str, Any]:
    """Simulate, and return the row of the report."""
    traffic = replace(run.traffic, requests_per_second=run.rate * run.cluster.gpus)
    came = _chats(traffic, span, run.seed)
    simulation = Simulation(run.cluster, came, times, warm_up=span.warm_up, seconds=span.seconds, seed=run.seed)
    found = simulation.run()
    inputs = {"gpus": run.cluster.gpus, "rate": run.rate, "zipf": run.traffic.zipf, "seed": run.seed}
    inputs |= asdict(run.cluster.routing)
    inputs |= {k: v for k, v in asdict(run.cluster).items() if k not in ("gpus", "routing", "blocks")}
    return {"study": run.study, **run.label, "inputs": inputs, **found}


STICKY = Routing(policy="session", epsilon=WIDE)
LEAST = Routing(policy="least-tokens")
WAYS: dict[str, Routing] = {
    "random": Routing(policy="random"),
    "round-robin": Routing(policy="round-robin"),
    "least-tokens": LEAST,
    "prefix": Routing(policy="prefix"),
    "session": Routing(policy="session"),
    f"session, epsilon {WIDE:g}": STICKY,
}


def routing(sizes: list[int], host_tokens: int) -> Iterator[Run]:
    """Policies by the number of GPUs."""
    for gpus in sizes:
        ways = {name: way for name, way in WAYS.items() if gpus <= MANY or name not in ("round-robin", "session")}
        for name, way in ways.items():
            yield Run(study="routing", label={"GPUs": gpus, "policy": name}, cluster=Cluster(gpus=gpus, routing=way))
        shared = Cluster(gpus=gpus, routing=LEAST, shared_tokens=gpus * host_tokens)
        yield Run(study="routing", label={"GPUs": gpus, "policy": SHARED}, cluster=shared)


def bounds(gpus: int) -> Iterator[Run]:
    """How much more than the mean a replica may hold, and how popular the most popular system prompt is."""
    for policy in ("prefix", "session"):
        for epsilon in (0.25, 0.5, 1.0, 2.0, 4.0, NO_BOUND):
            way = Routing(policy=policy, epsilon=epsilon)
            label = {"policy": policy, "epsilon": "none" if epsilon == NO_BOUND else epsilon}
            yield Run(study="bounds", label=label, cluster=Cluster(gpus=gpus, routing=way))


def popularity(gpus: int) -> Iterator[Run]:
    """System prompts that are all alike in popularity, and one that most sessions have."""
    for zipf in (0.0, 1.0, 2.0):
        traffic = replace(SHAPE, zipf=zipf)
        for name in ("prefix", "session", f"session, epsilon {WIDE:g}"):
            label = {"largest share": float(traffic.popularity()[0]), "policy": name}
            cluster = Cluster(gpus=gpus, routing=WAYS[name])
            yield Run(study="popularity", label=label, cluster=cluster, traffic=traffic)


def load(gpus: int, host_tokens: int) -> Iterator[Run]:
    """More and more requests, with and without a store that all replicas share."""
    for rate in (3.0, 4.0, 5.0, 6.0, 7.0):
        for name, way, store in (("least-tokens", LEAST, 0), ("session", STICKY, 0), ("shared store", LEAST, 1)):
            cluster = Cluster(gpus=gpus, routing=way, shared_tokens=store * gpus * host_tokens)
            yield Run(study="load", label={"requests/s a GPU": rate, "way": name}, cluster=cluster, rate=rate)


def caches(gpus: int, host_tokens: int) -> Iterator[Run]:
    """Where sessions are kept that the GPU's cache has no room for, at a load for which it is too small."""
    shared = gpus * host_tokens
    for name, way in (("least-tokens", LEAST), ("session", STICKY)):
        none = Cluster(gpus=gpus, routing=way)
        tiers = {"the GPU only": none, "the host's memory": replace(none, host_tokens=host_tokens)}
        for link, rate in LINKS.items():
            tiers[f"a shared store at {link}"] = replace(none, shared_tokens=shared, link_bytes_per_second=rate)
        for kept, cluster in tiers.items():
            yield Run(study="caches", label={"policy": name, "kept in": kept}, cluster=cluster, rate=5.0)


def separate(gpus: int) -> Iterator[Run]:
    """Replicas that only compute prompts and others that only decode, at least two in all; links between them."""
    mixed = Cluster(gpus=gpus, routing=STICKY)
    yield Run(study="separate", label={"prefill : decode": "mixed", "link": ""}, cluster=mixed)
    for prefill in sorted({gpus * share // 16 for share in (8, 10, 11, 12, 13)} - {0}):
        label = {"prefill : decode": f"{prefill} : {gpus - prefill}", "link": "50 GB/s"}
        yield Run(study="separate", label=label, cluster=replace(mixed, prefill=prefill))
    prefill = max(1, gpus * 3 // 4)
    for name, link in list(LINKS.items())[1:]:
        label = {"prefill : decode": f"{prefill} : {gpus - prefill}", "link": name}
        cluster = replace(mixed, prefill=prefill, link_bytes_per_second=link)
        yield Run(study="separate", label=label, cluster=cluster)


def failures(sizes: list[int], at: float) -> Iterator[Run]:
    """Hosts of 8 GPUs that fail together."""
    for gpus in sizes:
        for lost in (0, 8, 16) if gpus <= MANY else (8,):
            for rate in (3.0, RATE) if gpus <= MANY else (RATE,):
                if lost < gpus:
                    cluster = Cluster(gpus=gpus, routing=STICKY, lost=lost, lost_at=at)
                    label = {"GPUs": gpus, "lost": lost, "requests/s a GPU": rate}
                    yield Run(study="failures", label=label, cluster=cluster, rate=rate)


def routers(sizes: list[int]) -> Iterator[Run]:
    """Router processes that each know the loads of their own requests only."""
    for gpus in sizes:
        for processes in (8, 64):
            for name in ("least-tokens", f"session, epsilon {WIDE:g}"):
                label = {"GPUs": gpus, "routers": processes, "policy": name}
                cluster = Cluster(gpus=gpus, routing=replace(WAYS[name], routers=processes))
                yield Run(study="routers", label=label, cluster=cluster)


def seeds(gpus: int) -> Iterator[Run]:
    """The same with other chats: what of a difference is chance."""
    for seed in range(3):
        for name in ("least-tokens", f"session, epsilon {WIDE:g}"):
            label = {"seed": seed, "policy": name}
            yield Run(study="seeds", label=label, cluster=Cluster(gpus=gpus, routing=WAYS[name]), seed=seed)


def all_runs(times: StepTimes, sizes: list[int], span: Span, seed: int) -> list[Run]:
    """Every run of every study, those of few GPUs first.

    Args:
        sizes: GPUs, ascending; studies that have one size take the second.
        seed: of the first run; the study of seeds takes those after it, too.
    """
    middle = sizes[min(1, len(sizes) - 1)]
    host_tokens = int(HOST_BYTES / times.kv_bytes)
    found: list[Iterator[Run]] = [
        routing(sizes, host_tokens),
        seeds(middle),
        bounds(middle),
        popularity(middle),
        load(middle, host_tokens),
        caches(middle, host_tokens),
        separate(max(2, middle)),
        failures([size for size in sorted({middle, sizes[-1]}) if size > 8], span.warm_up),
        routers([size for size in sizes if middle <= size <= MANY]),
    ]
    runs = (replace(run, seed=run.seed + seed) for study in found for run in study)
    return sorted(runs, key=lambda run: run.cluster.gpus)


def router_process(tokens: float, folder: Path = RESULTS) -> dict[str, Any]:
    """What one router process can take, from its processor time as bench.route measured it.

    Args:
        tokens: of an answer; each is an event of a stream.
    """
    rows = json.loads((folder / "route-cpu.json").read_text())["routing"]
    request = next(r["cpu_us"] for r in rows if r["what"] == "requests")
    event = next(r["cpu_us"] for r in rows if r["what"] == "streams" and r["at_once"] == 32)
    each = 1e-6 * (request + tokens * event)
    return {
        "source": "route-cpu.json: requests, and streams 32 at once",
        "request_us": request,
        "event_us": event,
        "answer_tokens": tokens,
        "requests_per_second": 1 / each,
        "gpus": 1 / each / RATE,
        "gpus_without_streams": 1e6 / request / RATE,
    }


def placing(sizes: list[int], clock: Callable[[], float] = time.process_time) -> list[dict[str, float]]:
    """Microseconds of this machine's processor that ``tritonllm.route`` takes to place one request."""
    rows = []
    for gpus in sizes:
        names, loads = [name_of(number).encode() for number in range(gpus)], [0] * gpus
        spent = []
        for turn in range(5):
            count = max(8, 2000 // gpus)
            begin = clock()
            for number in range(count):
                placed(b"session %d" % (turn * count + number), names, loads, DEFAULTS.balance_epsilon)
            spent.append(1e6 * (clock() - begin) / count)
        rows.append({"gpus": gpus, "us": statistics.median(spent)})
    return rows


def memory(times: StepTimes) -> dict[str, float]:
    """Tokens that caches have room for."""
    return {
        "gpu_tokens": times.blocks * BLOCK,
        "gpu_gb": 1e-9 * times.blocks * BLOCK * times.kv_bytes,
        "host_tokens": HOST_BYTES / times.kv_bytes,
        "host_gb": 1e-9 * HOST_BYTES,
    }
