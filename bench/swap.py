"""``python -m bench.swap``: blocks of the cache to the host's memory and back.

``copies``: bytes per second of a store and of a load of so many blocks, scattered over the cache, beside what one plain
copy of page-locked memory takes (``link``). In the host's memory the blocks lie side by side, as a tier hands out slots
while it has some left, or scattered (``shuffled``), as late in its life. A row is written only if what came back is
what was stored. ``issue_ms`` is what the host does for it. ``direct`` is a kernel that itself reads and writes the
host's memory.

``returns``: the time to the first token of a prompt whose blocks the cache has given up, when they are loaded and when
they are computed; and what its return does to 8 requests that decode meanwhile: their steps' longest and median time.
Each figure is the median of some repetitions.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from autotune.revision import commit
from bench.engine_worker import machine
from bench.engine_workloads import MODELS, write_model
from tritonllm import LLM, SamplingParams
from tritonllm.engine.cache.host_copies import HostCopies
from tritonllm.engine.data.copy_batches import Transfers
from tritonllm.kernels.attention.packed_blocks import _pack_blocks_kernel, default_pack_config

BLOCK_SIZE = 16
DECODING = 8  # requests beside which a prompt comes back


class Layout(NamedTuple):
    """Of a model's cache."""

    layers: int
    kv_heads: int
    head_size: int


