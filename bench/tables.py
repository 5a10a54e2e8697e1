"""``python -m bench.tables RESULTS.json``: what a benchmark wrote, as a table in Markdown.

For ``bench.engine``, ``bench.kernels`` and ``bench.timeline``. ``2.00x`` always means that ours takes half the time of
the other, or has twice its rate.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import timeline
from bench.engine import number
from bench.plot_bars import GROUPS, LISTED, best_listed


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [" | ".join(head), "|".join(["---", *["---:"] * (len(head) - 1)]), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" if not line.startswith("---") else f"|{line}|" for line in lines)


def facts(report: dict[str, Any]) -> str:
    """Where and when it was measured."""
    versions = {name: version for name, version in report["machine"].items() if name != "gpu"}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{report['machine']['gpu']} ({named}), commit {report['commit']}, {report['date'][:10]}."


def engine(report: dict[str, Any]) -> str:
    peer = LISTED["engine"]["peer"]
    rows = []
    for row in report["rows"]:
        if "failed" in row:
            rows.append([row["workload"], row["failed"], *[""] * 4])
            continue
        value = f"**{number(row['value'])}** {row['unit']}"
        if "warm_value" in row:
            value += f" (warm {number(row['warm_value'])})"
        floor = f"{number(row['floor'])} ({row['percent']:.0f}%)" if "floor" in row else ""
        if "floor_shared_reads" in row:
            floor += f", shared {number(row['floor_shared_reads'])} ({row['percent_of_floor_shared_reads']:.0f}%)"
        goal = f"{number(row['goal'])} {'met' if row['goal_met'] else 'missed'}"
        listed = [number(row["listed"]), f"{row['times_better_than_listed']:.2f}x"] if "listed" in row else ["", ""]
        rows.append([f"{row['workload']} {row['model']}", value, floor, goal, *listed])
    head = ["workload", report["engine"]["name"], "floor (percent of it)", "aim", peer, "times better"]
    return markdown(head, rows)


def kernels(report: dict[str, Any], groups: Sequence[str]) -> str:
    parts = []
    for group in groups:
        rows = [kernel(case) for case in report["cases"] if case["group"] == group]
        if rows:
            head = ["case", "us", "floor", "error", "torch, same run", "best listed peer", "times faster"]
            parts.append(f"{group}: {GROUPS[group].lower()}\n\n{markdown(head, rows)}")
    return "\n\n".join(parts)


def kernel(case: dict[str, Any]) -> list[str]:
    if "failed" in case:
        return [case["case"], "failed", "", case["failed"], "", "", ""]
    torch = number(case["torch_us"]) if "torch_us" in case else ""
    peer, us = best_listed(case)
    beside = [f"{peer} {number(us)}", f"{us / case['us']:.2f}x"] if us else ["", ""]
    values = [f"**{number(case['us'])}**", f"{case['percent']:.0f}%", f"{case['error']:.1e}"]
    return [case["case"], *values, torch, *beside]


def table(report: dict[str, Any], groups: Sequence[str]) -> str:
    """Any of the reports as Markdown.

    Raises:
        ValueError: not a report of these benchmarks.
    """
    if "timelines" in report:
        body = "\n\n".join(map(timeline.text, report["timelines"]))
    elif "cases" in report:
        body = kernels(report, groups)
    elif "rows" in report and "engine" in report:
        body = engine(report)
    else:
        raise ValueError("not the results of bench.engine, bench.kernels or bench.timeline")
    return f"{facts(report)}\n\n{body}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tables", description="Print results as Markdown.")
    parser.add_argument("results", type=Path, help="what a benchmark wrote")
    parser.add_argument("--only", default=",".join(GROUPS), metavar="K3,K4", help="groups of bench.kernels (all)")
    args = parser.parse_args(argv)
    try:
        print(table(json.loads(args.results.read_text()), args.only.split(",")))
    except ValueError as error:
        print(f"{args.results}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
