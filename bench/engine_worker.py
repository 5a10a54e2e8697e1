"""The engine benchmark's process: start one engine with one model, run its workloads, write what they took.

``bench.engine`` starts it. tritonllm and vLLM are driven by the same lines, since the names that these need are the
same in both.
"""

import argparse
import gc
import importlib
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine_workloads import (
    MODELS,
    WORKLOADS,
    Request,
    Workload,
    checksum,
    requests,
    truncated,
    warm_up_request,
    write_model,
)
from bench.joining import measure as measure_joining
from bench.speculation import PLAIN, compare_with_plain, make_certain, with_drafts

ENGINES = ("tritonllm", "vllm")


class Pass(NamedTuple):
    """One timed call of ``generate``."""

    seconds: float
    generated: int  # tokens
    cached: int  # prompt tokens that came from the prefix cache


class Engine:
    """A started engine.

    Args:
        name: of :data:`ENGINES`.
        folder: the model's configuration.
        options: more arguments of its ``LLM``.

    Attributes:
        import_seconds: until the package was imported.
        start_seconds: from then until it was ready for requests.
        first_seconds: from then until the warm-up request was answered.
    """

    def __init__(self, name: str, folder: Path, options: dict[str, Any]) -> None:
        begin = time.perf_counter()
        package = importlib.import_module(name)
        make, self._params = package.LLM, package.SamplingParams  # both packages import these on first use
        imported = time.perf_counter()
        self.llm = make(model=str(folder), load_format="dummy", skip_tokenizer_init=True, **options)
        started = time.perf_counter()
        self.version = package.__version__
        self.import_seconds, self.start_seconds = imported - begin, started - imported
        self.first_seconds = self.run([warm_up_request()]).seconds

    def run(self, batch: Sequence[Request]) -> Pass:
        """Generate what the requests ask for, all together, from the call to the last token.

        Raises:
            RuntimeError: an output is not as long as was asked for.
        """
        return self.generate(batch)[0]

    def params_of(self, request: Request) -> Any:
        wishes = {"temperature": request.temperature, "max_tokens": request.max_tokens}
        return self._params(**wishes, ignore_eos=True, detokenize=False)

    def generate(self, batch: Sequence[Request]) -> tuple[Pass, list[list[int]]]:
        """The same, with the tokens."""
        prompts = [{"prompt_token_ids": request.prompt} for request in batch]
        params = [self.params_of(request) for request in batch]
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        wanted = [request.max_tokens for request in batch]
        if lengths != wanted:
            at = next(i for i, (a, b) in enumerate(zip(lengths, wanted, strict=True)) if a != b)
            raise RuntimeError(f"request {at} got {lengths[at]} tokens instead of {wanted[at]}: no result")
        done = Pass(seconds, sum(lengths), sum(output.num_cached_tokens or 0 for output in outputs))
        return done, [list(output.outputs[0].token_ids) for output in outputs]


def repetition(engine: Engine, workload: Workload, number: int, plain: Engine | None = None) -> dict[str, float]:
    """One repetition: its ``value`` in the workload's unit, the seconds of its passes, and what else it showed.

    Args:
        plain: an engine without drafts, if the other one has some.
    """
    batch = requests(workload, number)
    if plain is not None:
        return compare_with_plain(engine, plain, batch)
    if workload.kind == "join":
        return measure_joining(engine, workload, number)
    if workload.kind == "latency":
        # the time to the first token, from other tokens of the same length, so that no prefix cache knows them
        first = engine.run(truncated(requests(workload, number, again=1), 1))
        whole = engine.run(batch)
        steps = batch[0].max_tokens - 1
        value = 1e3 * (whole.seconds - first.seconds) / steps
        return {"value": value, "seconds": whole.seconds, "first_token_seconds": first.seconds}
    done = engine.run(batch)
    if workload.kind == "turn":
        turn = engine.run(requests(workload, number, again=1))
        if turn.cached < workload.shared:
            raise RuntimeError(f"{turn.cached} of {workload.shared} tokens were in the prefix cache: no result")
        return {"value": 1e3 * turn.seconds, "seconds": turn.seconds, "first_turn_seconds": done.seconds}
    result = {"seconds": done.seconds, "cached_tokens": done.cached}
    if workload.kind == "prefix":
        warm = engine.run(requests(workload, number, again=1))
        result |= {"warm_seconds": warm.seconds, "warm_value": len(batch) / warm.seconds}
        return result | {"value": len(batch) / done.seconds}
    tokens = sum(len(r.prompt) for r in batch) if workload.kind == "prefill" else done.generated
    return result | {"value": tokens / done.seconds}


