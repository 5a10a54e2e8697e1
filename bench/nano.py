"""``python -m bench.nano``: the 300-line engine of examples/nano.py beside LLM, on a workload of bench.engine.

Both read the same checkpoint, a model of published shape with made-up weights, and get the same requests (W1 by
default; bench/engine_workloads.py). Each has a process of its own, which answers the workload once before anything is
timed. ``value`` is the median of the repetitions: output tokens over the time from the first request to the last token.
``of_llm`` is nano's rate over LLM's; it should be 0.85 or more. ``first_tokens_equal`` is the share of the requests
whose first greedy token is the same in both; below a half there is no result.
"""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from autotune.revision import commit
from autotune.worker import Failed
from bench.engine_worker import machine, watch_compilations
from bench.engine_workloads import MODELS, WORKLOADS, Request, checksum, requests, truncated, write_model
from examples import nano
from tritonllm import LLM, SamplingParams

ENGINES = ("tritonllm", "nano")


def write_checkpoint(name: str, config: dict[str, Any], root: Path) -> Path:
    """A model's configuration and made-up weights in bfloat16; returns their folder."""
    folder = write_model(name, config, root)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * size
    projections = {"q": (heads * size, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, heads * size)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config["vocab_size"], hidden), "norm": (hidden,)}
    for at in (f"layers.{i}" for i in range(config["num_hidden_layers"])):
        shapes |= {f"{at}.self_attn.{x}_proj": shape for x, shape in projections.items()}
        shapes |= {f"{at}.mlp.gate_proj": (inner, hidden), f"{at}.mlp.up_proj": (inner, hidden)}
        shapes |= {f"{at}.mlp.down_proj": (hidden, inner)}
        shapes |= {f"{at}.input_layernorm": (hidden,), f"{at}.post_attention_layernorm": (hidden,)}
        if config["model_type"] == "qwen3":
            shapes |= {f"{at}.self_attn.{x}_norm": (size,) for x in "qk"}
    named = {f"model.{name}.weight": shape for name, shape in shapes.items()}
    if not config["tie_word_embeddings"]:
        named["lm_head.weight"] = shapes["embed_tokens"]
    generator = torch.Generator().manual_seed(0)

    def weight(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    save_file({name: weight(shape) for name, shape in named.items()}, folder / "model.safetensors")
    return folder


class Nano:
    """examples/nano.py."""

    def __init__(self, folder: Path, max_len: int, options: dict[str, Any]) -> None:
        self._engine = nano.Engine(folder, max_len=max_len, **options)

    def generate(self, batch: list[Request]) -> list[list[int]]:
        asked = [nano.Request(list(r.prompt), r.max_tokens, r.temperature, seed) for seed, r in enumerate(batch)]
        return self._engine.generate(asked)


class Whole:
    """``tritonllm.LLM``."""

    def __init__(self, folder: Path, max_len: int, options: dict[str, Any]) -> None:
        self._llm = LLM(str(folder), max_model_len=max_len, skip_tokenizer_init=True, **options)

    def generate(self, batch: list[Request]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": r.prompt} for r in batch]
        fixed: dict[str, Any] = {"ignore_eos": True, "detokenize": False}
        params = [
            SamplingParams(temperature=r.temperature, max_tokens=r.max_tokens, seed=seed, **fixed)
            for seed, r in enumerate(batch)
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One engine's row.

    Raises:
        RuntimeError: an output is not as long as was asked for.
    """
    workload = WORKLOADS[args.workload]
    begin = time.perf_counter()
    make = Nano if args.engine == "nano" else Whole
    engine = make(args.folder, workload.max_model_len, args.options.get(args.engine, {}))
    row: dict[str, Any] = {"engine": args.engine, "start_seconds": time.perf_counter() - begin}
    engine.generate(requests(workload, args.repeats))  # not timed: tokens of a repetition that does not come
    compiled, values = watch_compilations(), []
    for number in range(args.repeats):
        batch = requests(workload, number)
        begin = time.perf_counter()
        outputs = engine.generate(batch)
        seconds = time.perf_counter() - begin
        if [len(output) for output in outputs] != [request.max_tokens for request in batch]:
            raise RuntimeError(f"{args.engine}: an output of {args.workload} has a wrong length: no result")
        values.append(sum(map(len, outputs)) / seconds)
    row |= {"value": statistics.median(values), "values": values, "kernels_compiled": len(compiled)}
    greedy = [Request(request.prompt, 1, 0.0) for request in truncated(requests(workload, 0), 1)]
    row["first_tokens"] = [output[0] for output in engine.generate(greedy)]
    return {"row": row, "machine": machine()}


def measure_apart(engine: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """:func:`measure` in a process of its own.

    Raises:
        Failed: it crashed, or took too long.
    """
    out = folder / f"{engine}.json"
    command = [sys.executable, "-m", "bench.nano", "--engine", engine, "--folder", str(folder), "--out", str(out)]
    command += ["--workload", args.workload, "--repeats", str(args.repeats), "--options", json.dumps(args.options)]
    try:
        code = subprocess.run(command, timeout=args.timeout, check=False).returncode
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{engine} had no result within {args.timeout:.0f} s") from error
    if code:
        raise Failed(f"the process of {engine} ended with exit code {code}")
    return json.loads(out.read_text())


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The report.

    Raises:
        Failed: an engine failed, or they do not agree.
    """
    workload = WORKLOADS[args.workload]
    with tempfile.TemporaryDirectory() as root:
        folder = write_checkpoint(workload.model, MODELS[workload.model], Path(root))
        found = {engine: measure_apart(engine, folder, args) for engine in ENGINES}
    rows = [found[engine]["row"] for engine in ENGINES]
    first = [row.pop("first_tokens") for row in rows]
    equal = statistics.mean(a == b for a, b in zip(*first, strict=True))
    if equal < 0.5:
        raise Failed(f"only {equal:.0%} of the first greedy tokens are equal: no result")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"machine": found["nano"]["machine"], "commit": commit(), "date": now}
    report |= {"workload": workload.name, "model": workload.model, "checksum": checksum(requests(workload))}
    return report | {"of_llm": rows[1]["value"] / rows[0]["value"], "first_tokens_equal": equal, "nano": rows}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nano", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [name for name, workload in WORKLOADS.items() if workload.kind == "throughput"]
    parser.add_argument("--workload", choices=known, default="W1", help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed repetitions (%(default)s)")
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help='of each engine: {"nano": {"budget": 8192}}'
    )
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="for one engine (%(default)s s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "nano.json", metavar="FILE")
    parser.add_argument("--engine", choices=ENGINES, help="only this one, of --folder; for the processes of this one")
    parser.add_argument("--folder", type=Path, help="a checkpoint, for --engine")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if (args.engine is None) != (args.folder is None):
        parser.error("--engine and --folder must be given together")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.engine:
        args.out.write_text(json.dumps(measure(args)))
        return 0
    try:
        report = compare(args)
    except Failed as reason:
        print(f"no result: {reason}", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["nano"]:
        print(f"{report['workload']} {row['engine']:<10} {row['value']:>10,.0f} output tok/s")
    print(f"nano has {report['of_llm']:.0%} of LLM's rate; wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
