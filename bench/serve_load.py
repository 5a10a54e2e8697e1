"""``python -m bench.serve_load``: a server under load and under faults, beside the offline engine; runs unattended.

Weights are made up and prompts are token ids, so nothing is fetched. The parts (``--only``):

  llama       Llama-3.1-8B's shape, 512 tokens in and 128 out: 8, 16 and 32 requests/s (Poisson, 30 s each), bursts of
              48 requests every 2 s
  saturation  the same with 2048 requests at once beside ``tritonllm bench throughput`` with the same requests; so many
              that the beginning, when they come in one after the other, weighs little
  qwen        Qwen3-0.6B's shape: 256 streams at once, 128 tokens in and 1024 out, beside the offline engine
  replicas    Llama-3.1-8B's shape, 512 tokens in and 128 out: 512 requests at once for each engine, with one engine and
              with one on each GPU (``--data-parallel-size``); not among the defaults, for it needs several GPUs
  faults      Qwen3-0.6B's shape: 500 streams that leave at random, aborts, bad bodies, slow readers, SIGSTOP of the API
              process, in rounds, with memory and open files after each; then kill -9 of the engine, SIGTERM under load
              and kill -9 of the API process

Expected on an H200 with a warm folder of compiled kernels: llama 200 s, saturation 150 s, qwen 120 s, faults 120 s.
With an empty one, each first start of a model takes 60 to 120 s more. Give each part a command of its own where
commands are limited:

  python -m bench.serve_load --only llama saturation --out llama.json
  python -m bench.serve_load --only qwen   --out qwen.json --api-server-count 1 4
  python -m bench.serve_load --only faults --out faults.json

Needs the extras ``serve`` and ``bench``. The exit status is 1 if a request failed that should not have, or a fault left
something behind. The file is written after every row. ``--rehearsal`` runs everything on the CPU with a tiny model and
few requests: its times say nothing.
"""

import argparse
import asyncio
import datetime
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.revision import commit
from bench import serve_faults
from bench.engine_workloads import MODELS, TOKEN_IDS, write_model
from bench.serving import NAME, ROOT, Server, server
from tritonllm.cli.bench_serve import PlannedRequest, Told, results, send

DEFAULT_PARTS = ("llama", "saturation", "qwen", "faults")
PARTS = (*DEFAULT_PARTS, "replicas")
CLIENTS = 4  # processes that send: one alone could not read 256 streams as fast as they come
LEAD = 2.0  # seconds that the clients get to make their prompts
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "eos_token_id": 1}
TINY |= {"bos_token_id": 0, "torch_dtype": "float32"}


@dataclass(frozen=True)
class Scenario:
    """Requests to one server.

    Attributes:
        model: of :data:`MODELS`.
        count: of requests.
        rate: requests a second, Poisson; ``None``: as ``burst`` says.
        burst: requests that come together, every ``every`` seconds; 0: all at once.
        offline: compare with the offline engine.
    """

    name: str
    model: str
    count: int
    input_len: int
    output_len: int
    rate: float | None = None
    burst: int = 0
    every: float = 2.0
    offline: bool = False

    def asks(self) -> list[PlannedRequest]:
        chance, at, asks = random.Random(len(self.name)), 0.0, []
        for number in range(self.count):
            if self.burst:
                at = number // self.burst * self.every
            asks.append(PlannedRequest(at, self.input_len, self.output_len))
            if self.rate is not None:
                at += chance.expovariate(self.rate)
        return asks


SCENARIOS = {
    "llama": (
        *(Scenario(f"{rate} requests/s", "llama-3.1-8b", 30 * rate, 512, 128, rate=rate) for rate in (8, 16, 32)),
        Scenario("bursts", "llama-3.1-8b", 480, 512, 128, burst=48),
    ),
    "saturation": (Scenario("saturation", "llama-3.1-8b", 2048, 512, 128, offline=True),),
    "qwen": (Scenario("256 streams", "qwen3-0.6b", 256, 128, 1024, offline=True),),
}


