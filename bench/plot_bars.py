"""Bars: how near kernels and workloads come to their floor, ours beside others. Used by ``bench.plot``."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.plot_svg import document, text

LISTED = json.loads((Path(__file__).parent / "listed_peers.json").read_text())
COLOURS = {"tritonllm": "rgb(140,41,99)", "vllm": "rgb(140,41,99)", "torch": "#b9b9b9", "listed": "rgb(250,196,98)"}
GROUPS = {
    "K1": "Paged decode attention",
    "K2": "Prefill attention",
    "K3": "Norm, rotary embedding, activation, KV store",
    "K4": "Mixture of experts",
    "K5": "Sampling",
    "K6": "Rejection sampling",
    "K7": "Products of few rows",
}
LABELS, WIDTH, NUMBERS, BAR, PAD = 330, 420, 260, 11, 7  # left of the bars, 100%, right of them; heights


@dataclass(frozen=True)
class Bar:
    """``percent`` of the floor that someone reaches; ``kind`` decides the colour; ``label`` stands behind the bar."""

    kind: str
    percent: float
    label: str


@dataclass(frozen=True)
class Row:
    """Bars of one case, one below the other; ``goal`` draws a mark at that percentage."""

    name: str
    bars: list[Bar] = field(default_factory=list)
    goal: float | None = None


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def best_listed(case: dict[str, Any]) -> tuple[str, float]:
    """The fastest listed peer for a kernel case, and its microseconds; 0 if nobody is listed."""
    listed = {**LISTED["us"], **LISTED["kernels_us"].get(case["group"], {})}.get(case["case"])
    if not listed:
        return "", 0.0
    best = min(listed, key=lambda name: listed[name])
    return best, listed[best]


def kernel_rows(cases: Iterable[dict[str, Any]]) -> list[Row]:
    """From the results of ``bench.kernels``: ours, torch in the same run, and the best listed peer."""
    rows = []
    for case in cases:
        if "failed" in case:
            rows.append(Row(case["case"], [Bar("tritonllm", 0.0, "failed")]))
            continue
        floor = case["floor_us"]
        bars = [Bar("tritonllm", case["percent"], f"{number(case['us'])} us")]
        if "torch_us" in case:
            bars.append(Bar("torch", 100 * floor / case["torch_us"], f"torch {number(case['torch_us'])}"))
        peer, us = best_listed(case)
        if us:
            bars.append(Bar("listed", 100 * floor / us, f"{peer} {number(us)}, ours {us / case['us']:.2f}x"))
        rows.append(Row(case["case"], bars))
    return rows


def engine_rows(report: dict[str, Any]) -> list[Row]:
    """From the results of ``bench.engine``; rows without a floor (the starts) are left out."""
    rows = []
    for row in report["rows"]:
        if "floor" not in row or "value" not in row:
            continue
        latency, floor = row["kind"] == "latency", row["floor"]
        label = f"{number(row['value'])} {row['unit']}"
        bars = [Bar(report["engine"]["name"], of_floor(row["value"], floor, latency), label)]
        if "listed" in row:
            label = f"{LISTED['engine']['peer']} {number(row['listed'])}, ours {row['times_better_than_listed']:.2f}x"
            bars.append(Bar("listed", of_floor(row["listed"], floor, latency), label))
        goal = of_floor(row["goal"], floor, latency) if "goal" in row else None
        rows.append(Row(f"{row['workload']}  {row['model']}, {row['kind']}", bars, goal))
    return rows


def of_floor(value: float, floor: float, latency: bool) -> float:
    """Percent: a time is over its floor, a rate under it."""
    return 100 * (floor / value if latency else value / floor)


def _panel(title: str, rows: Sequence[Row], top: float) -> tuple[list[str], float]:
    """One panel as SVG elements, and where it ends."""
    parts, y = [text(LABELS, top + 14, title, anchor="start", size=14)], top + 26
    begin = y
    for row in rows:
        height = BAR * len(row.bars)
        parts.append(text(LABELS - 8, y + height / 2 + 4, row.name, anchor="end", size=11))
        for index, bar in enumerate(row.bars):
            width, at = WIDTH / 100 * min(bar.percent, 110), y + BAR * index
            fill = COLOURS[bar.kind]
            parts.append(
                f'<g><title>{bar.percent:.1f}% of the floor</title><rect x="{LABELS}" y="{at:g}" '
                f'width="{max(width, 1):.1f}" height="{BAR - 1}" fill="{fill}"/></g>'
            )
            label = f"{bar.percent:.0f}%  {bar.label}"
            parts.append(text(LABELS + width + 5, at + 9, label, anchor="start", size=10))
        if row.goal is not None:
            x = LABELS + WIDTH / 100 * row.goal
            parts.append(f'<path d="M{x:.1f} {y - 2:g}v{BAR + 3}" stroke="#060" stroke-width="2"/>')
        y += height + PAD
    for percent in (0, 25, 50, 75, 100):
        x = LABELS + WIDTH / 100 * percent
        parts.insert(0, f'<path d="M{x:g} {begin - 4:g}V{y:g}" stroke="#ddd"/>')
        parts.append(text(x, y + 12, f"{percent}%", size=10))
    return parts, y + 26


def draw(title: str, facts: str, panels: dict[str, Sequence[Row]], legend: dict[str, str]) -> str:
    """Panels of bars below each other as SVG.

    Args:
        panels: rows by title.
        legend: what each kind of bar is; ``goal`` explains the mark.
    """
    parts = [text(24, 24, title, anchor="start", size=15), text(24, 43, facts, anchor="start")]
    x = 24
    for kind, what in legend.items():
        if kind == "goal":
            parts.append(f'<path d="M{x + 5} 54v13" stroke="#060" stroke-width="2"/>')
        else:
            parts.append(f'<rect x="{x}" y="56" width="11" height="10" fill="{COLOURS[kind]}"/>')
        parts.append(text(x + 16, 65, what, anchor="start", size=11))
        x += 30 + 7 * len(what)
    bottom = 80.0
    for name, rows in panels.items():
        drawn, bottom = _panel(name, rows, bottom)
        parts += drawn
    return document(LABELS + WIDTH + NUMBERS, bottom + 8, parts)


def draw_kernels(report: dict[str, Any], groups: Sequence[str]) -> str:
    """Results of ``bench.kernels`` as SVG.

    Raises:
        ValueError: there are no cases of these groups.
    """
    panels = {}
    for group in groups:
        rows = kernel_rows(case for case in report["cases"] if case["group"] == group)
        if rows:
            panels[f"{group}  {GROUPS[group]}"] = rows
    if not panels:
        raise ValueError(f"the results have no case of {', '.join(groups)}: run python -m bench.kernels")
    floor = "copy {:.0f} GB/s, bfloat16 products {:.0f} TFLOP/s".format(*report["ceilings"].values())
    legend = {"tritonllm": "tritonllm", "torch": "torch, same run", "listed": "best listed peer, another day"}
    title = "Kernels, percent of the floor (least bytes or FLOPs over what the GPU can do)"
    return draw(title, f"{_facts(report)}; floor from {floor}", panels, legend)


def draw_engine(report: dict[str, Any]) -> str:
    """Results of ``bench.engine`` as SVG.

    Raises:
        ValueError: there is no workload with a floor.
    """
    rows = engine_rows(report)
    if not rows:
        raise ValueError("the results have no workload: run python -m bench.engine")
    name = report["engine"]["name"]
    legend = {name: name, "listed": f"{LISTED['engine']['peer']}, another day", "goal": "aim"}
    title = "Engine workloads, percent of the roofline floor"
    panels = {"W1 to W6 of bench/engine.py": rows}
    return draw(title, f"{_facts(report)}, {name} {report['engine']['version']}", panels, legend)


def _facts(report: dict[str, Any]) -> str:
    return f"{report['machine']['gpu']}, {report['commit']}, {report['date'][:10]}"
