"""``python -m bench.timeline``: what the GPU does during one step, kernel by kernel, and how long it waits.

Runs the requests of W1 and W3a (bench/engine_workloads.py) twice: once alone, for the time of a step, and once under
torch's profiler, whose records (CUPTI's, in nanoseconds) say when each kernel of a CUDA graph began and ended. Out of
the stretch in which all requests decode it takes whole steps, and reports for each place in the step the median over
them. Recording lengthens steps a little; both times are reported. Of several ranks (``--options
'{"tensor_parallel_size": 2}'``) it looks at the first, and says what they exchange.
"""

import argparse
import datetime
import itertools
import json
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotune.revision import commit
from bench.engine_workloads import MODELS, WORKLOADS, requests, truncated, write_model
from bench.timeline_links import line, links
from bench.timeline_record import Drive, Event, drive, prepare, recorded

BIG_GAP_NS = 10_000  # the GPU waits for the host; less is the way from one kernel of a graph to the next


def split_steps(events: Sequence[Event], count: int) -> list[list[Event]]:
    """The whole steps among events of about ``count`` steps, those that do the same in the same order.

    A step begins at a kernel that runs once a step: of these, the one that the GPU waits for longest.

    Raises:
        ValueError: nothing runs once a step.
    """
    gaps: dict[str, list[int]] = {}
    for before, event in itertools.pairwise(events):
        gaps.setdefault(event.name, []).append(event.start - before.end)
    once = [name for name, found in gaps.items() if abs(len(found) - count) <= 1 and len(found) > 1]
    if not once:
        raise ValueError(f"of {len(events)} GPU events in {count} steps, none happens once a step")
    first = max(once, key=lambda name: statistics.median(gaps[name]))
    starts = [index for index, event in enumerate(events) if event.name == first]
    steps = [list(events[a:b]) for a, b in itertools.pairwise(starts)]
    sequences = Counter(tuple(event.name for event in step) for step in steps)
    usual = sequences.most_common(1)[0][0]
    return [step for step in steps if tuple(event.name for event in step) == usual]


_NAMED = re.compile(r"([A-Za-z_]\w*(?:_kernel|Kernel|Functor|functor|_impl|Op|Ops)\w*)")


def short_name(name: str) -> str:
    """A kernel's name without return type, arguments and most of its template arguments.

    torch's generic kernels keep the name of the functor that says what they compute.
    """
    if name.startswith("Mem"):
        return name
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "").split("(")[0]
    head, _, template = plain.partition("<")
    head = head.split("::")[-1]
    if not template:
        return head[:70]
    inner = [found for found in _NAMED.findall(template) if found not in (head, "gpu_kernel_impl_nocast")]
    return f"{head}<{inner[-1]}>"[:70] if inner else head[:70]


def positions(steps: Sequence[Sequence[Event]]) -> list[dict[str, Any]]:
    """The events of a step, each with the medians over the steps, in microseconds.

    ``us`` is the time by which an event ends after all before it (events may overlap), ``gap_us`` the time after it in
    which the GPU does nothing. The last event's gap is not known from the step alone, see :func:`step_report`.
    """
    rows: list[list[tuple[int, int]]] = []
    for step in steps:
        end, row = step[0].start, []
        for event, following in itertools.zip_longest(step, step[1:]):
            busy = max(0, event.end - max(end, event.start))
            end = max(end, event.end)
            row.append((busy, max(0, following.start - end) if following else 0))
        rows.append(row)
    return [
        {
            "name": steps[0][place].name,
            "us": statistics.median(row[place][0] for row in rows) / 1e3,
            "gap_us": statistics.median(row[place][1] for row in rows) / 1e3,
        }
        for place in range(len(steps[0]))
    ]


def table(sequence: Sequence[dict[str, Any]], layers: int) -> list[dict[str, Any]]:
    """The step's kernels by name, those that take longest first; ``share`` is percent of the step, gaps included."""
    total = sum(row["us"] + row["gap_us"] for row in sequence)
    kernels: dict[str, dict[str, Any]] = {}
    for row in sequence:
        name = short_name(row["name"])
        kernel = kernels.setdefault(name, {"name": name, "count": 0, "us": 0.0, "gap_us": 0.0})
        kernel["count"] += 1
        kernel["us"] += row["us"]
        kernel["gap_us"] += row["gap_us"]
    for kernel in kernels.values():
        kernel["per_layer"] = kernel["count"] / layers if kernel["count"] >= layers else 0.0
        kernel["share"] = 100 * kernel["us"] / total
    return sorted(kernels.values(), key=lambda kernel: -kernel["us"])


