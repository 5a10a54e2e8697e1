"""``python -m bench.decoding``: what grammars and beam search cost beside plain decoding.

Models have published shapes and made-up weights (bench/engine_workloads.py), and a tokenizer from a seed
(bench/synthetic_vocabulary.py), since a mask's cost depends on the vocabulary's size and not on its words. Each model
gets a process of its own. Rows:

- G1, G64: so many requests at once, each with a JSON schema of its own, beside the same requests without; ``half``
  gives every second one a schema, and ``no_jumps`` draws the tokens that are forced, too (docs/decoding.md). Prompts
  have 128 tokens and outputs 256, which no schema lets end earlier.
- B1, B16: beam search of width 4 over so many prompts, beside ``n=4`` drawn continuations of them.

The value is milliseconds a token: (time of 256 tokens - time of 1 token) / 255, the median of the repetitions. Prompts
are cached and grammars are compiled before. What the host spends in xgrammar is measured beside it: ``fill_ms`` to fill
masks and ``accept_ms`` to take tokens in, milliseconds a step.
"""

import argparse
import datetime
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autotune.revision import commit
from bench.engine_worker import machine, watch_compilations
from bench.engine_workloads import MODELS, Request, Workload, requests, write_model
from bench.synthetic_vocabulary import write_tokenizer
from tritonllm.engine.loop import engine

HERE = Path(__file__).parent
WIDTH = 4  # of a beam search
ITEMS = 64  # of an array that a schema asks for: more than an output has room for
FILLS = (("GrammarMatcher", "fill_next_token_bitmask"), ("BatchGrammarMatcher", "batch_fill_next_token_bitmask"))
ACCEPTS = (("GrammarMatcher", "accept_token"), ("BatchGrammarMatcher", "batch_accept_token"))


@dataclass(frozen=True)
class Row:
    """A comparison: ``grammar`` or ``beams``, and how many prompts run at once."""

    kind: str
    count: int


ROWS = {"G1": Row("grammar", 1), "G64": Row("grammar", 64), "B1": Row("beams", 1), "B16": Row("beams", 16)}


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """As many different JSON schemas: arrays of objects with a few fields of several types, all of them required."""
    generator = random.Random(seed)

    def word() -> str:
        return "".join(generator.choices("etaoinshrdlu", k=generator.randint(3, 10)))

    def value() -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"type": "integer", "minimum": 0, "maximum": generator.randint(10, 5000)},
            {"type": "boolean"},
            {"type": "number"},
            {"type": "string", "maxLength": generator.randint(6, 24)},
            {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            {"enum": sorted({word() for _ in range(5)})},
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        ]
        return generator.choice(kinds)

    found = []
    for _ in range(count):
        fields = {f"{word()}_{i}": value() for i in range(generator.randint(4, 7))}
        item = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        found.append({"type": "array", "items": item, "minItems": ITEMS, "maxItems": ITEMS})
    return found


class Clock:
    """Seconds and calls of methods of xgrammar's, by what they are for."""

    def __init__(self) -> None:
        import xgrammar

        self.seconds = {"fill": 0.0, "accept": 0.0}
        self.calls = {"fill": 0, "accept": 0}
        self._undo: list[Callable[[], None]] = []
        for purpose, methods in (("fill", FILLS), ("accept", ACCEPTS)):
            for owner, name in methods:
                self._wrap(getattr(xgrammar, owner), name, purpose)

    def _wrap(self, owner: Any, name: str, purpose: str) -> None:
        function = vars(owner)[name]
        plain = function.__func__ if isinstance(function, staticmethod) else function

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = plain(*args, **kwargs)
            self.seconds[purpose] += time.perf_counter() - begin
            self.calls[purpose] += 1
            return result

        setattr(owner, name, staticmethod(timed) if isinstance(function, staticmethod) else timed)
        self._undo.append(lambda: setattr(owner, name, function))

    def stop(self) -> None:
        """Give the methods back."""
        for undo in self._undo:
            undo()


