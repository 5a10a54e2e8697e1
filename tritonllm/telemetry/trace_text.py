"""A trace's summary as text: tables of rich's on a terminal that has it, plain ones otherwise."""

import sys
from collections.abc import Sequence
from typing import Any

REQUESTS = 20  # that are shown


def ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


class Table:
    """Columns that begin with ``<`` are aligned to the left."""

    def __init__(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        self.title, self.columns, self.rows, self.note = title, columns, rows, note

    def plain(self) -> str:
        names = [name.removeprefix("<") for name in self.columns]
        widths = [max(len(row[i]) for row in (names, *self.rows)) for i in range(len(names))]
        lines = [self.title] if self.title else []
        for row in (names, *self.rows):
            cells = [
                cell.ljust(width) if name.startswith("<") else cell.rjust(width)
                for cell, width, name in zip(row, widths, self.columns, strict=True)
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join(lines + ([f"  {self.note}"] if self.note else []))


def tables(summary: dict[str, Any]) -> list[str | Table]:
    """The tables of a summary, in the order in which they are read."""
    trace, totals, idle = summary["trace"], summary["totals"], summary["idle"]
    head = (
        f"{trace['seconds']:.3f} s, {trace['events']:,} events"
        f"{'' if trace['complete'] else ' (not complete)'}; the trace ended because {trace['why']}"
    )
    tokens = (
        f"{totals['requests']} requests ({totals['unfinished']} unfinished), {totals['steps']} steps: "
        f"{totals['prompt_tokens']:,} prompt tokens ({totals['cached_tokens']:,} cached), "
        f"{totals['computed_tokens']:,} computed, {totals['new_tokens']:,} new "
        f"({totals['new_tokens_per_second']:,.1f}/s), {totals['preemptions']} preemptions"
    )
    if totals["drafts"]:
        tokens += f", {totals['accepted_drafts']} of {totals['drafts']} drafts accepted"
    found: list[str | Table] = [head, tokens]
    found += [f"a step was broken off: {reason}" for reason in summary["resets"]]
    found += [_spreads(summary), _requests(summary), _batches(summary)]
    if idle is not None:
        found.append(_idle(idle))
    found.append(_slowest(summary["slowest"]))
    found.append(_kernels(summary) if summary["kernels"] else f"kernels: {trace['kernels']}")
    blocks = summary["blocks"]
    moved = ", ".join(f"{blocks[name]:.0f} {name}" for name in ("evicted", "copied", "stored", "loaded"))
    found.append(f"blocks: at most {blocks['most_used']:.0f} of {blocks['all']:.0f} used; {moved}")
    return found


def _spreads(summary: dict[str, Any]) -> Table:
    rows = []
    names = {"queue_ms": "queued", "ttft_ms": "time to first token", "itl_ms": "between tokens", "total_ms": "all"}
    every = {names[name]: found for name, found in summary["of_requests"].items()}
    every = {name: every[name] for name in names.values()}
    for name in ("plan", "launch", "wait", "device"):
        every[f"step: {name}"] = summary["steps"][f"{name}_ms"]
    for name, found in every.items():
        rows.append([name, *(ms(found and found[key]) for key in ("mean", "p50", "p90", "p99", "max"))])
    return Table("Times, ms", ["<", "mean", "p50", "p90", "p99", "max"], rows)


def _requests(summary: dict[str, Any]) -> Table:
    rows = []
    for one in summary["requests"][:REQUESTS]:
        gaps = one["itl_ms"] or {}
        end = "unfinished" if one["unfinished"] else one["error"] or ", ".join(dict.fromkeys(one["finish_reasons"]))
        counts = [str(one[key]) for key in ("prompt_tokens", "cached_tokens", "output_tokens")]
        times = [ms(one["queue_ms"]), ms(one["ttft_ms"]), ms(gaps.get("p50")), ms(gaps.get("p99")), ms(one["total_ms"])]
        rows.append([one["request"], *counts, *times, str(one["chunks"]), str(one["preemptions"]), end])
    columns = ["<request", "prompt", "cached", "new", "queued", "TTFT", "ITL p50", "p99", "all", "chunks", "preempted"]
    more = len(summary["requests"]) - len(rows)
    note = f"and {more} more (--json has all)" if more > 0 else ""
    return Table("Requests, ms", [*columns, "<end"], rows, note)


def _batches(summary: dict[str, Any]) -> Table:
    rows = [
        [
            one["what"],
            str(one["steps"]),
            f"{one['tokens'] / one['steps']:.1f}",
            ms(one["ms"] / one["steps"]),
            f"{1e3 * one['new_tokens'] / one['ms']:,.1f}" if one["ms"] else "-",
        ]
        for one in summary["batches"]
    ]
    return Table("What steps were made of", ["<", "steps", "tokens a step", "ms a step", "new tokens/s"], rows)


def _idle(idle: dict[str, Any]) -> Table:
    causes = "; ".join(f"{cause} {ms(value)} ms" for cause, value in idle["causes_ms"].items())
    title = (
        f"The device without a step: {ms(idle['ms'])} ms, {100 * idle['share']:.1f}% of the time ({idle['gaps']} gaps)"
    )
    rows = [
        [
            str(gap["before_step"]),
            ms(gap["at_ms"]),
            ms(gap["ms"]),
            ", ".join(f"{cause} {ms(value)}" for cause, value in gap["causes"].items()),
        ]
        for gap in idle["longest"][:5]
    ]
    return Table(
        title, ["before step", "at", "ms", "<the host's doing, ms"], rows, f"in all: {causes}" if causes else ""
    )


def _slowest(steps: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for one in steps:
        parts = [f"{one[kind]} {kind} ({one[f'{kind}_tokens']} tokens)" for kind in _kinds(one)]
        contents = ", ".join(parts + one.get("prompts", []))
        times = [ms(one[f"{name}_ms"]) for name in ("plan", "launch", "wait", "device")]
        rows.append([str(one["step"]), ms(one["at_ms"]), *times, f"{one['running']}+{one['waiting']}", contents])
    columns = ["step", "at", "plan", "launch", "wait", "device", "run+wait", "<contents"]
    return Table(f"The {len(rows)} slowest steps, ms", columns, rows)


def _kinds(step: dict[str, Any]) -> list[str]:
    return [kind for kind in ("decode", "verify", "prefill") if kind in step]


def _kernels(summary: dict[str, Any]) -> Table:
    found = summary["kernels"]
    title = (
        f"Kernels {summary['trace']['kernels']}: {found['count']:,} in {ms(found['ms'])} ms, the GPU busy "
        f"{100 * found['busy_share']:.1f}% of that time"
    )
    rows = [
        [
            row["name"],
            f"{row['count']:,}",
            ms(row["ms"]),
            f"{1e3 * row['ms'] / row['count']:.1f}",
            f"{row['share']:.1%}",
        ]
        for row in found["by_name"]
    ]
    return Table(title, ["<", "count", "ms", "us each", "share"], rows)


def text(summary: dict[str, Any]) -> str:
    """A summary as text, without any control characters."""
    return "\n\n".join(part if isinstance(part, str) else part.plain() for part in tables(summary)) + "\n"


def show(summary: dict[str, Any]) -> None:
    """Show a summary on stdout, with rich if that is a terminal."""
    if not sys.stdout.isatty():
        sys.stdout.write(text(summary))
        return
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        sys.stdout.write(text(summary))
        return
    console = Console(highlight=False)
    for part in tables(summary):
        if isinstance(part, str):
            console.print(part, markup=False)
            continue
        drawn = RichTable(title=part.title, title_justify="left", caption=part.note, box=box.SIMPLE, title_style="bold")
        for name in part.columns:
            left = name.startswith("<")
            drawn.add_column(name.removeprefix("<"), justify="left" if left else "right", overflow="fold")
        for row in part.rows:
            drawn.add_row(*(cell.replace("[", "\\[") for cell in row))
        console.print(drawn)
