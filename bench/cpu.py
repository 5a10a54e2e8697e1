"""``python -m bench.cpu``: decoding on a machine without a GPU, beside transformers.

Both engines are in one process, with the same weights, dtype and number of threads. They take turns of a few seconds,
so that whatever else the machine does meets both alike; a rate is the median of the turns, and so is the ratio of two
turns that follow each other. Before anything is timed, both generate the same greedy tokens, or in bfloat16 the report
says for how many of them: rounding may choose another token where two are nearly tied.

A rate is new tokens a second of a whole call, the short prompts included. ``alone`` is one request, ``batch`` eight at
once (transformers pads them), and ``of_alone`` our batch against transformers with one request after the other.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from autotune.revision import commit
from bench import smollm2
from bench.host import processor
from tritonllm import LLM, SamplingParams

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was",
    "Water boils at",
    "def fibonacci(n):",
    "In 1969, humans",
    "The best way to learn",
    "A list of fruits:",
    "My name is",
)
Generate = Callable[[list[list[int]]], list[list[int]]]


def ours(folder: Path, dtype: str, tokens: int) -> Generate:
    llm = LLM(str(folder), dtype=dtype, device="cpu", max_num_seqs=len(PROMPTS), enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def theirs(folder: Path, dtype: str, tokens: int) -> Generate:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None  # every request runs to its last token
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        return out[:, -tokens:].tolist()

    return generate


def turn(generate: Generate, prompts: list[list[int]]) -> tuple[float, float]:
    """Tokens a second: of time that passed, and of processor time."""
    begin, spent = time.perf_counter(), time.process_time()
    count = sum(map(len, generate(prompts)))
    return count / (time.perf_counter() - begin), count / (time.process_time() - spent)


def agreement(mine: list[list[int]], other: list[list[int]]) -> float:
    """Share of the tokens up to each request's first difference."""
    same = 0
    for a, b in zip(mine, other, strict=True):
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return same / sum(map(len, mine))


def measure(folder: Path, dtype: str, tokens: int, turns: int) -> dict[str, Any]:
    """Both engines in turns.

    Raises:
        SystemExit: other tokens in float32.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    engines = {"ours": ours(folder, dtype, tokens), "transformers": theirs(folder, dtype, tokens)}
    threads = torch.get_num_threads()  # after both have set what they want
    same = agreement(engines["ours"](prompts), [ids for p in prompts for ids in engines["transformers"]([p])])
    if dtype == "float32" and same < 1:
        raise SystemExit(f"other tokens than transformers: only {same:.1%} agree")
    rates: dict[str, list[tuple[float, float]]] = {}
    for _ in range(turns):
        for batch, given in (("alone", prompts[:1]), ("batch", prompts)):
            for name, generate in engines.items():
                rates.setdefault(f"{name}_{batch}", []).append(turn(generate, given))
    report: dict[str, Any] = {"dtype": dtype, "threads": threads, "same_tokens": same}
    for name, values in rates.items():
        report[name] = {kind: spread([v[i] for v in values]) for i, kind in enumerate(("wall", "cpu"))}
    for name, mine, other in (
        ("alone", "ours_alone", "transformers_alone"),
        ("batch", "ours_batch", "transformers_batch"),
        ("of_alone", "ours_batch", "transformers_alone"),
    ):
        pairs = list(zip(rates[mine], rates[other], strict=True))
        report[f"ratio_{name}"] = {
            kind: statistics.median(a[i] / b[i] for a, b in pairs) for i, kind in enumerate(("wall", "cpu"))
        }
    return report


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder (default: SmolLM2-135M-Instruct, see bench/smollm2.py)")
    parser.add_argument("--dtype", default="float32,bfloat16", metavar="D,D", help="%(default)s")
    parser.add_argument("--threads", metavar="N,N", help="of both engines (default: torch's own number)")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="of each request (%(default)s)")
    parser.add_argument("--turns", type=int, default=7, metavar="N", help="of each engine (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the numbers as JSON")
    args = parser.parse_args(argv)
    threads = list(map(int, args.threads.split(","))) if args.threads else [torch.get_num_threads()]
    folder = args.model or smollm2.folder()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cores = len(os.sched_getaffinity(0))
    machine = {"cpu": f"{processor()}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}"}
    machine |= {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    facts: dict[str, Any] = {"machine": machine, "commit": commit(), "date": now}
    facts |= {"model": folder.name, "tokens": args.tokens, "turns": args.turns}
    facts["load"] = "other work ran on the same cores" if os.getloadavg()[0] > 0.5 else "nothing else ran"
    rows = []
    for count in threads:
        for dtype in args.dtype.split(","):
            torch.set_num_threads(count)
            rows.append(measure(folder, dtype, args.tokens, args.turns))
            print(json.dumps(rows[-1], indent=1))
    if args.out:
        args.out.write_text(json.dumps({**facts, "decoding": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
