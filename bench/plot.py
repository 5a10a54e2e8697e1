"""``python -m bench.plot RESULTS.json -o PLOT.svg``: draw what a benchmark wrote.

``bench.attention``: the sweep over batch and length. ``bench.kernels`` and ``bench.engine``: bars, ours beside others.
``bench.timeline``: one step, kernel by kernel.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plot_bars, plot_timeline
from bench.plot_svg import document, text

CELL_WIDTH, CELL_HEIGHT = 46, 26
LEFT, TOP, GAP, BOTTOM = 64, 78, 76, 96  # around and between the two maps
SCALE = ((246, 241, 224), (250, 196, 98), (222, 106, 70), (140, 41, 99), (33, 16, 66))  # 0, 25, 50, 75, 100 percent
TITLES = {"K1": ("Paged decode", "keys of each sequence"), "K2": ("Prefill, causal", "new tokens of each sequence")}


def colour(percent: float) -> tuple[int, ...]:
    """Between the two nearest colours of the scale; beyond 100 as at 100."""
    at = min(max(percent, 0.0), 100.0) / 100 * (len(SCALE) - 1)
    low = min(int(at), len(SCALE) - 2)
    return tuple(round(a + (at - low) * (b - a)) for a, b in zip(SCALE[low], SCALE[low + 1], strict=True))


def short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)


def cell(x: float, y: float, case: dict[str, Any]) -> list[str]:
    if "failed" in case:
        empty = f'<rect x="{x:g}" y="{y:g}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="none" stroke="#b00"/>'
        return [empty, text(x + CELL_WIDTH / 2, y + 17, "failed", size=11, extra='fill="#b00"')]
    rgb = colour(case["percent"])
    ink = "#000" if sum(rgb) > 360 else "#fff"
    fill = f"rgb({rgb[0]},{rgb[1]},{rgb[2]})"
    tip = f"batch {case['batch']}, length {case['length']}: {case['us']:.4g} us"
    return [
        f'<g><title>{tip}</title><rect x="{x:g}" y="{y:g}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{fill}"/>',
        text(x + CELL_WIDTH / 2, y + 17, f"{case['percent']:.0f}", extra=f'fill="{ink}"') + "</g>",
    ]


def heatmap(cases: Sequence[dict[str, Any]], title: str, lengths_title: str, left: float) -> tuple[list[str], float]:
    """One map as SVG elements, and its width."""
    batches, lengths = (sorted({case[axis] for case in cases}) for axis in ("batch", "length"))
    width, bottom = CELL_WIDTH * len(lengths), TOP + CELL_HEIGHT * len(batches)
    parts = [text(left + width / 2, TOP - 12, title, size=14)]
    for row, batch in enumerate(batches):
        parts.append(text(left - 6, TOP + CELL_HEIGHT * row + 17, batch, anchor="end"))
    for column, length in enumerate(lengths):
        parts.append(text(left + CELL_WIDTH * (column + 0.5), bottom + 16, short(length)))
    for case in cases:
        x, y = left + CELL_WIDTH * lengths.index(case["length"]), TOP + CELL_HEIGHT * batches.index(case["batch"])
        parts += cell(x, y, case)
    middle = (TOP + bottom) / 2
    turned = f'transform="rotate(-90 {left - 40:g} {middle:g})"'
    parts.append(text(left - 40, middle, "sequences in the batch", extra=turned))
    parts.append(text(left + width / 2, bottom + 34, lengths_title))
    return parts, width


def legend(left: float, y: float) -> list[str]:
    parts = []
    for index in range(50):
        r, g, b = colour(2 * index + 1)
        parts.append(f'<rect x="{left + 4 * index:g}" y="{y:g}" width="4.5" height="12" fill="rgb({r},{g},{b})"/>')
    parts += [text(left + 2 * percent, y + 26, percent, size=11) for percent in range(0, 101, 25)]
    return [*parts, text(left + 212, y + 11, "floor / time, %", anchor="start")]


def draw(report: dict[str, Any]) -> str:
    """The sweep of a report as SVG.

    Raises:
        ValueError: the report has no sweep.
    """
    parts: list[str] = []
    left, rows = float(LEFT), 0
    for group, titles in TITLES.items():
        cases = [case for case in report["sweep"] if case["group"] == group]
        if cases:
            drawn, width = heatmap(cases, *titles, left)
            parts += drawn
            left += width + GAP
            rows = max(rows, len({case["batch"] for case in cases}))
    if not parts:
        raise ValueError("the results have no sweep: run python -m bench.attention without --quick")
    width, bottom = left - GAP + 24, TOP + CELL_HEIGHT * rows
    floor = "copy {:.0f} GB/s, bfloat16 products {:.0f} TFLOP/s".format(*report["ceilings"].values())
    facts = f"{report['machine']['gpu']}, {report['commit']}, {report['date'][:10]}; floor from {floor}"
    head = [
        text(
            LEFT,
            24,
            "Attention with 32 query heads, 8 key/value heads, head size 128, bfloat16",
            anchor="start",
            size=15,
        ),
        text(LEFT, 43, facts, anchor="start"),
    ]
    return document(width, bottom + BOTTOM, [*head, *parts, *legend(LEFT, bottom + 52)])


def plot(report: dict[str, Any], groups: Sequence[str]) -> str:
    """The results of any of the benchmarks as SVG.

    Args:
        groups: of the kernels, K1 to K7, where the report has several.

    Raises:
        ValueError: there is nothing in the results that can be drawn.
    """
    if "sweep" in report:
        return draw(report)
    if "cases" in report:
        return plot_bars.draw_kernels(report, groups)
    if "timelines" in report:
        return plot_timeline.draw(report)
    if "rows" in report:
        return plot_bars.draw_engine(report)
    raise ValueError("not the results of a benchmark")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description="Draw the results of a benchmark.")
    parser.add_argument("results", type=Path, help="what a benchmark wrote")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the SVG to write")
    groups = ",".join(plot_bars.GROUPS)
    parser.add_argument("--only", default=groups, metavar="K3,K4", help="groups of bench.kernels (all)")
    args = parser.parse_args(argv)
    chosen = args.only.split(",")
    if unknown := sorted(set(chosen) - plot_bars.GROUPS.keys()):
        parser.error(f"--only must name groups of {groups}, got {', '.join(unknown)}")
    try:
        drawn = plot(json.loads(args.results.read_text()), chosen)
    except ValueError as error:
        print(f"{args.results}: {error}", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