def measure(
    engine: Engine, workload: Workload, repeats: int, compiled: list[str], plain: Engine | None = None
) -> dict[str, Any]:
    """A workload's row: the median repetition's numbers, and every repetition's value.

    Args:
        compiled: grows by a name whenever Triton builds a kernel; there should be none now.
        plain: see :func:`repetition`.
    """
    gc.collect()  # the garbage of what came before
    before = len(compiled)
    runs = [repetition(engine, workload, number, plain) for number in range(repeats)]
    middle = min(runs, key=lambda run: abs(run["value"] - statistics.median(run["value"] for run in runs)))
    return {
        "workload": workload.name,
        "model": workload.model,
        "kind": workload.kind,
        "requests": workload.count,
        "checksum": checksum(requests(workload)),
        **middle,
        "values": [run["value"] for run in runs],
        "kernels_compiled": len(compiled) - before,
    }


def watch_compilations() -> list[str]:
    """A list that grows by a name whenever Triton builds or loads a kernel in this process; empty without Triton."""
    compiled: list[str] = []
    try:
        import triton
    except ImportError:
        return compiled
    before = triton.knobs.runtime.jit_post_compile_hook

    def hook(**info: Any) -> Any:
        compiled.append(info["repr"])
        return before(**info) if before is not None else None

    triton.knobs.runtime.jit_post_compile_hook = hook
    return compiled


def machine() -> dict[str, str]:
    """What numbers of this process depend on."""
    import torch

    facts = {name: metadata.version(name) for name in ("torch", "triton", "transformers")}
    facts["python"] = platform.python_version()
    if not torch.cuda.is_available():
        return {"gpu": f"none ({platform.machine()} CPU)", **facts}
    from bench.runner import machine as gpu_machine

    return {**facts, **gpu_machine(torch.device("cuda", 0))}


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_worker", description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--workloads", default="", help="names, separated by commas; none: only start")
    parser.add_argument("--repeats", type=int, help="instead of each workload's own number")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of LLM, as a JSON object")
    parser.add_argument("--out", type=Path, required=True, help="where the result goes, as JSON")
    args = parser.parse_args(argv)
    todo = [WORKLOADS[name] for name in args.workloads.split(",") if name]
    length = max((w.max_model_len for w in todo), default=4096)
    with tempfile.TemporaryDirectory() as root:
        folder = write_model(args.model, MODELS[args.model], Path(root))
        options, plain = {"max_model_len": length} | args.options, None
        if any(workload.kind == "speculation" for workload in todo):
            draft = todo[0].draft  # a process has workloads of one
            small = None if draft is None else write_model(draft, MODELS[draft], Path(root) / "draft")
            plain = Engine(args.engine, folder, PLAIN | options)
            options = with_drafts(small) | options
        engine = Engine(args.engine, folder, options)
        if plain is not None:
            make_certain(plain.llm)
            make_certain(engine.llm)
    say(
        f"{args.model}: import {engine.import_seconds:.1f} s, start {engine.start_seconds:.1f} s, "
        f"first request {engine.first_seconds:.2f} s"
    )
    compiled = watch_compilations()
    rows = []
    for workload in todo:
        rows.append(measure(engine, workload, args.repeats or workload.repeats, compiled, plain))
        say(
            f"{workload.name}: {rows[-1]['value']:.6g}, {rows[-1]['seconds']:.3f} s, {compiled[-4:] or 'none'} compiled"
        )
    start = {"import": engine.import_seconds, "start": engine.start_seconds, "first_request": engine.first_seconds}
    report = {
        "machine": machine(),
        "engine": {"name": args.engine, "version": engine.version},
        "start_seconds": start,
        "rows": rows,
    }
    args.out.write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
