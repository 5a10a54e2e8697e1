"""``python -m bench.kv_found``: how much sooner a replica answers when it finds a prefix that another one has computed.

Two engines, each in a process and on a GPU of its own. The one computes a prefix, and its connector saves the blocks.
The other one is then asked for the first token behind this prefix and 8 more tokens, three times in turns:

- ``computed``: the same for tokens that nobody has computed.
- ``found``: it has forgotten everything. Blocks come from the other engine through the connector.
- ``cached``: at once again, with the prefix in its own GPU's cache. That is the least that ``found`` can take.

Times are those of a whole ``LLM.generate`` in milliseconds, medians of some repetitions after one that does not count.
``times`` is computed / found, ``load_ms`` what of ``found`` the connector took for the blocks, and ``gb_per_s`` their
bytes by this time. A connector has a row only where every repetition found the whole prefix, had byte for byte the
blocks that the other engine has, and gave its token. ``FileStore`` writes into a folder in memory (``--folder``), which
stands for a tier in the host's memory that the replicas of a host share.

Rows are written one by one. ``--add`` keeps those that the file has, if they are of this machine and commit, so each
connector may be a run of its own. ``--rehearsal`` runs all of it on the CPU with a tiny model; its times say nothing.
"""

import argparse
import datetime
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from autotune.revision import commit
from bench.engine_worker import machine
from bench.engine_workloads import MODELS, write_model
from bench.kv_found_engine import NEW, Answer, Computed, Place, Remote
from bench.kv_layers import BLOCK_SIZE, block_bytes_of
from tritonllm.engine.transfer.connector import Params

CONNECTORS = ("CudaIpc", "FileStore", "Peer")
IN_HOST = ("FileStore", "Peer")  # that need no GPU
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 4096}
SPARE = 16  # blocks more than the longest prefix has
TIMEOUT = 60.0  # seconds that a request waits for blocks
KINDS = ("computed", "found", "cached")


class Asked(Protocol):
    """An engine: :class:`bench.kv_found_engine.Side`, or what stands for one in another process."""

    def compute(self, tokens: int, seed: int) -> Computed: ...

    def ask(self, tokens: int, seed: int, params: Params) -> Answer: ...

    def forget(self) -> None: ...

    def digest(self, tokens: int, seed: int) -> bytes: ...