def without_jumps(run: "Run") -> "Run":
    """The same, with every token drawn."""

    def stepwise(tokens: int) -> Sequence[int]:
        with patch.object(engine, "jump", lambda requests, scheduler: []):
            return run(tokens)

    return stepwise


Run = Callable[[int], Sequence[int]]  # generates so many tokens for each prompt; returns the outputs' lengths


def sampled(llm: Any, batch: Sequence[Request], wishes: Sequence[Any], n: int = 1) -> Run:
    """Continue prompts, each with its own schema or ``None``; greedily, or with ``n`` drawn continuations."""
    from tritonllm import SamplingParams, StructuredOutputsParams

    prompts = [{"prompt_token_ids": request.prompt} for request in batch]

    def run(tokens: int) -> list[int]:
        params = [
            SamplingParams(
                n=n,
                temperature=1.0 if n > 1 else 0.0,
                seed=0,
                max_tokens=tokens,
                ignore_eos=wish is None,  # with a schema its end is the only one
                detokenize=False,
                structured_outputs=wish and StructuredOutputsParams(json=wish, disable_any_whitespace=True),
            )
            for wish in wishes
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(completion.token_ids) for output in outputs for completion in output.outputs]

    return run


def searched(llm: Any, batch: Sequence[Request]) -> Run:
    """Search for continuations of prompts."""
    from tritonllm import BeamSearchParams

    prompts = [{"prompt_token_ids": request.prompt} for request in batch]

    def run(tokens: int) -> list[int]:
        params = BeamSearchParams(beam_width=WIDTH, max_tokens=tokens, ignore_eos=True)
        outputs = llm.beam_search(prompts, params)
        each = zip(batch, outputs, strict=True)
        return [len(s.tokens) - len(request.prompt) for request, output in each for s in output.sequences]

    return run