def totals(events: Sequence[Event], most: int = 20) -> list[dict[str, Any]]:
    """What a whole run consists of, by kernel, those that take longest first; ``share`` is percent of their sum."""
    kernels: dict[str, dict[str, Any]] = {}
    for event in events:
        kernel = kernels.setdefault(event.name, {"name": short_name(event.name), "count": 0, "ms": 0.0})
        kernel["count"] += 1
        kernel["ms"] += (event.end - event.start) / 1e6
    whole = sum(kernel["ms"] for kernel in kernels.values())
    longest = sorted(kernels.values(), key=lambda kernel: -kernel["ms"])[:most]
    return [kernel | {"share": 100 * kernel["ms"] / whole} for kernel in longest]


def idle(events: Sequence[Event], begin: int, end: int) -> dict[str, float]:
    """Percent of the time from ``begin`` to ``end`` in which the GPU did nothing, and the part of it in gaps long
    enough to be the host's."""
    waited = waited_long = 0
    at = begin
    for event in events:
        if event.end <= begin or event.start >= end:
            continue
        gap = max(0, event.start - at)
        waited += gap
        waited_long += gap if gap >= BIG_GAP_NS else 0
        at = max(at, event.end)
    gap = max(0, end - at)
    waited, waited_long = waited + gap, waited_long + (gap if gap >= BIG_GAP_NS else 0)
    span = max(1, end - begin)
    return {"seconds": span / 1e9, "idle_percent": 100 * waited / span, "host_percent": 100 * waited_long / span}


def step_report(run: Drive, events: Sequence[Event], layers: int) -> dict[str, Any]:
    """One decode step out of a recorded run. The time from a step's end to the next one's start is its last gap."""
    begin, end, count = run.stretch()
    steps = split_steps([event for event in events if begin <= event.start < end], count)
    sequence = positions(steps)
    between = [
        max(0, b[0].start - max(event.end for event in a))
        for a, b in itertools.pairwise(steps)
        if b[0].start - a[0].start < 1.5 * (end - begin) / count  # none was left out between them
    ]
    sequence[-1]["gap_us"] = statistics.median(between) / 1e3 if between else 0.0
    busy, gaps = (sum(row[key] for row in sequence) for key in ("us", "gap_us"))
    return {
        "recorded_step_us": busy + gaps,
        "busy_us": busy,
        "gap_us": gaps,
        "busy_percent": 100 * busy / max(busy + gaps, 1e-9),
        "events": len(sequence),
        "steps": len(steps),
        "kernels": table(sequence, layers),
        "sequence": [{**row, "name": short_name(row["name"])} for row in sequence],
    }