LAYOUTS = {"llama-3.1-8b": Layout(32, 8, 128), "qwen3-0.6b": Layout(28, 8, 128), "tiny": Layout(2, 1, 8)}


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """Until the device has done it, and until the host has issued it: medians, after one that is not counted."""
    whole, issued = [], []
    for _ in range(1 + repeats):
        synchronize(device)
        begin = time.perf_counter()
        work()
        issued.append(time.perf_counter() - begin)
        synchronize(device)
        whole.append(time.perf_counter() - begin)
    return statistics.median(whole[1:]), statistics.median(issued[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def link(device: torch.device, size: int, repeats: int) -> dict[str, float]:
    """GB/s of one copy of page-locked memory, there and back."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    store, _ = seconds_of(lambda: host.copy_(there, non_blocking=True), device, repeats)
    load, _ = seconds_of(lambda: there.copy_(host, non_blocking=True), device, repeats)
    return {"store_gb_per_s": size / store / 1e9, "load_gb_per_s": size / load / 1e9}


@torch.inference_mode()
def copies(name: str, counts: list[int], device: torch.device, repeats: int, rates: dict[str, float]) -> list[Any]:
    """A row for each number of blocks, side by side and shuffled.

    Raises:
        RuntimeError: what came back is not what was stored.
    """
    layout, most = LAYOUTS[name], max(counts)
    shape = (layout.layers, 2, 2 * most, BLOCK_SIZE, layout.kv_heads, layout.head_size)
    pool = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    host = HostCopies([pool], most)
    generator = torch.Generator().manual_seed(0)
    number, rows = 0, []
    for count in counts:
        for shuffled in (False, True):
            blocks = torch.randperm(2 * most, generator=generator).tolist()
            slots = torch.randperm(most, generator=generator).tolist() if shuffled else list(range(most))
            stores, loads = [*zip(blocks[:count], slots, strict=False)], [*zip(slots, blocks[count:], strict=False)]
            pool[:, :, blocks[:count]] = torch.randn_like(pool[:, :, :count])
            row: dict[str, Any] = {"layout": name, "blocks": count, "shuffled": shuffled}
            row["block_bytes"] = size = pool[:, :, 0].nbytes
            for kind, batch in (("store", (tuple(stores), ())), ("load", ((), tuple(loads[:count])))):
                number += 1
                transfers = Transfers(number, *batch, wait=number)
                seconds, issue = seconds_of(lambda batch=transfers: host.run(batch), device, repeats)
                rate = size * count / seconds / 1e9
                row |= {f"{kind}_gb_per_s": rate, f"{kind}_issue_ms": 1e3 * issue}
                row[f"{kind}_percent_of_link"] = 100 * rate / rates[f"{kind}_gb_per_s"]
            for (stored, _), (_, loaded) in zip(stores, loads, strict=False):
                if not torch.equal(pool[:, :, stored], pool[:, :, loaded]):
                    raise RuntimeError(f"block {stored} came back in another form: no result")
            if device.type == "cuda" and not shuffled:
                row |= direct(host, blocks[:count], pool, repeats)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def direct(host: HostCopies, blocks: list[int], pool: torch.Tensor, repeats: int) -> dict[str, float]:
    """GB/s of the other way: a kernel that itself reads and writes the host's memory, with no copy engine.

    Raises:
        RuntimeError: what came back is not what was stored.
    """
    (part,) = host._parts
    ids = torch.tensor(blocks, dtype=torch.int64, device=pool.device)
    _, rows, elements = part.host.shape
    config = default_pack_config(elements)
    grid, found = (len(blocks) * rows * triton.cdiv(elements, config["BLOCK"]),), {}
    before = pool[:, :, ids[0]].clone()
    for kind in ("store", "load"):

        def launch(into_pool: bool = kind == "load") -> None:
            given = (part.rows, ids, ids, part.host, rows, part.rows.stride(0))
            _pack_blocks_kernel[grid](*given, ELEMENTS=elements, PLACED=False, INTO_POOL=into_pool, **config)

        seconds, _ = seconds_of(launch, pool.device, repeats)
        found[f"direct_{kind}_gb_per_s"] = len(blocks) * part.host[0].nbytes / seconds / 1e9
        if kind == "store":
            pool[:, :, ids[0]] = 0
    if not torch.equal(pool[:, :, ids[0]], before):
        raise RuntimeError("a block came back in another form: no result")
    return found


def returns(folder: Path, name: str, prompt: int, repeats: int, options: dict[str, Any]) -> dict[str, Any]:
    """Time to the first token of a prompt of so many tokens that was given up: loaded, computed, and beside others.

    Raises:
        RuntimeError: it was not loaded, or its token changed.
    """
    blocks = -(-prompt // BLOCK_SIZE) + 2
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "block_size": BLOCK_SIZE}
    num_blocks = 2 * blocks + DECODING * 32
    layout = LAYOUTS[name]
    each = 2 * layout.layers * BLOCK_SIZE * layout.kv_heads * layout.head_size * 2
    settings |= {"num_blocks": num_blocks, "max_model_len": prompt + 64}
    settings["kv_offloading_size"] = (5 + num_blocks // blocks) * blocks * each / (1 << 30)  # all that is asked
    llm = LLM(model=str(folder), **{**settings, **options})
    each, tier = llm.engine._runner.block_bytes, llm.engine._scheduler.tier
    assert tier is not None  # the options ask for it
    found: dict[str, Any] = {"model": name, "prompt": prompt, "bytes": each * (prompt // BLOCK_SIZE)}
    found["measured_load_gb_per_s"] = tier.rates.bytes_per_second / 1e9
    rates = {"load": float("inf"), "compute": 1e-9}  # what the tier is told of the link decides what it does
    for decoding in (0, DECODING):
        for kind, rate in rates.items():
            tier.rates.bytes_per_second, tier.rates.seconds_per_token = rate, 1.0
            before, times, steps = llm.engine.stats.loaded_blocks, [], []
            for number in range(1 + repeats):
                seconds, taken, cached = come_back(llm, prompt, decoding, seed=number)
                if (cached > 0) != (kind == "load"):
                    raise RuntimeError(f"{cached} tokens came back where the prompt was to be a {kind}: no result")
                times.append(seconds)
                steps.append(taken)
            key = f"{kind}_beside_{decoding}" if decoding else kind
            found[f"{key}_ms"] = 1e3 * statistics.median(times[1:])
            found[f"{key}_blocks"] = llm.engine.stats.loaded_blocks - before
            if decoding:
                found[f"{key}_median_step_ms"] = 1e3 * statistics.median(statistics.median(s) for s in steps[1:])
                found[f"{key}_longest_step_ms"] = 1e3 * statistics.median(max(s) for s in steps[1:])
    print(json.dumps(found), flush=True)
    return found


def come_back(llm: LLM, prompt: int, decoding: int, seed: int) -> tuple[float, list[float], int]:
    """Let a prompt be seen and be given up, and ask again: seconds to its first token, the times of the steps
    meanwhile, and how many of its tokens came from the cache."""
    engine, vocab = llm.engine, 256
    others = 1 + engine.stats.num_blocks // (prompt // BLOCK_SIZE)  # they take all that the first one had
    engine.reset_prefix_cache()
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, vocab, (1 + others, prompt), generator=generator).tolist()
    for ids in prompts:
        llm.generate([{"prompt_token_ids": ids}], one, use_tqdm=False)
    many = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
    for number in range(decoding):
        engine.add_request(f"decodes {number}", {"prompt_token_ids": [number + 1] * 8}, many)
    for _ in range(8 if decoding else 0):
        engine.step()
    steps, begin = [], time.perf_counter()
    engine.add_request("returns", {"prompt_token_ids": prompts[0]}, one)
    while True:
        before = time.perf_counter()
        outputs = engine.step()
        steps.append(time.perf_counter() - before)
        back = [output for output in outputs if output.request_id == "returns"]
        if back:
            seconds, cached = time.perf_counter() - begin, back[0].num_cached_tokens or 0
            engine.abort_request([f"decodes {number}" for number in range(decoding)])
            while engine.has_unfinished_requests():
                engine.step()
            return seconds, steps, cached


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.swap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", default="llama-3.1-8b,qwen3-0.6b", help="%(default)s")
    parser.add_argument("--blocks", default="16,64,256,1024,4096", metavar="N,N", help="%(default)s")
    parser.add_argument("--models", default="llama-3.1-8b,qwen3-0.6b", help="for returns; empty: none (%(default)s)")
    parser.add_argument("--folder", type=Path, help="of the one model, if it is none of the benchmarks'")
    parser.add_argument("--prompts", default="2048,8192,32768", metavar="N,N", help="tokens (%(default)s)")
    parser.add_argument("--link-bytes", type=int, default=1 << 30, metavar="N", help="of a plain copy (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="%(default)s")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="more arguments of LLM")
    parser.add_argument("--device", default="cuda", help="%(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the numbers as JSON")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"machine": machine(), "commit": commit(), "date": now}
    report["link"] = rates = link(device, args.link_bytes, args.repeats)
    print(json.dumps(rates), flush=True)
    report["copies"] = []
    report["returns"] = []
    for name in filter(None, args.layouts.split(",")):
        report["copies"] += copies(name, [int(n) for n in args.blocks.split(",")], device, args.repeats, rates)
        write(args.out, report)
    with tempfile.TemporaryDirectory() as root:
        for name in filter(None, args.models.split(",")):
            folder = args.folder or write_model(name, MODELS[name], Path(root))
            for prompt in map(int, args.prompts.split(",")):
                report["returns"].append(returns(folder, name, prompt, min(3, args.repeats), args.options))
                write(args.out, report)
    return 0


def write(out: Path | None, report: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
