"""Acts on a terminal, or in a pipe: headings, sentences, tokens, block tables and bars."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tritonllm.teach.narrate.acts import Act, Bar, Bars, BlockTables, Cell, Line, Mark, Pieces, Said, TableRow
from tritonllm.teach.narrate.words import sentence

BAR = 20  # characters of 100%
MARKS: Mapping[Mark, tuple[str, str]] = {  # how a block is written, and its style
    "old": ("[{}]", "dim"),
    "new": ("+{}", "bold green"),
    "cached": ("={}", "bold cyan"),
    "shared": ("&{}", "cyan"),
    "copied": ("*{}", "bold magenta"),
    "loaded": ("<{}", "bold yellow"),
}
PLAIN = "\x1b[0m"
HEADS = ("head_scheduler", "head_blocks", "head_draw")


class PlainConsole(Console):
    """Lets an output that nobody reads any more be an error like any other; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise


def make_console(stream: IO[str], *, color: bool = True, record: bool = False, width: int | None = None) -> Console:
    """A console that writes escape codes to a terminal only, and none at all without ``color``."""
    styled = color and (record or stream.isatty())
    return PlainConsole(
        file=stream,
        force_terminal=styled,
        color_system=("standard" if record else "auto") if styled else None,  # none on a terminal that is dumb
        no_color=not styled,
        highlight=False,
        markup=False,
        emoji=False,
        record=record,
        width=width,
    )


# What a line is never broken in: a word of letters with a mark behind it, or one sign of Chinese with its comma; what
# opens a bracket or a quotation stays with what follows.
_UNIT = re.compile(r"[“（]*(?:[\u2e80-\u9fff]|[^\s\u2e80-\uffef“”]+)?[”，。、：；！？）]*\s*|.", re.DOTALL)


def folded(text: str, width: int) -> list[str]:
    """The text in lines of at most so many columns: Chinese has no blanks to break at."""
    lines = [""]
    for unit in filter(None, _UNIT.findall(text)):
        if lines[-1] and cell_len(lines[-1]) + cell_len(unit.rstrip()) > width:
            lines.append("")
        lines[-1] += unit
    return [line.rstrip() for line in lines]


class Show:
    """Writes the narration to a console, in a language's words.

    Args:
        words: the words of a language, by name.
        console: the console to write to.
        pause: is told each text that was shown, and waits until it is read.
    """

    def __init__(self, words: Mapping[str, str], console: Console, pause: Callable[[str], None]) -> None:
        self._words, self._console, self._pause = words, console, pause
        self._explained: set[Mark] = set()  # marks of blocks
        self._bar = "█" if console.encoding.lower().startswith("utf") else "#"

    def leave(self) -> None:
        """Leave a terminal in plain colours, whatever was broken off."""
        if self._console.color_system is not None:
            with suppress(OSError):
                self._console.file.write(PLAIN)
                self._console.file.flush()

    def act(self, act: Act) -> None:
        if act.title is not None:
            self._console.print()
            title = Text(self._fit(sentence(self._words, act.title)), style="bold")
            self._console.print(Rule(title, style="blue", align="left", characters="─" if self._bar == "█" else "-"))
        for line in act.lines:
            self._line(line)

    def _line(self, line: Line) -> None:
        match line:
            case Said():
                self._said(line)
            case Pieces():
                self._console.print(Padding(self._pieces(line), (0, 0, 0, 2), expand=False))
                self._pause(" ".join(piece.text for piece in line.pieces))
            case BlockTables():
                self._tables(line)
            case Bars():
                self._console.print(Padding(self._bars(line), (0, 0, 0, 2), expand=False))
                self._pause(" ".join(bar.piece.text for bar in line.bars))

    def _said(self, said: Said) -> None:
        text = self._fit(sentence(self._words, said))
        lines = "\n".join(folded(text, self._console.width))
        if said.key in HEADS:
            self._console.print()
            self._console.print(Text(lines, style="bold blue"))
            return
        styled = Text(lines, style="italic dim" if said.lesson else "")
        if not said.lesson:
            styled.highlight_regex(r"“[^”]*”", "bold")
        self._console.print(styled)
        self._pause(text)

    def _fit(self, text: str) -> str:
        """The text with only what the stream can write."""
        encoding = self._console.encoding
        return text.encode(encoding, "replace").decode(encoding)

    def _pieces(self, line: Pieces) -> Table:
        """Rows of tokens with their numbers below."""
        cells = [(self._fit(piece.text), str(piece.token)) for piece in line.pieces]
        if line.left_out:
            cells.insert(line.head, (self._fit("…"), f"({line.left_out})"))
        columns, room = 0, self._console.width - 4
        widths = [max(Text(text).cell_len, len(number)) + 2 for text, number in cells]
        while columns < len(cells) and room >= max(widths):
            room -= max(widths)
            columns += 1
        table = Table.grid(padding=(0, 2))
        for at in range(0, len(cells), max(columns, 1)):
            part = cells[at : at + max(columns, 1)]
            table.add_row(*(Text(text, style="bold") for text, _ in part))
            table.add_row(*(Text(number, style="dim") for _, number in part))
        return table

    def _tables(self, line: BlockTables) -> None:
        table = Table.grid(padding=(0, 2))
        for row in line.rows:
            table.add_row(Text(row.name, style="bold"), self._cells(row), self._slots(row))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))
        marks = [mark for mark in MARKS if mark in {cell.mark for row in line.rows for cell in row.cells}]
        new = [mark for mark in marks if mark not in self._explained]
        self._explained.update(new)
        if new:
            legend = "   ".join(self._words[f"mark_{mark}"].format(mark=MARKS[mark][0].format("n")) for mark in new)
            self._console.print(Padding(Text(self._fit(legend), style="dim"), (0, 0, 0, 2), expand=False))
        self._pause(" ".join(row.name for row in line.rows))

    def _cells(self, row: TableRow) -> Text:
        cells = [self._cell(cell) for cell in row.cells]
        if row.left_out:
            cells.insert(row.head, Text(f".. ({row.left_out}) ..", style="dim"))
        return Text(" ").join(cells)

    @staticmethod
    def _cell(cell: Cell) -> Text:
        form, style = MARKS[cell.mark]
        return Text(form.format(cell.block), style=style)

    def _slots(self, row: TableRow) -> Text:
        return Text(self._fit(self._words["slots"].format(filled=row.filled, room=row.room)), style="dim")

    def _bars(self, line: Bars) -> Table:
        known = any(bar.final is not None for bar in line.bars)
        table = Table.grid(padding=(0, 2))
        heads = ["column_token", "column_model", *(["column_final"] if known else [])]
        table.add_row(*(Text(self._fit(self._words[head]), style="dim") for head in heads))
        for bar in line.bars:
            cells = [
                Text(self._fit(bar.piece.text), style="bold" if bar.drawn else ""),
                self._length(bar.model, "blue"),
            ]
            if known:
                cells.append(self._final(bar))
            if bar.drawn:
                cells.append(Text(self._fit(self._words["column_drawn"]), style="bold green"))
            table.add_row(*cells)
        return table

    def _length(self, share: float, style: str) -> Text:
        full = round(BAR * float(share))
        text = Text(self._bar * full, style=style)
        return text.append(f"{' ' if full else ''}{share}", style="default")

    def _final(self, bar: Bar) -> Text:
        if bar.dropped_by is not None:
            return Text(self._fit(self._words[f"dropped_{bar.dropped_by}"]), style="red")
        assert bar.final is not None  # it was not dropped, so it is known
        return self._length(bar.final, "green")
