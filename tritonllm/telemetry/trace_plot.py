"""A trace's timeline as a picture: requests, what the host and the device do, the KV cache and the steps' tokens."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tritonllm.system.extras import install
from tritonllm.telemetry.trace_reader import Slice, TraceData

COLOURS = {
    "queued": "#d0d0d0",
    "prefill": "#4878d0",
    "decode": "#6acc64",
    "preempted": "#d65f5f",
    "plan": "#ee854a",
    "launch": "#956cb4",
    "wait": "#c8c8e8",
    "step": "#333333",
}
ROWS = 32  # lanes that are drawn
PIXELS = 3000  # what is narrower than one of so many is not drawn
NEEDS = f"a picture needs matplotlib: {install('teach')}"


def plot(data: TraceData, path: str | Path, begin: float | None = None, end: float | None = None) -> None:
    """Draw what lies between ``begin`` and ``end``, in milliseconds; by default everything.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: nothing lies there.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(NEEDS) from error
    first, last = begin or 0.0, 1e3 * data.seconds if end is None else end
    steps = _inside(data.steps, first, last)
    if not steps:
        raise ValueError(
            f"there is no step between {first:g} and {last:g} ms: the trace has {1e3 * data.seconds:.0f} ms"
        )
    lanes = [track for track in sorted(data.lanes) if _inside(data.lanes[track], first, last)][:ROWS]
    figure = Figure(figsize=(10, 3.6 + 0.16 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [0.16 * len(lanes) + 0.3, 0.7, 0.9, 0.9]
    requests, engine, blocks, tokens = figure.subplots(4, 1, sharex=True, height_ratios=heights)
    for row, track in enumerate(lanes):
        _bars(requests, row, _inside(data.lanes[track], first, last))
    requests.set_ylim(len(lanes) - 0.4, -0.6)
    requests.set_yticks([])
    requests.set_ylabel("requests")
    visible = 1e3 * (last - first) / PIXELS
    host = [one for one in _inside(data.host, first, last) if one.name in COLOURS and one.end - one.begin >= visible]
    _bars(engine, 0, host)
    _bars(engine, 1, steps, "step")
    engine.set_yticks([0, 1], ["host", "device"])
    engine.set_ylim(1.6, -0.6)
    _counter(blocks, data.counters.get("blocks", []), "used", last)
    blocks.set_ylabel("blocks used")
    _composition(tokens, steps)
    tokens.set_xlabel("milliseconds")
    tokens.set_xlim(first, last)
    _legend(requests, ["queued", "prefill", "decode", "preempted"])
    _legend(engine, ["plan", "launch", "wait"])
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text: half as large
        figure.savefig(path, dpi=120)


def _inside(slices: Iterable[Slice], first: float, last: float) -> list[Slice]:
    return [one for one in slices if one.end / 1e3 >= first and one.begin / 1e3 <= last]


def _bars(axes: Any, row: int, slices: Sequence[Slice], colour: str = "") -> None:
    """One collection a kind: a slice of its own would be an object each."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for one in slices:
        kinds.setdefault(colour or one.name, []).append((one.begin / 1e3, (one.end - one.begin) / 1e3))
    for kind, spans in kinds.items():
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=COLOURS.get(kind, "#888888"), linewidth=0)


def _counter(axes: Any, values: Sequence[tuple[float, dict[str, float]]], name: str, last: float) -> None:
    times, found = [at / 1e3 for at, _ in values], [value[name] for _, value in values]
    if values:
        axes.fill_between([*times, max(last, times[-1])], [*found, found[-1]], step="post", color="#4878d0", alpha=0.5)
        axes.set_ylim(0, None)


def _composition(axes: Any, steps: Sequence[Slice]) -> None:
    """Tokens of each step, until the next one begins."""
    times = [one.begin / 1e3 for one in steps] + [steps[-1].end / 1e3]
    below = [0.0] * len(times)
    for kind, colour in (("decode", COLOURS["decode"]), ("verify", "#d5bb67"), ("prefill", COLOURS["prefill"])):
        heights = [float(one.args.get(f"{kind}_tokens", 0)) for one in steps]
        if any(heights):
            above = [a + b for a, b in zip(below, [*heights, heights[-1]], strict=True)]
            axes.fill_between(times, below, above, step="post", color=colour, label=kind, linewidth=0)
            below = above
    axes.set_ylim(0, None)
    axes.set_ylabel("tokens a step")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")


def _legend(axes: Any, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[name], label=name) for name in names]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
