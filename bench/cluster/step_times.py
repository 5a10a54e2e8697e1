"""How long a step takes, from what was measured on an H200 with Llama-3.1-8B's shape.

A step's time is that of its products, which depends on the number of its tokens, and that of attention: each token of
the running contexts is read once, and each pair of a prompt's tokens is computed. Every constant is solved from a
figure in bench/results, and :data:`SOURCES` says which.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engine_floors import Shape
from bench.engine_workloads import MODELS, WORKLOADS
from bench.reports import RESULTS

MODEL = "llama-3.1-8b"
BLOCK = 16  # tokens
GPU_BYTES = 141e9  # of an H200, from its data sheet
SOURCES = {
    "decode_1": "engine-h200.json, W3b: ms a token",
    "decode_8, decode_64": "engine-speculation-h200.json, S8 and S64: plain_value, ms a step",
    "decode_256": "timeline-llama-3.1-8b-h200.json, W2: recorded_step_us without decode_sm90_kernel",
    "key_seconds": "engine-long-llama-3.1-8b-h200.json, L8, less S8: the same 8 rows with 16,000 more keys each",
    "token_seconds, pair_seconds": "engine-h200.json, W6: prompt tokens/s; FLOPs from bench/engine_floors.py",
    "beside_seconds": "serve-llama-3.1-8b-h200.json, 16 requests/s: 90th percentile between tokens",
    "server_seconds": "serve-llama-3.1-8b-h200.json, 8 requests/s: median time to first token",
    "host_link": "swap-h200.json: load_gb_per_s of 1024 shuffled blocks of Llama-3.1-8B",
    "blocks": "141 GB (NVIDIA's data sheet) x 0.9 (gpu_memory_utilization) less the weights in bfloat16",
}


@dataclass(frozen=True)
class StepTimes:
    """Constants of one replica, in seconds, bytes and tokens.

    Attributes:
        rows: numbers of tokens in a step, for which ``rows_seconds`` are the products' times; linear between them.
        token_seconds: of the products of each token above the last of ``rows``.
        key_seconds: to read the keys and values of one token of a running context.
        pair_seconds: for a prompt's token to attend to one other.
        beside_seconds: that a step takes longer if it holds prompts and decodes.
        server_seconds: from a client's request to the engine's queue, and back with the first token.
        kv_bytes: of a token in the cache.
        host_bytes_per_second: between the host's memory and the GPU's.
        blocks: of the cache on a GPU.
        floor_rate: output tokens/s that no batch can exceed: the products' FLOPs at the measured rate of products.
    """

    rows: tuple[float, ...]
    rows_seconds: tuple[float, ...]
    token_seconds: float
    key_seconds: float
    pair_seconds: float
    beside_seconds: float
    server_seconds: float
    kv_bytes: int
    host_bytes_per_second: float
    blocks: int
    floor_rate: float

    def products(self, tokens: float) -> float:
        """Seconds of a step's products."""
        rows, seconds = self.rows, self.rows_seconds
        if tokens >= rows[-1]:
            return seconds[-1] + (tokens - rows[-1]) * self.token_seconds
        at = 1
        while tokens > rows[at]:
            at += 1
        part = max(0.0, (tokens - rows[at - 1]) / (rows[at] - rows[at - 1]))
        return seconds[at - 1] + part * (seconds[at] - seconds[at - 1])

    def step(self, decodes: int, context: float, chunk: int, pairs: float) -> float:
        """Seconds of a step.

        Args:
            decodes: requests that get a token.
            context: tokens that they attend to, all together.
            chunk: tokens of prompts.
            pairs: a prompt's token and one that it attends to, counted over the chunk.
        """
        beside = self.beside_seconds if decodes and chunk else 0.0
        return self.products(decodes + chunk) + context * self.key_seconds + pairs * self.pair_seconds + beside

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "sources": SOURCES}


def _read(folder: Path, name: str, key: str, row: str) -> dict[str, Any]:
    data = json.loads((folder / name).read_text())
    found: dict[str, Any] = next(r for r in data[key] if row in (r.get("workload"), r.get("scenario")))
    return found