def report(llm: Any, name: str, max_tokens: int | None, config: dict[str, Any], ranks: int = 1) -> dict[str, Any]:
    """A workload's timeline: run it alone, run it recorded, look at both. A step only if there are decode steps. Of
    several ranks the first is looked at, and what they exchange is reported.

    ``busy_percent_alone`` is what the recorded kernels' time is of a step that nobody recorded: recording adds gaps.
    """
    batches = [requests(WORKLOADS[name], number) for number in (0, 1)]  # other tokens, so that nothing is cached
    if max_tokens is not None:
        batches = [truncated(batch, max_tokens) for batch in batches]
    alone = drive(llm, batches[0])
    with recorded() as events:
        run = drive(llm, batches[1])
    ours = [event for event in events if run.begin <= event.start]
    after = run.begin + min(1_000_000_000, (run.steps[-1] - run.begin) // 2)  # mostly prefill until then
    result = {
        "workload": name,
        "model": WORKLOADS[name].model,
        "running": len(batches[0]),
        "max_tokens": max_tokens,
        "prompt_tokens": sum(len(request.prompt) for request in batches[0]),
        "output_tokens": sum(request.max_tokens for request in batches[0]),
        "seconds": alone.seconds,
        "recorded_seconds": run.seconds,
        "events_in_run": len(ours),
        "idle": idle(ours, after, max((event.end for event in ours), default=after))
        | {"from_second": (after - run.begin) / 1e9},
        "totals": totals(ours),
    }
    if max(request.max_tokens for request in batches[0]) == 1:
        return result
    step = step_report(run, ours, config["num_hidden_layers"])
    if ranks > 1:
        step["links"] = links(step["kernels"], len(batches[0]), config, ranks)
    alone_us = 1e3 * alone.step_ms()
    return result | step | {"step_us": alone_us, "busy_percent_alone": min(100.0, 100 * step["busy_us"] / alone_us)}


def text(result: dict[str, Any], rows: int = 40) -> str:
    """The report as a table in Markdown: of a step, or of the whole run where there is no decode step."""
    tokens, wait = result["prompt_tokens"] + result["output_tokens"], result["idle"]
    head = f"{result['workload']} {result['model']}, {result['running']} running: "
    run = (
        f"the run {result['seconds']:.2f} s, {tokens / result['seconds']:,.0f} tokens/s with prompts; after second "
        f"{wait['from_second']:.2g} the GPU idle {wait['idle_percent']:.1f}% ({wait['host_percent']:.1f}% the host's)"
    )
    if "kernels" not in result:
        lines = [head + run, "", "| kernel | in the run | ms | share |", "|---|---:|---:|---:|"]
        for kernel in result["totals"][:rows]:
            lines.append(f"| {kernel['name']} | {kernel['count']} | {kernel['ms']:.1f} | {kernel['share']:.1f}% |")
        return "\n".join(lines)
    lines = [
        f"{head}a step {result['step_us']:.0f} us (recorded {result['recorded_step_us']:.0f}), "
        f"{result['events']} kernels, GPU busy {result['busy_percent_alone']:.1f}% (recorded "
        f"{result['busy_percent']:.1f}%); {run}",
        "",
        "| kernel | in a step | in a layer | us | gaps after, us | share |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kernel in result["kernels"][:rows]:
        layer = f"{kernel['per_layer']:.2g}" if kernel["per_layer"] else ""
        lines.append(
            f"| {kernel['name']} | {kernel['count']} | {layer} | {kernel['us']:.1f} | {kernel['gap_us']:.1f} "
            f"| {kernel['share']:.1f}% |"
        )
    lines.append(f"| all | {result['events']} | | {result['busy_us']:.1f} | {result['gap_us']:.1f} | |")
    lines += ["", line(result["links"])] if "links" in result else []
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.timeline", description="Look into one step of the engine.")
    default = Path(__file__).parent / "results" / "timeline.json"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help="the result as JSON (%(default)s)")
    parser.add_argument("--workload", default="W1,W3a", metavar="W1,W3a", help="of one model (%(default)s)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="end requests earlier than the workload says")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of LLM, as a JSON object")
    args = parser.parse_args(argv)
    names = args.workload.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"--workload must be of {', '.join(WORKLOADS)}, got {', '.join(unknown)}")
    if len(models := {WORKLOADS[name].model for name in names}) > 1:
        parser.error(f"--workload must name workloads of one model, got {', '.join(sorted(models))}")
    results = measure(names, models.pop(), args.max_tokens, args.options)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {args.out}")
    return 0


def measure(names: Sequence[str], model: str, max_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Start the engine and report every workload, printing each table as soon as it is there."""
    from bench.engine_worker import Engine, machine

    prepare()
    config = MODELS[model]
    with tempfile.TemporaryDirectory() as root:
        folder = write_model(model, config, Path(root))
        longest = max(WORKLOADS[name].max_model_len for name in names)
        engine = Engine("tritonllm", folder, {"max_model_len": longest} | options)
    ranks = options.get("tensor_parallel_size", 1) if options.get("pipeline_parallel_size", 1) == 1 else 1
    print(f"import {engine.import_seconds:.1f} s, start {engine.start_seconds:.1f} s", flush=True)
    timelines = []
    for name in names:
        timelines.append(report(engine.llm, name, max_tokens, config, ranks))
        print(f"\n{text(timelines[-1])}\n", flush=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"machine": machine(), "commit": commit(), "date": now, "timelines": timelines}


if __name__ == "__main__":
    sys.exit(main())
