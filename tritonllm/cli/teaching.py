"""The options of ``tritonllm generate`` that show the engine at work (docs/teach.md)."""

import argparse
from collections.abc import Callable
from typing import Any

from tritonllm.cli import dashboard
from tritonllm.teach import trace_viewer
from tritonllm.teach.narrate import options as narrate
from tritonllm.teach.viewer import Stops, Viewer
from tritonllm.teach.xray import options as xray

# Each adds its options to the parser's group, and makes a viewer of the arguments if they ask for it. Makers raise
# ValueError for a bad value or a missing package; they import their module only then.
MODES: tuple[tuple[Callable[[Any], None], Callable[[argparse.Namespace], Viewer | None]], ...] = (
    (narrate.add, narrate.make),
    (trace_viewer.add_options, trace_viewer.make),
    (xray.add_options, xray.make),
    (dashboard.add_options, dashboard.make_viewer),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("seeing the engine think (needs the extra teach, see docs/teach.md)")
    for add, _ in MODES:
        add(group)


def viewers_of(args: argparse.Namespace) -> list[Viewer]:
    """The viewers that the options ask for.

    Raises:
        ValueError: a bad value, or a package is missing.
    """
    made = [viewer for _, make in MODES if (viewer := make(args)) is not None]
    if any(isinstance(viewer, Stops) for viewer in made) and sum(viewer.shows_text for viewer in made) > 1:
        raise ValueError("--dashboard has the terminal for itself: leave it out, or the option that prints there, too")
    return made
