"""``python -m bench.kv_layers``: how long after a prompt's last step all of its blocks are in the host's memory.

For each model and length of a prompt there are two rows. ``streamed``: the blocks that a step fills leave while it
runs, layer by layer, as engines do (:mod:`tritonllm.engine.cache.layer_copies`). ``behind``: they leave once the host
has the step's results, as engines did before. ``prompt_ms`` is the time from the request to its first token,
``stored_ms`` the time from then until the last block has arrived, ``copy_ms`` what copying all of the prompt's blocks
takes with nothing beside it. ``captured``: the last step was a CUDA graph. A row is written only if what arrived is
what the cache has. Each figure is the median of some repetitions, after one that does not count; the two kinds take
turns. A model's engine starts once, for its longest prompt; stderr says how far it is.
"""

import argparse
import datetime
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autotune.revision import commit
from bench.engine_worker import machine
from bench.engine_workloads import MODELS, write_model
from tritonllm import LLM, SamplingParams
from tritonllm.engine.cache.host_copies import HostCopies, runs
from tritonllm.engine.cache.layer_copies import LayerCopies
from tritonllm.engine.data.copy_batches import Fills, Transfers
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.transfer.connector import Params, Slots
from tritonllm.events import Event, StepFinished
from tritonllm.models.checkpoint import read_config

BLOCK_SIZE = 16
SETTLES = 60.0  # seconds
AT_ONCE = 64  # blocks that are compared


class Nowhere:
    """A connector that keeps nothing: an engine has one so that it stores a prompt's last blocks without delay."""

    def register(self, memory: Sequence[Slots]) -> None:
        """It reads none of it."""

    def lookup(self, keys: Sequence[bytes], params: Params) -> "Future[int]":
        return _done(0)

    def load(self, keys: Sequence[bytes], slots: Sequence[int], params: Params) -> "Future[list[bool]]":
        return _done([False] * len(keys))

    def save(self, keys: Sequence[bytes], slots: Sequence[int], ready: Callable[[], bool]) -> "Future[int]":
        return _done(0)

    def close(self) -> None:
        """Nothing is under way."""


