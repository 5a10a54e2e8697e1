"""The plots of ``bench.plot``: a map of the attention sweep, bars beside the floor, and timelines of a step."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.engine_workloads import LATENCIES
from bench.reports import GROUPS, LISTED, best_listed, kind_of, of_floor

# Text stays text and ids are derived from a constant, so that the same results give the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "tritonllm", "font.size": 9, "axes.titlesize": 10}
OURS, TORCH, LISTED_BAR, GOAL, OTHER = "#8c2963", "#b9b9b9", "#fac462", "#006400", "#d0d0d0"
COLOURS = {"tritonllm": OURS, "vllm": OURS, "torch": TORCH, "listed": LISTED_BAR}
PALETTE = (OURS, "#de6a46", LISTED_BAR, "#3f7f93", "#7fa650", "#5b5ea6", "#c58fb0", "#8c6d4f", "#4db6ac", "#9e9e9e")
SWEEPS = {"K1": ("Paged decode", "keys of each sequence"), "K2": ("Causal prefill", "new tokens of each sequence")}


MOST, LABELS_AT = 110, 113  # percent: where a bar ends at the latest, and where its label stands


@dataclass(frozen=True)
class Bar:
    """``percent`` of the floor that someone reaches; ``kind`` decides the colour; ``label`` stands to the right."""

    kind: str
    percent: float
    label: str


@dataclass(frozen=True)
class Row:
    """The bars of one case, one below the other; ``goal`` draws a mark at that percentage."""

    name: str
    bars: list[Bar] = field(default_factory=list)
    goal: float | None = None


def draw(report: dict[str, Any], groups: Sequence[str]) -> Figure:
    """The results of any of the benchmarks.

    Args:
        groups: of the kernels, K1 to K7, where the report has several.

    Raises:
        ValueError: there is nothing in the results that can be drawn.
    """
    kind = kind_of(report)
    drawers = {"attention": sweep, "engine": engine, "timeline": timelines}
    with matplotlib.rc_context(STYLE):
        if kind == "kernels":
            return kernels(report, groups)
        if kind in drawers:
            return drawers[kind](report)
    raise ValueError("not the results of bench.attention, bench.kernels, bench.engine or bench.timeline")


def save(figure: Figure, path: Path) -> None:
    """Write the picture without the day on which it was drawn."""
    with matplotlib.rc_context(STYLE):
        metadata = {"Date": None, "Creator": "bench.plot"} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata, bbox_inches="tight")
    if path.suffix == ".svg":  # matplotlib ends some lines with a space, which git does not like
        text = "\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n"
        path.write_text(_number_clips(text))


def _number_clips(svg: str) -> str:
    """Clip paths by the order in which they are used: matplotlib makes their names of addresses in memory."""
    order = dict.fromkeys(re.findall(r"url\(#(p[0-9a-f]{10})\)", svg))
    names = {name: f"clip{number}" for number, name in enumerate(order)}
    svg = re.sub(r"\bp[0-9a-f]{10}\b", lambda found: names.get(found[0], found[0]), svg)
    head, *clips = re.split(r"(?=^ *<clipPath )", svg, flags=re.MULTILINE)
    if not clips:
        return svg
    end = clips[-1].index("</clipPath>") + len("</clipPath>\n")
    clips[-1], tail = clips[-1][:end], clips[-1][end:]
    return head + "".join(sorted(clips, key=lambda clip: int(re.findall(r"clip(\d+)", clip)[0]))) + tail


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def where(report: dict[str, Any]) -> str:
    commit = f"commit {report['commit']}, " if report["commit"] else ""
    text = f"{report['machine']['gpu']}, {commit}{report['date'][:10]}"
    if "ceilings" not in report:
        return text
    rates = "copies at {:.0f} GB/s, bfloat16 products at {:.0f} TFLOP/s".format(*report["ceilings"].values())
    return f"{text}; floor: {rates}"


def sweep(report: dict[str, Any]) -> Figure:
    """Percent of the floor over batch and length, a map for each group."""
    wide = [case for case in report["sweep"] if case["precision"] == "bf16"]
    groups = {group: [case for case in wide if case["group"] == group] for group in SWEEPS}
    groups = {group: cases for group, cases in groups.items() if cases}
    if not groups:
        raise ValueError("the results have no sweep: run python -m bench.attention without --quick")
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    figure.suptitle(f"Attention, 32 query heads, 8 key/value heads of 128, bfloat16\n{where(report)}", fontsize=10)
    all_axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, (group, cases) in zip(all_axes, groups.items(), strict=True):
        mesh = heatmap(axes, cases)
        axes.set(title=SWEEPS[group][0], xlabel=SWEEPS[group][1], ylabel="sequences in the batch")
    figure.colorbar(mesh, ax=list(all_axes), label="floor / time, percent", shrink=0.7)
    return figure


def heatmap(axes: Axes, cases: Sequence[dict[str, Any]]) -> Any:
    """One map; a size that was not measured stays white."""
    batches, lengths = (sorted({case[axis] for case in cases}) for axis in ("batch", "length"))
    grid = [[float("nan")] * len(lengths) for _ in batches]
    for case in cases:
        y, x = batches.index(case["batch"]), lengths.index(case["length"])
        percent = case.get("percent")
        grid[y][x] = float("nan") if percent is None else percent
        text, ink = ("failed", "#b00") if percent is None else (f"{percent:.0f}", "white" if percent > 55 else "black")
        axes.text(x, y, text, color=ink, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
    axes.set_yticks(range(len(batches)), [str(n) for n in batches])
    axes.tick_params(length=0)
    borders = [[n - 0.5 for n in range(len(axis) + 1)] for axis in (lengths, batches)]
    axes.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(len(batches) - 0.5, -0.5))
    return axes.pcolormesh(*borders, grid, cmap="magma_r", vmin=0, vmax=110, edgecolors="white", linewidth=1)


def kernel_rows(cases: Iterable[dict[str, Any]]) -> list[Row]:
    """From the results of ``bench.kernels``: ours, torch in the same run, and the best listed peer."""
    rows = []
    for case in cases:
        if "failed" in case:
            rows.append(Row(case["case"], [Bar("tritonllm", 0.0, "failed")]))
            continue
        bars = [Bar("tritonllm", case["percent"], f"{short(case['us'])} us")]
        if "torch_us" in case:
            bars.append(Bar("torch", 100 * case["floor_us"] / case["torch_us"], f"torch {short(case['torch_us'])}"))
        peer, us = best_listed(case)
        if us:
            label = f"{peer} {short(us)}, ours {us / case['us']:.2f}x"
            bars.append(Bar("listed", 100 * case["floor_us"] / us, label))
        rows.append(Row(case["case"], bars))
    return rows


def engine_rows(report: dict[str, Any]) -> list[Row]:
    """From the results of ``bench.engine``; rows without a floor (the starts) are left out.

    The floor of requests that share a prefix is that of an engine that reads the shared keys once a step.
    """
    rows = []
    for row in report["rows"]:
        if "floor" not in row or "value" not in row:
            continue
        latency, floor = row["kind"] in LATENCIES, row.get("floor_shared_reads", row["floor"])
        label = f"{short(row['value'])} {row['unit']}"
        bars = [Bar(report["engine"]["name"], of_floor(row["value"], floor, latency), label)]
        if "listed" in row:
            label = f"{LISTED['engine']['peer']} {short(row['listed'])}, ours {row['times_better_than_listed']:.2f}x"
            bars.append(Bar("listed", of_floor(row["listed"], floor, latency), label))
        goal = of_floor(row["goal"], floor, latency) if "goal" in row else None
        rows.append(Row(f"{row['workload']}  {row['model']}, {row['kind']}", bars, goal))
    return rows


def kernels(report: dict[str, Any], groups: Sequence[str]) -> Figure:
    panels = {group: kernel_rows(case for case in report["cases"] if case["group"] == group) for group in groups}
    panels = {f"{group}  {GROUPS[group]}": rows for group, rows in panels.items() if rows}
    if not panels:
        raise ValueError(f"the results have no case of {', '.join(groups)}: run python -m bench.kernels")
    legend = {"tritonllm": "tritonllm", "torch": "torch, same run", "listed": "best listed peer, another day"}
    return bars(f"Kernels, percent of the floor\n{where(report)}", panels, legend)


def engine(report: dict[str, Any]) -> Figure:
    rows = engine_rows(report)
    if not rows:
        raise ValueError("the results have no workload: run python -m bench.engine")
    name = report["engine"]["name"]
    legend = {name: name, "listed": f"{LISTED['engine']['peer']}, another day", "goal": "aim"}
    return bars(f"Engine workloads, percent of the floor\n{where(report)}", {"": rows}, legend)


def bars(title: str, panels: dict[str, Sequence[Row]], legend: dict[str, str]) -> Figure:
    """Panels of bars below each other.

    Args:
        panels: rows by title.
        legend: what each kind of bar is; ``goal`` explains the mark.
    """
    heights = [sum(len(row.bars) + 0.6 for row in rows) + 3 for rows in panels.values()]
    figure = Figure(figsize=(11, 1 + 0.17 * sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (name, rows) in zip(all_axes, panels.items(), strict=True):
        bar_panel(axes, rows)
        axes.set_title(name, loc="left")
    handles = [
        Line2D([], [], color=GOAL, marker="|", ls="", markersize=9, markeredgewidth=2, label=what)
        if kind == "goal"
        else Patch(color=COLOURS[kind], label=what)
        for kind, what in legend.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def bar_panel(axes: Axes, rows: Sequence[Row]) -> None:
    y, places = 0.0, []
    for row in rows:
        middle = y + (len(row.bars) - 1) / 2
        places.append(middle)
        for bar in row.bars:
            axes.barh(y, min(bar.percent, MOST), height=0.9, color=COLOURS[bar.kind])
            axes.text(LABELS_AT, y, f"{bar.percent:.0f}%  {bar.label}", va="center", fontsize=8)
            y += 1
        if row.goal is not None:
            axes.plot([row.goal, row.goal], [middle - len(row.bars) / 2, middle + len(row.bars) / 2], color=GOAL, lw=2)
        y += 0.6
    axes.set(xlim=(0, 165), ylim=(y - 0.4, -0.8), xticks=range(0, 101, 25))
    axes.set_yticks(places, [row.name for row in rows], fontsize=8)
    axes.set_xticklabels([f"{percent}%" for percent in range(0, 101, 25)])
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(length=0)


def timelines(report: dict[str, Any]) -> Figure:
    """For each timeline with a decode step: the step, and one layer of it enlarged."""
    shown = [timeline for timeline in report["timelines"] if "sequence" in timeline]
    if not shown:
        raise ValueError("the results have no decode step: run python -m bench.timeline")
    figure = Figure(figsize=(12, 3.7 * len(shown)), layout="constrained")
    figure.suptitle(f"{where(report)}; white: the GPU does nothing", fontsize=10)
    for part, timeline in zip(figure.subfigures(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        listed = timeline["kernels"][: len(PALETTE)]
        paint = {kernel["name"]: colour for kernel, colour in zip(listed, PALETTE, strict=False)}
        layer = one_layer(timeline["sequence"])
        step_axes, *others = part.subplots(2 if layer else 1, 1, squeeze=False)[:, 0]
        strip(step_axes, timeline["sequence"], paint)
        step_axes.set_title(
            f"{timeline['workload']}: one decode step, {timeline['running']} running: {timeline['step_us']:.0f} us "
            f"({timeline['recorded_step_us']:.0f} while recorded), {timeline['events']} kernels, GPU busy "
            f"{timeline['busy_percent_alone']:.1f}% (recorded {timeline['busy_percent']:.1f}%)",
            loc="left",
        )
        for axes in others:
            strip(axes, layer, paint, border=1.0)
            axes.set_title("one layer of it", loc="left")
        handles = [
            Patch(
                color=paint[kernel["name"]],
                label=f"{kernel['name']}: {kernel['count']} in a step, {kernel['us']:.0f} us, {kernel['share']:.1f}%",
            )
            for kernel in listed
        ]
        part.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return figure


def strip(axes: Axes, sequence: Sequence[dict[str, Any]], paint: dict[str, str], border: float = 0.0) -> None:
    """Kernels as boxes over microseconds, with a white border of so many points."""
    spans = [(row["us"], row["us"] + row["gap_us"]) for row in sequence]
    begins = [0.0, *itertools.accumulate(span for _, span in spans)]
    boxes = [(begin, us) for begin, (us, _) in zip(begins, spans, strict=False)]
    colours = [paint.get(row["name"], OTHER) for row in sequence]
    axes.broken_barh(boxes, (0, 1), facecolors=colours, edgecolors="white", linewidth=border)
    axes.set(xlim=(0, begins[-1]), ylim=(0, 1), yticks=[], xlabel="microseconds")


def one_layer(sequence: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A layer from the middle of the step: from one run of a kernel to its next, for a kernel that runs once a layer.

    Layers repeat, so the commonest distance between two runs of the same kernel is a layer's length or a part of it;
    the kernel with the longest such distance that repeats has it whole. Empty if nothing repeats.
    """
    places: dict[str, list[int]] = {}
    for place, row in enumerate(sequence):
        places.setdefault(row["name"], []).append(place)
    best: tuple[int, int] = (0, 0)  # length, first place
    for found in places.values():
        distances = [b - a for a, b in itertools.pairwise(found)]
        if len(distances) < 2:
            continue
        usual = max(set(distances), key=distances.count)
        if distances.count(usual) >= 0.8 * len(distances) and usual > best[0]:
            middle = distances.index(usual, min(len(distances) // 2, len(distances) - 1 - distances[::-1].index(usual)))
            best = usual, found[middle]
    length, first = best
    return list(sequence[first : first + length])