def decode(llm: Any, run: Run, tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds a token and steps of the run from its first tokens to its last ones, with the clock's shares.

    Raises:
        RuntimeError: an output is not as long as was asked for.
    """
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run(1)
        first, before, clock = time.perf_counter() - begin, llm.engine.stats, Clock()
        begin = time.perf_counter()
        lengths = run(tokens)
        seconds = time.perf_counter() - begin - first
        clock.stop()
        if set(lengths) != {tokens}:
            raise RuntimeError(f"outputs have {sorted(set(lengths))} tokens instead of {tokens}: no result")
        steps, forced = llm.engine.stats.steps - before.steps, llm.engine.stats.forced_tokens - before.forced_tokens
        one = {"value": 1e3 * seconds / (tokens - 1), "steps": steps, "forced": forced / sum(lengths)}
        one["fills_a_step"] = clock.calls["fill"] / steps
        found.append(one | {f"{name}_ms": 1e3 * spent / steps for name, spent in clock.seconds.items()})
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def measure(llm: Any, name: str, model: str, workload: Workload, repeats: int) -> dict[str, Any]:
    """A row: the numbers of each mode, and how many times plain decoding's milliseconds each takes."""
    row, batch, tokens = ROWS[name], requests(workload), workload.output[0]
    nothing: list[Any] = [None] * row.count
    modes = {"plain": sampled(llm, batch, nothing)}
    if row.kind == "grammar":
        wishes = schemas(row.count)
        modes["grammar"] = sampled(llm, batch, wishes)
        modes["no_jumps"] = without_jumps(modes["grammar"])
        if row.count > 1:
            modes["half"] = sampled(llm, batch, [wish if i % 2 else None for i, wish in enumerate(wishes)])
    else:
        modes = {"plain": sampled(llm, batch, nothing, n=WIDTH), "beams": searched(llm, batch)}
    found: dict[str, Any] = {"row": name, "kind": row.kind, "model": model, "count": row.count, "modes": {}}
    for mode, run in modes.items():
        begin = time.perf_counter()
        run(1)  # from here on prompts are cached and grammars compiled
        found["modes"][mode] = {"first_seconds": time.perf_counter() - begin} | decode(llm, run, tokens, repeats)
    plain = found["modes"]["plain"]["value"]
    for numbers in found["modes"].values():
        numbers |= {"times_plain": numbers["value"] / plain, "more_ms": numbers["value"] - plain}
    return found


def run_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """All rows of a model, in this process."""
    from tritonllm import LLM

    comparisons = []
    with tempfile.TemporaryDirectory() as root:
        folder = write_model(model, MODELS[model], Path(root))
        write_tokenizer(folder, MODELS[model])
        llm = LLM(model=str(folder), load_format="dummy", **{"max_model_len": 4096} | args.options)
    compiled = watch_compilations()
    for name in args.rows:
        prompt, tokens = args.prompt, args.tokens
        workload = Workload(name, model, name, ROWS[name].count, (prompt, prompt), (tokens, tokens))
        before = len(compiled)
        row = measure(llm, name, model, workload, args.repeats)
        comparisons.append(row | {"kernels_compiled": len(compiled) - before})
        print(line(comparisons[-1]), *sorted(set(compiled[before:])), flush=True)
    return {"machine": machine(), "comparisons": comparisons}


def line(row: dict[str, Any]) -> str:
    head = f"{row['row']:<4} {row['model']:<13}"
    if "failed" in row:
        return f"{head} FAILED: {row['failed']}"
    for mode, numbers in row["modes"].items():
        head += f" | {mode} {numbers['value']:.3f} ms ({numbers['times_plain']:.2f}x, {numbers['steps']:.0f} steps"
        if numbers["fill_ms"]:
            head += f", fill {numbers['fill_ms']:.3f} accept {numbers['accept_ms']:.3f}, {numbers['forced']:.0%} forced"
        head += ")"
    return head + (f" | {row['kernels_compiled']} kernels compiled meanwhile" if row["kernels_compiled"] else "")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.decoding", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = "qwen3-0.6b,llama-3.1-8b"
    parser.add_argument("--model", default=models, metavar="NAME,NAME", help="of bench.engine_workloads (%(default)s)")
    parser.add_argument("--rows", default=",".join(ROWS), metavar="G64,B1", help="some of them (%(default)s)")
    parser.add_argument("--prompt", type=int, default=128, metavar="N", help="tokens of a prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of an output (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of each mode (%(default)s)")
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help='more arguments of LLM: {"max_num_seqs": 512}'
    )
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="for one model (%(default)s s)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "decoding.json", metavar="FILE")
    args = parser.parse_args(argv)
    for option, known in (("model", MODELS), ("rows", ROWS)):
        names = getattr(args, option).split(",")
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{option} must name some of {', '.join(known)}, got {', '.join(map(repr, unknown))}")
        setattr(args, option, names)
    if args.repeats < 1 or args.prompt < 1 or args.tokens < 2:
        parser.error("--repeats and --prompt must be at least 1, and --tokens at least 2")
    if not isinstance(args.options, dict):
        parser.error(f"--options must be a JSON object, got {args.options!r}")
    return args


def in_a_process(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """The report of one model, or rows that say what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "bench.decoding", "--model", model, "--rows", ",".join(args.rows)]
        command += ["--prompt", str(args.prompt), "--tokens", str(args.tokens), "--repeats", str(args.repeats)]
        command += ["--options", json.dumps(args.options), "--out", str(out)]
        try:
            code = subprocess.run(command, timeout=args.timeout, check=False).returncode
            reason = f"its process ended with exit code {code}"
        except subprocess.TimeoutExpired:
            code, reason = 1, f"no result within {args.timeout:.0f} s"
        if code:
            return {"comparisons": [{"row": name, "model": model, "failed": reason} for name in args.rows]}
        return json.loads(out.read_text())


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    report: dict[str, Any] = {"machine": {}, "commit": commit(), "date": now, "options": args.options}
    report |= {"prompt": args.prompt, "tokens": args.tokens, "comparisons": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for model in args.model:
        done = run_model(model, args) if len(args.model) == 1 else in_a_process(model, args)
        report["machine"] |= done.get("machine", {})
        report["comparisons"] += done["comparisons"]
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    failed = [row for row in report["comparisons"] if "failed" in row]
    print("\n".join(map(line, failed)) or f"wrote {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
