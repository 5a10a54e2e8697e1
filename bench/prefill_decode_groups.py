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
from dataclasses import dataclass, field
from pathlib import Path

from bench.serving import Listening, Router, Server

GROUPS = ("split", "shared", "chunked", "routed")
CONNECTORS = ("CudaIpc", "Peer", "Nixl")
COUNTERS = {name: f"tritonllm:kv_transfer_{name}_blocks_total" for name in ("saved", "fetched", "missed")}
HOST = "127.0.0.1"
MOST_WARNINGS = 5


@dataclass(frozen=True)
class Setup:
    """What groups are made of.

    Attributes:
        gpus: each a value of ``CUDA_VISIBLE_DEVICES``; all ``cpu``: on the CPU.
        connector: of :data:`CONNECTORS`.
        tier_gib: slots for blocks that come and go, of each server of a split group.
        kept_gib: copies for others, of each server that computes prompts.
        chunk: ``max_num_batched_tokens`` of the chunked group.
        options: of all servers.
    """

    gpus: tuple[str, ...]
    connector: str
    tier_gib: float
    kept_gib: float
    chunk: int
    options: tuple[str, ...] = ()

    @property
    def on_cpu(self) -> bool:
        return set(self.gpus) == {"cpu"}


@dataclass(frozen=True)
class Part:
    """One server of a group.

    Attributes:
        gpus: that it sees.
        options: of the command, beside those of all servers.
        role: of the router's backend.
    """

    gpus: tuple[str, ...]
    options: tuple[str, ...] = ()
    role: str = ""


def parts_of(name: str, setup: Setup) -> list[Part]:
    """The servers of a group."""
    gpus = setup.gpus
    if name == "routed":
        return [Part((gpu,)) for gpu in gpus]
    if name == "split":
        half = len(gpus) // 2
        prefill, decode = _sharing(setup, "kv_producer"), _sharing(setup, "kv_consumer")
        return [Part((gpu,), prefill, "prefill") for gpu in gpus[:half]] + [Part((gpu,), decode) for gpu in gpus[half:]]
    options = ["--data-parallel-size", str(len(gpus))]
    if name == "chunked":
        options += ["--max-num-batched-tokens", str(setup.chunk)]
    return [Part(gpus, tuple(options))]


def _sharing(setup: Setup, role: str) -> tuple[str, ...]:
    keeps = role == "kv_producer"
    extra = {"host": HOST, "max_bytes": int(setup.kept_gib * (1 << 30))} if keeps else {"peers": [HOST]}
    transfer = {"kv_connector": setup.connector, "kv_role": role, "kv_connector_extra_config": extra}
    return "--kv-offloading-size", str(setup.tier_gib), "--kv-transfer-config", json.dumps(transfer)


@dataclass
class Group:
    """Servers that run.

    Attributes:
        url: where requests go.
        servers: all of them.
        prefill: those that compute prompts for the others.
    """

    url: str
    servers: Sequence[Server]
    prefill: Sequence[Server] = field(default_factory=list)

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
def started(name: str, setup: Setup, folder: Path, prefill_min_tokens: int) -> Iterator[Group]:
    """A group that is ready for requests. Its servers start and end together.

    Args:
        folder: of the model's configuration.
        prefill_min_tokens: shorter prompts are not split.

    Raises:
        RuntimeError: a server did not start; the message holds the end of its log.
    """
    parts = parts_of(name, setup)
    with ThreadPoolExecutor(len(parts)) as threads, ExitStack() as stack:
        starting = [
            threads.submit(Server, folder, [*setup.options, *part.options], _environment(part, setup)) for part in parts
        ]
        stack.callback(_close_all, starting, threads)
        servers = [future.result() for future in starting]
        url = servers[0].url
        if len(servers) > 1:
            config = folder / "router.toml"
            config.write_text(router_config([one.url for one in servers], parts, prefill_min_tokens))
            router = Router(["--config", str(config)])
            stack.callback(router.close)
            url = router.url
        prefill = [server for server, part in zip(servers, parts, strict=True) if part.role == "prefill"]
        yield Group(url, servers, prefill)


def _environment(part: Part, setup: Setup) -> Mapping[str, str]:
    return {} if setup.on_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(part.gpus)}


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