def _done(result: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class Parts(NamedTuple):
    """What of an engine is measured."""

    tier: HostTier
    host: HostCopies
    pools: list[torch.Tensor]


class Watch:
    """Hears when results are in, and how blocks leave."""

    def __init__(self, llm: LLM, host: HostCopies) -> None:
        self.results = 0.0
        llm.engine.subscribe(self._hear)
        self._fill = host.fill
        host.fill = self._watched  # type: ignore[method-assign]
        self.captured = False

    def _hear(self, event: Event) -> None:
        if isinstance(event, StepFinished):
            self.results = event.time

    def _watched(self, fills: Fills, by_layer: bool, ends: Mapping[int, torch.cuda.Event] | None = None) -> LayerCopies:
        self.captured = ends is not None
        return self._fill(fills, by_layer, ends)


def make_engine(folder: Path, config: Mapping[str, Any], prompt: int, options: dict[str, Any]) -> LLM:
    """An engine for prompts of at most so many tokens.

    Args:
        config: the model's; the tier has as many slots again as a prompt has blocks, for the connector may have half of
            them. More would only take time to page-lock.
        options: arguments of ``LLM`` that come before these.
    """
    blocks = -(-prompt // BLOCK_SIZE) + 2
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "block_size": BLOCK_SIZE}
    settings |= {"num_blocks": 2 * blocks, "max_model_len": prompt + 64, "max_num_seqs": 8}
    each = block_bytes_of(config, options.get("dtype") == "float32" or not torch.cuda.is_available())
    settings |= {"kv_offloading_size": (2 * blocks + 1) * each / (1 << 30)}
    settings["kv_transfer_config"] = {"kv_connector": "bench.kv_layers:Nowhere", "kv_role": "kv_producer"}
    return LLM(model=str(folder), **{**settings, **options})


def block_bytes_of(config: Mapping[str, Any], wide: bool) -> int:
    """Of a block of a model's cache.

    Args:
        config: of ``config.json``.
        wide: an element has 32 bits, not 16.
    """
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    elements = 2 * config["num_hidden_layers"] * BLOCK_SIZE * config["num_key_value_heads"] * head
    return int(elements * (4 if wide else 2))


def parts_of(llm: LLM) -> Parts:
    runner, tier = llm.engine._runner, llm.engine._scheduler.tier
    assert tier is not None and runner.host is not None  # the options ask for it
    return Parts(tier, runner.host, [copies.pool for copies in runner.caches.copies])  # type: ignore[attr-defined]


def one_prompt(llm: LLM, parts: Parts, watch: Watch, prompt: int, seed: int) -> tuple[float, float]:
    """Seconds from a request to its token, and from then until all of its blocks have arrived.

    Raises:
        RuntimeError: they do not, or something else does.
    """
    engine, (tier, host, _) = llm.engine, parts
    engine.reset_prefix_cache()
    ids = torch.randint(1, 256, (prompt,), generator=torch.Generator().manual_seed(seed)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    begin = time.monotonic()
    engine.add_request("prompt", {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        engine.step()
    while host.done < tier.last:
        if time.monotonic() > begin + SETTLES:
            raise RuntimeError("the blocks do not arrive: no result")
    stored = time.monotonic()
    check(llm, parts, prompt)
    return watch.results - begin, stored - watch.results


def check(llm: LLM, parts: Parts, prompt: int) -> None:
    """Raises:
    RuntimeError: some blocks of the prompt have not arrived, or are others.
    """
    blocks = llm.engine._scheduler.pool
    found = [(slot, blocks.find_leading([label])) for label, slot in parts.tier._slot_of.items()]
    if len(found) != prompt // BLOCK_SIZE:
        raise RuntimeError(f"{len(found)} of {prompt // BLOCK_SIZE} blocks were stored: no result")
    found.sort()  # runs of slots are compared where the blocks are, without gathering gigabytes on the host
    slots, there = [slot for slot, _ in found], [block for _, (block,) in found]
    for pool, part in zip(parts.pools, parts.host._parts, strict=True):
        for at, slot, count in runs(slots):
            for first in range(0, count, AT_ONCE):
                last = min(first + AT_ONCE, count)
                ours = pool[:, :, there[at + first : at + last]].flatten(3).permute(2, 0, 1, 3).flatten(1, 2)
                if not torch.equal(ours, part.host[slot + first : slot + last].to(ours.device)):
                    raise RuntimeError("other blocks arrived than the cache has: no result")


def copy_seconds(parts: Parts, count: int, repeats: int) -> float:
    """What it takes to copy so many blocks, with nothing beside it."""
    tier, host, pools = parts
    times = []
    for _ in range(1 + repeats):
        if pools[0].is_cuda:
            torch.cuda.synchronize(pools[0].device)
        tier._number += 1
        begin = time.perf_counter()
        host.run(Transfers(tier.last, tuple((block, block) for block in range(count)), ()))
        while host.done < tier.last:
            pass
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(llm: LLM, watch: Watch, name: str, prompt: int, repeats: int) -> list[dict[str, Any]]:
    """Both rows of a model and a length.

    Raises:
        RuntimeError: what arrived is not what the cache has.
    """
    parts = parts_of(llm)
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(1 + repeats):
        for streamed in (True, False):
            parts.tier.streams = streamed
            times[streamed].append(one_prompt(llm, parts, watch, prompt, seed=number))
    each, count = llm.engine._runner.block_bytes, prompt // BLOCK_SIZE  # type: ignore[attr-defined]
    copy, rows = copy_seconds(parts, count, repeats), []
    for streamed, taken in times.items():
        seconds = [1e3 * statistics.median(one[at] for one in taken[1:]) for at in (0, 1)]
        row: dict[str, Any] = {"model": name, "prompt": prompt, "kind": "streamed" if streamed else "behind"}
        row |= {"bytes": each * count, "captured": watch.captured, "copy_ms": 1e3 * copy}
        rows.append(row | {"prompt_ms": seconds[0], "stored_ms": seconds[1]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def say(begin: float, text: str) -> None:
    """How far it is, with the seconds since the beginning."""
    print(f"{time.monotonic() - begin:.1f} s: {text}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_layers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="llama-3.1-8b,qwen3-0.6b", help="%(default)s")
    parser.add_argument("--folder", type=Path, help="of the one model, if it is none of the benchmarks'")
    parser.add_argument("--prompts", default="2048,8192,32768", metavar="N,N", help="tokens (%(default)s)")
    size = "of the tier (what twice the longest prompt needs)"
    parser.add_argument("--offloading-size", type=float, metavar="GIB", help=size)
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="%(default)s")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="more arguments of LLM")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the numbers as JSON")
    args = parser.parse_args(argv)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"machine": machine(), "commit": commit(), "date": now, "leaves": []}
    options = {"max_num_batched_tokens": 8192, **args.options}
    if args.offloading_size is not None:
        options["kv_offloading_size"] = args.offloading_size
    prompts, begin = sorted(map(int, args.prompts.split(","))), time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        for name in args.models.split(","):
            folder = args.folder or write_model(name, MODELS[name], Path(root))
            say(begin, f"{name}: the engine starts")
            llm = make_engine(folder, read_config(folder), prompts[-1], options)
            watch = Watch(llm, parts_of(llm).host)
            for prompt in prompts:
                say(begin, f"{name}: {prompt} tokens")
                try:
                    report["leaves"] += measure(llm, watch, name, prompt, args.repeats)
                except RuntimeError as error:
                    print(f"{name}, {prompt} tokens: {error}", file=sys.stderr)
                    return 1
                if args.out is not None:
                    args.out.write_text(json.dumps(report, indent=1) + "\n")
            del llm, watch  # the next model's takes their memory
            gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
