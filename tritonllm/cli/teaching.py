"""The options of ``tritonllm generate`` that show the engine at work (docs/teach.md)."""

import argparse
from collections.abc import Callable
from typing import Any

from tritonllm.teach import trace_viewer
from tritonllm.teach.viewer import Viewer
from tritonllm.teach.xray import options as xray

# Each adds its options to the parser's group, and makes a viewer of the arguments if they ask for it. Makers raise
# ValueError for a bad value or a missing package; they import their module only then.
MODES: tuple[tuple[Callable[[Any], None], Callable[[argparse.Namespace], Viewer | None]], ...] = (
    (trace_viewer.add_options, trace_viewer.make),
    (xray.add_options, xray.make),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    if MODES:
        group = parser.add_argument_group("seeing the engine think (needs tritonllm[teach], see docs/teach.md)")
        for add, _ in MODES:
            add(group)


def viewers_of(args: argparse.Namespace) -> list[Viewer]:
    """Raises:
    ValueError: a bad value, or a package is missing.
    """
    made = [make(args) for _, make in MODES]
    return [viewer for viewer in made if viewer is not None]
