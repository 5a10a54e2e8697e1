"""What all results files have in common: who measured when, the groups of cases, and figures of others.

A results file says where its numbers come from (``machine``, ``commit``, ``date``). ``listed_peers.json`` holds what
others took on another day: a ratio to such a figure is less certain than one within a run, so tables and plots name
the day.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LISTED: dict[str, Any] = json.loads((HERE / "listed_peers.json").read_text())
GROUPS = {
    "K1": "Paged decode attention",
    "K2": "Prefill attention",
    "K3": "Norm, rotary embedding, activation, KV store",
    "K4": "Mixture of experts",
    "K5": "Sampling and log-probabilities",
    "K6": "Rejection sampling",
    "K7": "Products of few rows",
}


def number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def of_floor(value: float, floor: float, latency: bool) -> float:
    """Percent of the floor that a value reaches: a time lies above its floor, a rate below it."""
    return 100 * (floor / value if latency else value / floor)


def gpus_of(options: dict[str, Any]) -> int:
    """How many GPUs an engine with these options has."""
    return math.prod(options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    lines = [" | ".join(head), "|".join(["---", *["---:"] * (len(head) - 1)]), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" if not line.startswith("---") else f"|{line}|" for line in lines)


def best_listed(case: dict[str, Any]) -> tuple[str, float]:
    """The fastest listed peer for a kernel case, and its microseconds; 0 if nobody is listed."""
    listed = {**LISTED["us"], **LISTED["kernels_us"].get(case["group"], {})}.get(case["case"])
    if not listed:
        return "", 0.0
    best = min(listed, key=lambda name: listed[name])
    return best, listed[best]


def without_others(rows: list[dict[str, Any]], gpu: str, ceilings: str | None = None) -> list[dict[str, Any]]:
    """An engine's rows without aims and listed peers, if they ran on another kind of GPU than these are listed for.

    Args:
        ceilings: where the floors come from; ``"listed"`` ones are that other GPU's, too.
    """
    if gpu == LISTED["machine"]:
        return rows
    others = {"goal", "goal_met", "listed", "times_better_than_listed"}
    others |= {"floor", "percent"} if ceilings == "listed" else set()
    return [{name: value for name, value in row.items() if name not in others} for row in rows]


def kind_of(report: dict[str, Any]) -> str | None:
    """Which benchmark wrote a report, by what is in it; ``None`` for none of them."""
    if "sweep" in report:
        return "attention"
    if "rows" in report and "engine" in report:
        return "engine"
    keys = {
        "cases": "kernels",
        "timelines": "timeline",
        "steps": "host",
        "chat_turns": "chat-turn",
        "sums": "sums",
        "ways": "exchange",
        "outcomes": "parity",
        "decoding": "cpu",
        "comparisons": "decoding",
        "copies": "swap",
        "loads": "kv-link",
        "prefill_decode": "prefill-decode",
        "leaves": "kv-layers",
        "found": "kv-found",
        "grammars": "grammars",
        "accuracy": "accuracy",
        "routing": "routing",
        "load": "serving",
        "nano": "nano",
        "cluster": "cluster",
    }
    return next((kind for key, kind in keys.items() if key in report), None)


def facts(report: dict[str, Any]) -> str:
    """Where and when it was measured, as a sentence."""
    named = {"gpu": report.get("device") or report.get("cpu", "?"), "python": report.get("python", "?")}
    machine = report.get("machine") or {name: value for name, value in named.items() if value != "?"}
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if name not in ("gpu", "cpu"))
    commit = f"commit {report['commit']}, " if report["commit"] else ""  # of a copy without git nothing is known
    return f"{machine.get('gpu') or machine['cpu']} ({versions}), {commit}{report['date'][:10]}."
