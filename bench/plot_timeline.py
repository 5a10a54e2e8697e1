"""Timelines: one step of the engine, kernel by kernel, and one layer of it enlarged. Used by ``bench.plot``."""

import itertools
from collections.abc import Sequence
from html import escape
from typing import Any

from bench.plot_svg import document, text

LEFT, WIDTH, STRIP = 24, 1000, 34
PALETTE = ("#8c2963", "#de6a46", "#fac462", "#3f7f93", "#7fa650", "#5b5ea6", "#c58fb0", "#8c6d4f", "#4db6ac", "#9e9e9e")
OTHERS = "#d0d0d0"


def colours(kernels: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The kernels that take longest get a colour each; the table comes sorted."""
    return {kernel["name"]: colour for kernel, colour in zip(kernels, PALETTE, strict=False)}


def strip(sequence: Sequence[dict[str, Any]], paint: dict[str, str], top: float, span: float) -> list[str]:
    """Kernels as boxes over ``span`` microseconds; what stays white is time in which the GPU does nothing."""
    parts = [f'<rect x="{LEFT}" y="{top:g}" width="{WIDTH}" height="{STRIP}" fill="none" stroke="#999"/>']
    at = 0.0
    for row in sequence:
        x, width = LEFT + WIDTH * at / span, WIDTH * row["us"] / span
        fill = paint.get(row["name"], OTHERS)
        tip = f"{escape(row['name'])}: {row['us']:.1f} us, then {row['gap_us']:.1f} us nothing"
        parts.append(
            f'<g><title>{tip}</title><rect x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{STRIP}" '
            f'fill="{fill}"/></g>'
        )
        at += row["us"] + row["gap_us"]
    return parts


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


def panel(timeline: dict[str, Any], top: float) -> tuple[list[str], float]:
    """One timeline as SVG elements, and where it ends."""
    sequence, kernels = timeline["sequence"], timeline["kernels"]
    paint = colours(kernels)
    head = (
        f"{timeline['workload']}: one decode step, {timeline['running']} running: {timeline['step_us']:.0f} us "
        f"({timeline['recorded_step_us']:.0f} while recorded), {timeline['events']} kernels, "
        f"GPU busy {timeline['busy_percent_alone']:.1f}% (recorded {timeline['busy_percent']:.1f}%)"
    )
    parts = [text(LEFT, top + 14, head, anchor="start", size=14)]
    parts += strip(sequence, paint, top + 24, timeline["recorded_step_us"])
    y = top + 24 + STRIP
    layer = one_layer(sequence)
    if layer:
        span = sum(row["us"] + row["gap_us"] for row in layer)
        parts.append(text(LEFT, y + 18, f"one layer: {span:.1f} us", anchor="start", size=12))
        parts += strip(layer, paint, y + 24, span)
        y += 24 + STRIP
    y += 18
    for kernel in kernels[: len(PALETTE)]:
        parts.append(f'<rect x="{LEFT}" y="{y - 9:g}" width="11" height="10" fill="{paint[kernel["name"]]}"/>')
        label = f"{kernel['name']}: {kernel['count']} in a step, {kernel['us']:.0f} us, {kernel['share']:.1f}%"
        parts.append(text(LEFT + 17, y, label, anchor="start", size=11))
        y += 15
    return parts, y + 14


def draw(report: dict[str, Any]) -> str:
    """Results of ``bench.timeline`` as SVG.

    Raises:
        ValueError: there is no timeline.
    """
    timelines = [timeline for timeline in report["timelines"] if "sequence" in timeline]
    if not timelines:
        raise ValueError("the results have no decode step: run python -m bench.timeline")
    facts = f"{report['machine']['gpu']}, {report['commit']}, {report['date'][:10]}; white: the GPU does nothing"
    parts, bottom = [text(LEFT, 24, facts, anchor="start")], 40.0
    for timeline in timelines:
        drawn, bottom = panel(timeline, bottom)
        parts += drawn
    return document(WIDTH + 2 * LEFT, bottom, parts)