def measured(folder: Path = RESULTS) -> StepTimes:
    """The constants, from results files.

    Raises:
        FileNotFoundError, KeyError, StopIteration: a file is missing, or does not hold the row.
    """
    engine, drafts, serve = "engine-h200.json", "engine-speculation-h200.json", "serve-llama-3.1-8b-h200.json"
    shape = Shape.of(MODELS[MODEL])
    short = WORKLOADS["S8"].prompt[0] + WORKLOADS["S8"].output[0] / 2
    long = WORKLOADS["L8"].prompt[0] + WORKLOADS["L8"].output[0] / 2
    eight = 1e-3 * _read(folder, drafts, "rows", "S8")["plain_value"]
    far = 1e-3 * _read(folder, "engine-long-llama-3.1-8b-h200.json", "rows", "L8")["value"]
    key = (far - eight) / (8 * (long - short))
    one = 1e-3 * _read(folder, engine, "rows", "W3b")["value"]
    many = 1e-3 * _read(folder, drafts, "rows", "S64")["plain_value"]
    step = _read(folder, "timeline-llama-3.1-8b-h200.json", "timelines", "W2")
    attention = sum(kernel["us"] for kernel in step["kernels"] if kernel["name"] == "decode_sm90_kernel")
    products = tuple(
        [seconds - n * short * key for n, seconds in ((1, one), (8, eight), (64, many))]
        + [1e-6 * (step["recorded_step_us"] - attention)]
    )
    prompt = WORKLOADS["W6"].prompt[0]
    flops = shape.token_flops + (prompt - 1) / 2 * shape.pair_flops + 2 * shape.head / prompt
    each = 1 / (_read(folder, engine, "rows", "W6")["value"] * flops)  # seconds of a FLOP
    peak = json.loads((folder / engine).read_text())["ceilings"]["matmul_tflop_per_s"] * 1e12
    copies = json.loads((folder / "swap-h200.json").read_text())["copies"]
    copy = next(c for c in copies if (c["layout"], c["blocks"], c["shuffled"]) == (MODEL, 1024, True))
    token, pair = each * shape.token_flops, each * shape.pair_flops
    plain = StepTimes(
        rows=(1.0, 8.0, 64.0, 256.0),
        rows_seconds=products,
        token_seconds=token,
        key_seconds=key,
        pair_seconds=pair,
        beside_seconds=0.0,
        server_seconds=0.0,
        kv_bytes=shape.kv,
        host_bytes_per_second=copy["load_gb_per_s"] * 1e9,
        blocks=int((0.9 * GPU_BYTES - shape.weight_bytes(1)) / (shape.kv * BLOCK)),
        floor_rate=peak / (shape.token_flops + 2 * shape.head),
    )
    loads = [_read(folder, serve, "load", f"{rate} requests/s") for rate in (8, 16)]
    return _with_the_server(plain, *loads)


def _with_the_server(plain: StepTimes, few: dict[str, Any], more: dict[str, Any]) -> StepTimes:
    """Constants with what a server under load took longer than these steps would."""
    chunk, prompt = 256, 512
    running = [row["requests_per_second"] * 1e-3 * row["end_to_end_latency_ms"]["mean"] for row in (few, more)]
    pairs = chunk * prompt / 2

    def mixed(count: float) -> float:
        return plain.step(round(count), count * (prompt + 64), chunk, pairs)

    beside = max(0.0, 1e-3 * more["inter_token_latency_ms"]["percentiles"]["90"] - mixed(running[1]))
    alone = plain.step(round(running[0]), running[0] * (prompt + 64), 0, 0)
    first = 2 * (mixed(running[0]) + beside) + alone / 2  # two chunks, and half of the step that runs already
    server = max(0.0, 1e-3 * few["time_to_first_token_ms"]["percentiles"]["50"] - first)
    values = {**asdict(plain), "beside_seconds": beside, "server_seconds": server}
    return StepTimes(**values)
