"""The picture of ``tritonllm bench serve --plot``: when tokens came, and how long users waited for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

NEEDS = "--plot needs matplotlib ({}): pip install matplotlib"
COLOURS = ("#8c2963", "#de6a46", "#3f7f93")
SHOWN = 0.995  # of the gaps: the longest one would press all others to the left
SLICES = 60  # of time, in each of which tokens are counted


def check_drawing(path: Path) -> None:
    """Check that the results can be drawn; called before anything is measured.

    Raises:
        ImportError: there is no matplotlib.
        ValueError: a kind of picture that it cannot write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(NEEDS.format(error)) from error
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in kinds:
        raise ValueError(f"--plot must end with one of {', '.join(f'.{kind}' for kind in kinds)}, got {str(path)!r}")


def shares(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The values in order, and for each the share of values that are no greater."""
    ordered = sorted(values)
    return ordered, [(place + 1) / len(ordered) for place in range(len(ordered))]


def rates(arrivals: Sequence[float], begin: float, seconds: float) -> tuple[list[float], list[float]]:
    """Slices of the time, each by its middle, and how many arrivals a second it had."""
    width = max(seconds, 1e-9) / SLICES
    counts = [0] * SLICES
    for at in arrivals:
        counts[min(int((at - begin) / width), SLICES - 1)] += 1
    return [(place + 0.5) * width for place in range(SLICES)], [count / width for count in counts]


def draw(told: Sequence[Any], seconds: float, title: str, path: Path) -> None:
    """Write the picture of a run.

    Args:
        told: :class:`~tritonllm.cli.bench_serve.Told`; those that failed are left out.
        seconds: the seconds from the first request to the last token.
    """
    from matplotlib.figure import Figure

    done = [one for one in told if one.error is None]
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    over_time, first, gaps = figure.subplots(1, 3)
    if done:
        begin = min(one.sent - one.ask.at for one in done)
        over_time.plot(*rates([at for one in done for at in one.arrivals], begin, seconds), color=COLOURS[0])
        first.plot(*shares([one.ttft_ms for one in done]), color=COLOURS[1])
        between = [gap for one in done for gap in one.gaps_ms()]
        if between:
            ordered, parts = shares(between)
            gaps.plot(ordered, parts, color=COLOURS[2])
            gaps.set_xlim(0, 1.1 * ordered[int(SHOWN * (len(ordered) - 1))] + 1e-3)
    over_time.set(xlabel="seconds", ylabel="events with tokens / s", title="output over time", ylim=(0, None))
    first.set(xlabel="ms", ylabel="share of requests", title="time to first token", ylim=(0, 1.02))
    gaps.set(xlabel="ms", ylabel="share of gaps", title="inter-token latency", ylim=(0, 1.02))
    for axes in (over_time, first, gaps):
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