class Job(NamedTuple):
    """What is measured.

    Attributes:
        folder: of the model's configuration.
        tokens: of the prefixes, from the shortest to the longest.
        block_bytes: of one block.
        gpus: of the engine that computes, and of the one that finds; ``None``: the CPU.
        options: more arguments of both engines.
        settings: more of the connectors, by their names.
    """

    folder: Path
    tokens: tuple[int, ...]
    block_bytes: int
    gpus: tuple[int | None, int | None]
    repeats: int
    options: dict[str, Any]
    settings: dict[str, dict[str, Any]]

    @property
    def most(self) -> int:
        """Blocks of the longest prefix, and some more."""
        return max(self.tokens) // BLOCK_SIZE + SPARE

    @property
    def all_bytes(self) -> int:
        """That are kept for others at once."""
        return (sum(self.tokens) // BLOCK_SIZE + SPARE) * self.block_bytes


def places(job: Job, connector: str, store: Path) -> list[Place]:
    """Both engines: the one that saves, and the one that loads.

    Args:
        store: an empty folder for ``FileStore``.
    """
    arguments: dict[str, Any] = {"model": str(job.folder), "load_format": "dummy", "skip_tokenizer_init": True}
    arguments |= {"block_size": BLOCK_SIZE, "num_blocks": 2 * job.most, "max_model_len": max(job.tokens) + 64}
    arguments |= {"max_num_seqs": 4, "max_num_batched_tokens": 8192}
    # as many slots again as the longest prefix has blocks: half of a tier is on its way at most
    arguments["kv_offloading_size"] = (2 * job.most + 1) * job.block_bytes / (1 << 30)
    extra: dict[str, Any] = {"timeout": TIMEOUT, "max_bytes": 2 * job.all_bytes}
    extra |= {"path": str(store)} if connector == "FileStore" else {"peers": ["127.0.0.1"]}
    if connector == "CudaIpc":
        extra["max_bytes"] = job.all_bytes  # they are allocated, on the GPU
    extra |= job.settings.get(connector, {})
    found = []
    for role, gpu in zip(("kv_producer", "kv_consumer"), job.gpus, strict=True):
        transfer = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
        device = "cpu" if gpu is None else f"cuda:{gpu}"
        found.append(Place(gpu, {**arguments, **job.options, "kv_transfer_config": transfer, "device": device}))
    return found


@contextmanager
def engines(job: Job, connector: str, store: Path) -> Iterator[tuple[Remote, Remote]]:
    """Both, started at the same time.

    Raises:
        RuntimeError: one does not start, or they would not find each other's blocks.
    """
    made: list[Remote] = []
    try:
        for place in places(job, connector, store):
            made.append(Remote(place))
        for one in made:
            one.wait()
        if made[0].facts["fingerprint"] != made[1].facts["fingerprint"]:
            raise RuntimeError("the two engines have different weights: no result")
        sizes = {one.facts["block_bytes"] for one in made}
        if sizes != {job.block_bytes}:
            raise RuntimeError(f"blocks have {sizes} bytes instead of {job.block_bytes}: no result")
        yield made[0], made[1]
    finally:
        for one in made:
            one.hang_up()
        for one in made:
            one.end()


def one_length(first: Asked, second: Asked, tokens: int, repeats: int) -> dict[str, list[Answer]]:
    """What the second engine's requests took, by kind, in order of the repetitions.

    Raises:
        RuntimeError: a prefix was not found as a whole, or something else was found.
    """
    prefix = first.compute(tokens, seed=0)
    took: dict[str, list[Answer]] = {kind: [] for kind in KINDS}
    for number in range(1 + repeats):
        took["computed"].append(second.ask(tokens, 1 + number, {}))
        second.forget()
        took["found"].append(second.ask(tokens, 0, prefix.params))
        if second.digest(tokens, 0) != prefix.digest:
            raise RuntimeError("other blocks were found than were computed: no result")
        took["cached"].append(second.ask(tokens, 0, prefix.params))
    for kind, answers in took.items():
        cached = 0 if kind == "computed" else tokens
        if any(answer.cached != cached for answer in answers):
            counts = [answer.cached for answer in answers]
            raise RuntimeError(f"{kind}: {counts} of {tokens} tokens were not computed, instead of {cached}: no result")
        loaded = tokens // BLOCK_SIZE if kind == "found" else 0
        if any(answer.loaded != loaded for answer in answers):
            counts = [answer.loaded for answer in answers]
            raise RuntimeError(f"{kind}: {counts} blocks were loaded instead of {loaded}: no result")
        if kind != "computed" and any(answer.token != prefix.token for answer in answers):
            raise RuntimeError(f"{kind}: another token came than where the prefix was computed: no result")
    return took


def row_of(connector: str, tokens: int, block_bytes: int, took: dict[str, list[Answer]]) -> dict[str, Any]:
    """A row of the report; the first repetition does not count."""
    times = {kind: [1e3 * answer.seconds for answer in answers[1:]] for kind, answers in took.items()}
    middle = {f"{kind}_ms": statistics.median(times[kind]) for kind in ("found", "computed", "cached")}
    load = statistics.median(answer.load_seconds for answer in took["found"][1:])
    size = tokens // BLOCK_SIZE * block_bytes
    row: dict[str, Any] = {"connector": connector, "tokens": tokens, "bytes": size, **middle}
    row |= {"times": middle["computed_ms"] / middle["found_ms"], "load_ms": 1e3 * load, "gb_per_s": size / load / 1e9}
    return row | {"values_ms": times}


def measure(job: Job, connector: str, folder: Path, row: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All lengths of a connector; those that fail have no row, and stderr says why.

    Args:
        folder: where ``FileStore`` keeps blocks.
        row: is called with each row.

    Returns:
        What the start of both engines took.

    Raises:
        RuntimeError: the engines do not start, or the folder has no room.
    """
    if connector == "FileStore" and (free := shutil.disk_usage(folder).free) < 1.1 * job.all_bytes:
        wanted = 1.1 * job.all_bytes / 1e9
        raise RuntimeError(f"--folder: {folder} has {free / 1e9:.1f} GB left of {wanted:.1f}: name another one")
    with tempfile.TemporaryDirectory(dir=folder if connector == "FileStore" else None, prefix="kv-found-") as store:
        say(f"{connector}: both engines start")
        with engines(job, connector, Path(store)) as (first, second):
            names = "start_seconds", "fingerprint_seconds"
            start = {"connector": connector, **{name: [one.facts[name] for one in (first, second)] for name in names}}
            say(json.dumps(start))
            for tokens in job.tokens:
                say(f"{connector}: {tokens} tokens")
                try:
                    took = one_length(first, second, tokens, job.repeats)
                    given = {"settings": job.settings[connector]} if connector in job.settings else {}
                    row(row_of(connector, tokens, job.block_bytes, took) | given)
                except RuntimeError as error:
                    say(f"{connector}, {tokens} tokens: {error}")
    return start


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_found", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--connectors", metavar="A,B", help=f"{','.join(CONNECTORS)}; those that need no GPU on the CPU"
    )
    parser.add_argument("--tokens", metavar="N,N", help="of the prefixes (4096,16384,32768)")
    parser.add_argument("--model", default="llama-3.1-8b", choices=MODELS, help="whose shape (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="%(default)s")
    parser.add_argument("--gpus", default="0,1", metavar="A,B", help="who computes, and who finds (%(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="FileStore's blocks go here (%(default)s)"
    )
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="more arguments of LLM")
    example = """more of the connectors, as '{"FileStore": {"threads": 16}}'"""
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help=example)
    parser.add_argument("--add", action="store_true", help="to the rows that --out has")
    parser.add_argument("--rehearsal", action="store_true", help="a tiny model on the CPU")
    out = Path(__file__).parent / "results" / "kv-found.json"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="(%(default)s)")
    args = parser.parse_args(argv)
    args.gpus = (None, None) if args.rehearsal else tuple(map(int, args.gpus.split(",")))
    if len(args.gpus) != 2:
        parser.error(f"--gpus must name two, got {len(args.gpus)}")
    args.connectors = (args.connectors or ",".join(IN_HOST if args.rehearsal else CONNECTORS)).split(",")
    for name in args.connectors:
        if name not in (IN_HOST if args.rehearsal else CONNECTORS):
            parser.error(f"--connectors: {name!r} is none that can be measured here")
    args.tokens = tuple(map(int, (args.tokens or ("64,256" if args.rehearsal else "4096,16384,32768")).split(",")))
    if any(tokens < BLOCK_SIZE or tokens % BLOCK_SIZE for tokens in args.tokens):
        parser.error(f"--tokens must be multiples of {BLOCK_SIZE}, which is a block")
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    return args


def job_of(args: argparse.Namespace, root: Path) -> Job:
    """Writes the model's configuration into ``root``."""
    config, options = MODELS[args.model], args.options
    if args.rehearsal:
        config, options = config | TINY, {"dtype": "float32", **options}
    folder = write_model(args.model, config, root)
    block_bytes = block_bytes_of(config, options.get("dtype") == "float32")
    return Job(folder, args.tokens, block_bytes, args.gpus, args.repeats, options, args.settings)


def begun(args: argparse.Namespace) -> dict[str, Any]:
    """A report without rows, or with those that there are.

    Raises:
        RuntimeError: these are of another machine or commit, or of something else.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"machine": machine(), "commit": commit(), "date": now}
    report |= {"model": args.model, "new_tokens": NEW, "repeats": args.repeats, "options": args.options}
    report |= {"folder": str(args.folder), "starts": [], "found": []}
    if args.add and args.out.exists():
        there = json.loads(args.out.read_text())
        for name in ("machine", "commit", "model", "new_tokens", "repeats", "options", "folder"):
            if there.get(name) != report[name]:
                raise RuntimeError(f"--add: {name} of {args.out} is {there.get(name)}, now it is {report[name]}")
        report |= {name: there[name] for name in ("starts", "found")}
    return report


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows, here = 0, torch.cuda.device_count()
    if any(gpu is not None and gpu >= here for gpu in args.gpus):
        say(f"needs the GPUs that --gpus names: there are {here}")
        return 1
    try:
        report = begun(args)
    except RuntimeError as error:
        say(str(error))
        return 1

    def write() -> None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")

    def take(row: dict[str, Any]) -> None:
        nonlocal rows
        rows += 1
        names = ("connector", "tokens", "settings")  # a row takes the place of one of the same
        report["found"] = [one for one in report["found"] if any(one.get(n) != row.get(n) for n in names)] + [row]
        print(json.dumps(row), flush=True)
        write()

    with tempfile.TemporaryDirectory() as root:
        job = job_of(args, Path(root))
        for connector in args.connectors:
            try:
                report["starts"].append(measure(job, connector, args.folder, take))
            except RuntimeError as error:
                say(f"{connector}: {error}")
    if rows:
        write()
    return int(rows < len(args.connectors) * len(job.tokens))


if __name__ == "__main__":
    sys.exit(main())
