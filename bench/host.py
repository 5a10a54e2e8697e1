"""``python -m bench.host``: what the host does for a step of decodes, without a model and without a GPU.

An engine whose runner builds each step's arrays and returns the same tokens at once: so a step's time is planning it,
building its arrays, taking in the tokens of the step before, and reporting them. What launching takes (copies to the
device, a graph's replay) comes on top. The unit is milliseconds of this process's processor time a step, the median of
several stretches.

``listening`` is what a step takes more while somebody listens to the engine's events and does nothing with them, and
``tracing`` while a trace is written (docs/teach.md): after the stretches of the other rows, stretches with and without
alternate, and the value is the median of the differences between neighbours. (In between, steps that nobody listens to
take 5 to 30% longer: what was written has driven their data out of the processor's caches.) While nobody listens, an
engine asks three times a step whether anybody does.
"""

import argparse
import datetime
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autotune.revision import commit
from tritonllm.config.engine import EngineConfig
from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams
from tritonllm.engine.data.plan import StepPlan
from tritonllm.engine.data.results import RunningStep
from tritonllm.engine.loop.engine import LLMEngine
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.step.builder import StepBuilder
from tritonllm.engine.step.shared_prefix import CascadePlanner
from tritonllm.engine.text.input_processor import InputProcessor
from tritonllm.telemetry.trace import Trace

MAX_MODEL_LEN = 4096
BLOCK_SIZE, BLOCK_BYTES = 16, 16 * 8 * 128 * 2 * 2  # of a layer of Qwen3-0.6B
STRETCHES = 8
MOST_STEPS = (MAX_MODEL_LEN - 700) // (4 * STRETCHES)
CPU = torch.device("cpu")


class Runner:
    """In the place of a model runner: arrays, and token 5 for every request."""

    lockstep = None

    def __init__(self, seats: int, timed: "Clock", max_model_len: int = MAX_MODEL_LEN) -> None:
        planner = CascadePlanner(BLOCK_SIZE, BLOCK_BYTES)
        builder = StepBuilder(seats, -(-max_model_len // BLOCK_SIZE), BLOCK_SIZE, planner)
        self._build = timed("build", builder.build)

    def launch(self, plan: StepPlan) -> RunningStep:
        step = self._build(plan)
        return RunningStep(step.samples, torch.full((step.num_rows,), 5), None, [], CPU)


class Clock:
    """Processor time of the functions that it wraps, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.seconds[name] = 0.0

        def timed(*args: Any) -> Any:
            begin = time.process_time()
            result = function(*args)
            self.seconds[name] += time.process_time() - begin
            return result

        return timed


def make_engine(running: int, clock: Clock) -> LLMEngine:
    """An engine that plans ahead, as on a GPU."""
    num_blocks = running * MAX_MODEL_LEN // BLOCK_SIZE
    config = EngineConfig.from_kwargs(
        model="none", max_num_seqs=running, num_blocks=num_blocks, block_size=BLOCK_SIZE, async_scheduling=True
    )
    scheduler = Scheduler(config.scheduler, config.block_tokens, num_blocks, MAX_MODEL_LEN)
    inputs = InputProcessor(None, 1000, MAX_MODEL_LEN, frozenset({0}), 0)
    engine = LLMEngine(config, Runner(running, clock), scheduler, inputs)  # type: ignore[arg-type]
    for name in ("schedule", "update"):
        setattr(scheduler, name, clock(name, getattr(scheduler, name)))
    return engine


def measure(running: int, steps: int, kind: RequestOutputKind) -> dict[str, float]:
    """Milliseconds a step of so many decodes: ``schedule``, ``build``, ``update``, ``report``, and ``all``; and those
    that ``listening`` and ``tracing`` add."""
    clock = Clock()
    engine = make_engine(running, clock)
    params = SamplingParams(temperature=0.6, max_tokens=MAX_MODEL_LEN - 600, ignore_eos=True, output_kind=kind)
    for number in range(running):
        engine.add_request(str(number), [number % 1000, *range(100 + number * 400 // running)], params)
    while engine.stats.num_running < running or engine.stats.generated_tokens < 4 * running:
        engine.step()
    stretches = []
    for _ in range(STRETCHES):
        before, spent = dict(clock.seconds), {"all": stretch(engine, steps)}
        spent |= {name: seconds - before[name] for name, seconds in clock.seconds.items()}
        spent["report"] = 2 * spent["all"] - sum(spent.values())
        stretches.append(spent)
    for spent in stretches:  # afterwards: they leave the processor's caches full of other things
        alone = stretch(engine, steps)
        for name, watch in (("listening", listening), ("tracing", tracing)):
            with watch(engine):
                spent[name] = stretch(engine, steps) - alone
    return {name: 1e3 / steps * statistics.median(s[name] for s in stretches) for name in stretches[0]}


def stretch(engine: LLMEngine, steps: int) -> float:
    """Seconds of processor time."""
    begin = time.process_time()
    for _ in range(steps):
        engine.step()
    return time.process_time() - begin


@contextmanager
def listening(engine: LLMEngine) -> Iterator[None]:
    unsubscribe = engine.subscribe(lambda event: None)
    yield
    unsubscribe()


@contextmanager
def tracing(engine: LLMEngine) -> Iterator[None]:
    """To a compressed file."""
    with tempfile.TemporaryDirectory() as folder, Trace(engine, Path(folder) / "trace.json.gz", kernel_steps=0):
        yield


def processor() -> str:
    names = [line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", default="1,8,16,64,256", metavar="N,N", help="requests that decode (%(default)s)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="of a stretch (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the numbers as JSON")
    args = parser.parse_args(argv)
    if not 1 <= args.steps <= MOST_STEPS:
        parser.error(f"--steps must be from 1 to {MOST_STEPS}, so that requests last, got {args.steps}")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = {"cpu": processor(), "python": platform.python_version(), "commit": commit(), "date": now}
    rows: list[dict[str, Any]] = []
    for running in map(int, args.running.split(",")):
        for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA):
            rows.append({"running": running, "outputs": kind.name.lower(), "ms": measure(running, args.steps, kind)})
            print(f"{running:>5} {rows[-1]['outputs']:<10}", *(f"{k} {v:.3f}" for k, v in rows[-1]["ms"].items()))
    if args.out:
        args.out.write_text(json.dumps({**facts, "steps": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
