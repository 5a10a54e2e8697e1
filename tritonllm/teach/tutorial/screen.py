"""The terminal of a lesson: wrapped prose, tables, and what the learner types. Colours if rich is there."""

import contextlib
import importlib.util
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from tritonllm.teach.tutorial.lesson import ValueTable

WIDEST = 88  # characters of a line that are easy to read
CODE = re.compile(r"`[^`]+`")


class Screen:
    """The terminal of a lesson, or what stands for one in tests.

    Args:
        out: where to write.
        source: where the learner's lines come from.
    """

    def __init__(self, out: TextIO, source: TextIO) -> None:
        self._out, self._source = out, source
        self.is_terminal = source.isatty() and out.isatty()
        self._console: Any = None
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - input() knows the arrow keys from here on
        if out.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console

            self._console = Console(file=out, highlight=False, soft_wrap=True)

    def heading(self, text: str) -> None:
        self._write("")
        self._write(text, "bold")
        self._write("-" * len(text), "bold")

    def say(self, text: str, style: str = "") -> None:
        """Paragraphs; lines that begin with four blanks stay as they are."""
        self._write("")
        for index, paragraph in enumerate(re.split(r"\n\s*\n", textwrap.dedent(text).strip("\n"))):
            if index:
                self._write("")
            if paragraph.startswith("    "):
                for line in paragraph.split("\n"):
                    self._write(line, "cyan")
                continue
            for line in textwrap.wrap(" ".join(paragraph.split()), self._width, break_long_words=False):
                self._write(line, style)

    def table(self, show: ValueTable) -> None:
        self._write("")
        for index, line in enumerate(table_lines(show.columns, show.rows)):
            if index == 0:
                self._write(f"  {show.title}", "bold")
            self._write(f"    {line}", "cyan" if index else "cyan bold")

    def line(self, text: str, style: str = "") -> None:
        self._write(text, style)

    def ask(self, prompt: str) -> str:
        """What the learner types.

        Raises:
            EOFError: nothing more will come.
        """
        if self.is_terminal and self._source is sys.stdin:
            return input(prompt)
        self._out.write(prompt)
        self._out.flush()
        line = self._source.readline()
        self._out.write(line if line.endswith("\n") else line + "\n")  # so that a transcript can be read
        if not line:
            raise EOFError
        return line.rstrip("\n")

    @property
    def _width(self) -> int:
        return max(20, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns - 1))

    def _write(self, line: str, style: str = "") -> None:
        if self._console is None:
            self._out.write(line + "\n")
            return
        from rich.text import Text

        text = Text(line, style=style)
        text.highlight_regex(CODE, "bold cyan")
        self._console.print(text)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Numbers to the right, text to the left; the first line has the names."""
    cells = [list(columns), *([cell_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    lines = []
    for row in cells:
        padded = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        lines.append("   ".join(padded).rstrip())
    return lines


def cell_text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    if isinstance(cell, list | tuple):
        return " ".join(map(str, cell))
    return str(cell)