def rehearsed(scenario: Scenario) -> Scenario:
    """The same with so little to do that two cores finish it in seconds."""
    smaller = {"count": max(4, scenario.count // 60), "input_len": 16, "output_len": 8, "every": 0.2}
    return replace(scenario, **smaller, burst=min(scenario.burst, 3))


def send_share(url: str, asks: Sequence[PlannedRequest], begin: float, seed: int, vocab: int) -> list[Told]:
    """Send requests at their times; the main function of a client process.

    Args:
        begin: of the scenario, by ``time.perf_counter``, which all processes of a Linux machine share.
        vocab: prompts are of the ids below this.
    """
    return asyncio.run(_send_share(url, asks, begin, seed, vocab))


async def _send_share(url: str, asks: Sequence[PlannedRequest], begin: float, seed: int, vocab: int) -> list[Told]:
    import aiohttp

    chance = random.Random(seed)
    prompts = [chance.choices(range(2, vocab), k=ask.input_len) for ask in asks]
    body = {"model": NAME, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_connect=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(ask: PlannedRequest, prompt: list[int]) -> Told:
            await asyncio.sleep(begin + ask.at - time.perf_counter())
            return await send(session, url, {**body, "prompt": prompt, "max_tokens": ask.output_len}, ask)

        return list(await asyncio.gather(*map(one, asks, prompts)))


def send_all(
    asks: Sequence[PlannedRequest], url: str, clients: Executor, vocab: int, seed: int
) -> tuple[list[Told], float]:
    """What came of requests, which :data:`CLIENTS` processes share, and when they began by ``time.perf_counter``.

    Args:
        seed: of the prompts.
    """
    begin = time.perf_counter() + LEAD
    futures = [
        clients.submit(send_share, url, asks[number::CLIENTS], begin, CLIENTS * seed + number, vocab)
        for number in range(CLIENTS)
    ]
    return [one for future in futures for one in future.result()], begin


def latest_send(told: Sequence[Told], begin: float) -> float:
    """Seconds that a request was sent too late, at most: of a client that has too much to do."""
    return max((one.sent - begin - one.ask.at for one in told), default=0.0)


def different_errors(told: Sequence[Told]) -> list[str]:
    """Some of them."""
    return sorted({one.error for one in told if one.error is not None})[:3]


def run_scenario(scenario: Scenario, running: Server, clients: Executor, vocab: int) -> dict[str, Any]:
    """A row of the results; times are the clients'."""
    seed = random.randrange(1 << 28)  # no prefix cache knows these prompts
    told, begin = send_all(scenario.asks(), running.url, clients, vocab, seed)
    seconds = max((one.arrivals[-1] for one in told if one.arrivals), default=begin) - begin
    row = {"scenario": scenario.name, "model": scenario.model, **results(told, seconds, {})}
    late, errors = latest_send(told, begin), different_errors(told)
    return row | {"latest_send_seconds": late, "errors": errors, "resources": running.resources()}


def offline(scenario: Scenario, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """The same requests, all together, through ``LLM.generate``.

    Raises:
        RuntimeError: it failed; the message holds what it said.
    """
    command = [sys.executable, "-m", "tritonllm", "bench", "throughput", str(folder), "--load-format", "dummy"]
    command += ["--num-prompts", str(scenario.count), "--input-len", str(scenario.input_len)]
    command += ["--output-len", str(scenario.output_len), *options]
    with tempfile.TemporaryDirectory() as there:
        out = Path(there) / "offline.json"
        done = subprocess.run([*command, "--output-json", str(out)], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the offline engine failed: {done.stderr[-3000:]}")
        return json.loads(out.read_text())


class Report:
    """Rows and what failed, in a file from the first row on."""

    def __init__(self, out: Path, rehearsal: bool) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.data: dict[str, Any] = {"benchmark": "serve_load", "commit": commit(), "date": now, "device": device()}
        self.data |= {"rehearsal": rehearsal, "load": [], "faults": [], "failed": []}
        self._out = out
        out.parent.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, row: dict[str, Any], failed: str | None) -> None:
        self.data[part].append(row)
        if failed is not None:
            self.data["failed"].append(failed)
        self._out.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")
        print(json.dumps(brief(row)), "" if failed is None else f"FAILED: {failed}", flush=True)


def brief(row: dict[str, Any]) -> dict[str, Any]:
    """What the terminal shows of a row."""
    if "scenario" not in row:
        return row
    line = {name: row[name] for name in ("scenario", "api_server_count", "num_requests", "failed_requests")}
    for name in ("time_to_first_token_ms", "inter_token_latency_ms"):
        if row[name] is not None:
            line[name] = {at: round(row[name]["percentiles"][at], 2) for at in ("50", "99")}
    line |= {"output_tokens_per_second": round(row["output_tokens_per_second"], 1)}
    line |= {"of_one": row["of_one"]} if "of_one" in row else {"of_offline": row["of_offline"]}
    return line | {"preemptions": row["preemptions"]}


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def load(part: str, args: argparse.Namespace, root: Path, report: Report, options: Sequence[str]) -> None:
    scenarios = [rehearsed(one) for one in SCENARIOS[part]] if args.rehearsal else list(SCENARIOS[part])
    config, vocab = model_config(scenarios[0].model, args.rehearsal)
    folder = write_model(scenarios[0].model, config, root)
    alone = {one.name: offline(one, folder, options) for one in scenarios if one.offline}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(CLIENTS, mp_context=spawn) as clients:
        for count in args.api_server_count:
            given = [*options, "--max-queue", "4096", "--api-server-count", str(count)]
            with server(folder, given) as running:
                for scenario, row in rows_of(scenarios, running, clients, vocab):
                    row |= {"api_server_count": count, "offline": alone.get(scenario.name)}
                    rate = alone.get(scenario.name, {}).get("output_tokens_per_second")
                    row["of_offline"] = None if rate is None else row["output_tokens_per_second"] / rate
                    bad = row["failed_requests"]
                    report.add("load", row, f"{scenario.name}: {bad} requests failed" if bad else None)


def replicas(args: argparse.Namespace, root: Path, report: Report, options: Sequence[str]) -> None:
    """One engine, and as many as there are GPUs, each with as many requests; ``of_one`` compares their throughput."""
    config, vocab = model_config("llama-3.1-8b", args.rehearsal)
    folder = write_model("llama-3.1-8b", config, root)
    spawn, one = multiprocessing.get_context("spawn"), 0.0
    with ProcessPoolExecutor(CLIENTS, mp_context=spawn) as clients:
        for size in (1, max(2, num_gpus())):
            scenario = Scenario(f"saturation of {size}", "llama-3.1-8b", 512 * size, 512, 128)
            scenario = rehearsed(scenario) if args.rehearsal else scenario
            with server(folder, [*options, "--max-queue", "4096", "--data-parallel-size", str(size)]) as running:
                for _, row in rows_of([scenario], running, clients, vocab):
                    one = one or row["output_tokens_per_second"]
                    row |= {"api_server_count": 1, "data_parallel_size": size, "of_offline": None}
                    row["of_one"], bad = row["output_tokens_per_second"] / one, row["failed_requests"]
                    report.add("load", row, f"{scenario.name}: {bad} requests failed" if bad else None)


def rows_of(
    scenarios: Sequence[Scenario], running: Server, clients: Executor, vocab: int
) -> Iterator[tuple[Scenario, dict[str, Any]]]:
    """The scenarios one after the other, each with its row."""
    run_scenario(Scenario("warm-up", "", 8, 16, 8), running, clients, vocab)
    for scenario in scenarios:
        before = running.metric("vllm:num_preemptions_total")
        row = run_scenario(scenario, running, clients, vocab)
        row["preemptions"] = running.metric("vllm:num_preemptions_total") - before
        yield scenario, row | {"start_seconds": running.start_seconds}


def model_config(name: str, rehearsal: bool) -> tuple[dict[str, Any], int]:
    """A configuration, and the ids below which prompts are drawn."""
    config = MODELS[name] | (TINY if rehearsal else {})
    return config, min(TOKEN_IDS, config["vocab_size"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(DEFAULT_PARTS), help="parts (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("bench/results/serve-load.json"), metavar="FILE")
    parser.add_argument(
        "--api-server-count",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="servers to load, in turn (default: 1)",
    )
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="of the faults that repeat (default: 4)")
    parser.add_argument("--rehearsal", action="store_true", help="a tiny model on the CPU, and few requests")
    args = parser.parse_args(argv)
    if min(args.api_server_count) < 1:
        parser.error("--api-server-count must be at least 1")
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: what the first one leaves is not growth")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    begin = time.monotonic()
    report = Report(args.out, args.rehearsal)
    options = ["--max-model-len", "2048"]
    if args.rehearsal:
        options += ["--device", "cpu", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
    with tempfile.TemporaryDirectory() as root:
        for part in args.only:
            if part == "faults":
                config, vocab = model_config("qwen3-0.6b", args.rehearsal)
                folder = write_model("qwen3-0.6b", config, Path(root))
                scale = serve_faults.SMALL if args.rehearsal else serve_faults.FULL
                faults = serve_faults.Faults(folder, options, vocab, scale, args.rounds)
                for row in faults.run():
                    report.add("faults", row, None if row["passed"] else f"{row['fault']}: {row['why']}")
            else:
                (replicas if part == "replicas" else partial(load, part))(args, Path(root), report, options)
    failed = report.data["failed"]
    print(f"wrote {args.out} after {time.monotonic() - begin:.0f} s; {len(failed)} rows failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
