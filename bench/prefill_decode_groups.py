"""The groups of servers that ``bench.prefill_decode`` compares, each on the same GPUs.

``split``: half of the GPUs compute prompts, the other half decode, a server on each, behind a router. ``shared``: one
server with an engine on each GPU. ``chunked``: the same with few tokens a step, so that prompts come in short chunks.
``routed``: a server on each GPU behind a router, all of them for everything; how much of a difference is the router's,
and that of several processes which speak HTTP.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serving import Listening, Router, Server

GROUPS = ("split", "shared", "chunked", "routed")
CONNECTORS = ("CudaIpc", "Peer", "Nixl")
COUNTERS = {name: f"tritonllm:kv_transfer_{name}_blocks_total" for name in ("saved", "fetched", "missed")}
VISIBLE, HOST = "CUDA_VISIBLE_DEVICES", "127.0.0.1"
MOST_WARNINGS = 5


@dataclass(frozen=True)
class Setup:
    """What groups are made of.

    Attributes:
        gpus: each as ``CUDA_VISIBLE_DEVICES`` names it; all ``cpu``: on the CPU.
        connector: of :data:`CONNECTORS`.
        tier_gib: slots for blocks that come and go, of each server of a split group.
        kept_gib: copies for others, of each server that computes prompts.
        prefill_min_tokens: shorter prompts are not split.
        chunk: ``max_num_batched_tokens`` of the chunked group.
        sees_all: each server of a GPU sees all of them and is told which is its own; else it sees that one alone.
        options: of all servers.
    """

    gpus: tuple[str, ...]
    connector: str
    tier_gib: float
    kept_gib: float
    prefill_min_tokens: int
    chunk: int
    sees_all: bool = False
    options: tuple[str, ...] = ()

    def of_group(self, name: str) -> dict[str, Any]:
        """What of it concerns one group only."""
        split = {"connector": self.connector, "prefill_min_tokens": self.prefill_min_tokens}
        return {"split": split, "chunked": {"max_num_batched_tokens": self.chunk}}.get(name, {})

    def one(self, gpu: str) -> tuple[dict[str, str], tuple[str, ...]]:
        """Environment and options of a server on one GPU."""
        if gpu == "cpu":
            return {}, ()
        if self.sees_all:
            return self.all()[0], ("--device", f"cuda:{self.gpus.index(gpu)}")
        return {VISIBLE: gpu}, ()

    def all(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """The same of a server on all GPUs."""
        environment = {} if "cpu" in self.gpus else {VISIBLE: ",".join(self.gpus)}
        return environment, ("--data-parallel-size", str(len(self.gpus)))


@dataclass(frozen=True)
class Part:
    """One server of a group.

    Attributes:
        environment: variables that are set for it.
        options: of the command, beside those of all servers.
        role: of the router's backend.
    """

    environment: Mapping[str, str]
    options: tuple[str, ...]
    role: str = ""


def parts_of(name: str, setup: Setup) -> list[Part]:
    """The servers of a group."""
    if name in ("shared", "chunked"):
        environment, options = setup.all()
        few = ("--max-num-batched-tokens", str(setup.chunk)) if name == "chunked" else ()
        return [Part(environment, options + few)]
    half, found = len(setup.gpus) // 2, []
    for number, gpu in enumerate(setup.gpus):
        environment, options = setup.one(gpu)
        prefill = name == "split" and number < half
        if name == "split":
            options += _sharing(setup, "kv_producer" if prefill else "kv_consumer")
        found.append(Part(environment, options, "prefill" if prefill else ""))
    return found


def _sharing(setup: Setup, role: str) -> tuple[str, ...]:
    keeps = role == "kv_producer"
    extra = {"host": HOST, "max_bytes": int(setup.kept_gib * (1 << 30))} if keeps else {"peers": [HOST]}
    transfer = {"kv_connector": setup.connector, "kv_role": role, "kv_connector_extra_config": extra}
    return "--kv-offloading-size", str(setup.tier_gib), "--kv-transfer-config", json.dumps(transfer)


@dataclass(frozen=True)
class Group:
    """Servers that run.

    Attributes:
        url: where requests go.
        servers: all of them.
    """

    url: str
    servers: Sequence[Server]

    @property
    def start_seconds(self) -> float:
        return max(server.start_seconds for server in self.servers)

    def counts(self) -> dict[str, float]:
        """Totals since the start: blocks that went from server to server, and preemptions."""
        counters = {**COUNTERS, "preemptions": "vllm:num_preemptions_total"}
        return {name: sum(server.metric(metric) for server in self.servers) for name, metric in counters.items()}

    def warnings(self) -> list[str]:
        """Some of the different warnings and errors in the servers' logs."""
        found = [re.findall(r"^(?:WARNING|ERROR)\b.*", one.log, re.MULTILINE | re.IGNORECASE) for one in self.servers]
        return list(dict.fromkeys(line for lines in found for line in lines))[:MOST_WARNINGS]


@contextmanager
def started(name: str, setup: Setup, folder: Path) -> Iterator[Group]:
    """A group that is ready for requests. Its servers start and end together.

    Args:
        folder: of the model's configuration.

    Raises:
        RuntimeError: a server did not start; the message holds the end of its log.
    """
    parts = parts_of(name, setup)
    with ThreadPoolExecutor(len(parts)) as threads, ExitStack() as stack:
        starting = [threads.submit(Server, folder, [*setup.options, *part.options], part.environment) for part in parts]
        stack.callback(_close_all, starting, threads)
        servers = [future.result() for future in starting]
        url = servers[0].url
        if len(servers) > 1:
            config = folder / "router.toml"
            config.write_text(router_config([one.url for one in servers], parts, setup.prefill_min_tokens))
            router = Router(["--config", str(config)])
            stack.callback(router.close)
            url = router.url
        yield Group(url, servers)


def router_config(urls: Sequence[str], parts: Sequence[Part], prefill_min_tokens: int) -> str:
    """The router's TOML. Prompts of the benchmark have nothing in common, so the load alone decides."""
    lines = ['policy = "least-tokens"', f"prefill_min_tokens = {prefill_min_tokens}", "health_interval = 1.0"]
    lines.append("health_timeout = 10.0")  # nobody fails here, and a busy server is no dead one
    for url, part in zip(urls, parts, strict=True):
        lines += ["", "[[backends]]", f'url = "{url}"', *([f'role = "{part.role}"'] if part.role else [])]
    return "\n".join(lines) + "\n"


def _close_all(starting: Sequence["Future[Server]"], threads: ThreadPoolExecutor) -> None:
    """Also of a group of which one has not started: the others are waited for."""
    made: list[Listening] = [future.result() for future in starting if future.exception() is None]
    list(threads.map(lambda one: one.close(), made))
