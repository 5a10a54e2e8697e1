"""Draws a snapshot's parts as text of a given size. Colours are those of Okabe and Ito, which people tell apart
whichever colours they see, and every difference is one of shapes, too."""

from collections.abc import Iterable
from itertools import groupby

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from tritonllm.telemetry.snapshot import (
    CACHED,
    FREE,
    SHARED,
    USED,
    Cells,
    Counters,
    RequestLine,
    Snapshot,
    StepColumn,
)

BLUE, ORANGE, GREEN, SKY, RED, PINK = "#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7"
OWNERS = (SKY, ORANGE, GREEN, PINK, BLUE, RED)
KINDS = (("decode", SKY), ("verify", ORANGE), ("prefill", GREEN))
GLYPHS = {FREE: "·", CACHED: "░", USED: "█", SHARED: "▚"}
EIGHTHS = " ▁▂▃▄▅▆▇█"
WHY_WAIT = {
    "seats": "all seats are taken",
    "tokens": "the step is full",
    "blocks": "too few free blocks",
    "in_flight": "a last token is on its way",
    "preemption": "blocks were just taken back",
}


def owner_style(number: int) -> str:
    return "dim" if number < 0 else OWNERS[number % len(OWNERS)]


def flow(items: Iterable[str], width: int, height: int) -> Text:
    """The items one after the other, as many to a line as fit; those that find no line are left out."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += " │ " + item
        elif len(lines) < height:
            lines.append(item[:width])
    return Text("\n".join(lines), no_wrap=True)


def counter_items(snapshot: Snapshot) -> list[str]:
    """What is counted, the most important first."""
    counters = snapshot.counters
    why = WHY_WAIT.get(snapshot.admission_end, "") if counters.waiting else ""
    items = [
        f"{snapshot.tokens_per_second:,.0f} new tokens/s",
        f"{snapshot.prompt_tokens_per_second:,.0f} prompt tokens/s",
        f"{counters.running} running",
        f"{counters.waiting} in the queue" + (f" ({why})" if why else ""),
        f"prefix hits {_share(counters.hit_tokens, counters.query_tokens)}",
        f"{counters.generated_tokens:,} tokens from {counters.prompt_tokens:,} of prompts",
        f"{counters.steps:,} steps",
        f"{counters.preemptions} preempted",
    ]
    if counters.drafts:
        items.append(f"{counters.accepted:,} of {counters.drafts:,} drafts right")
    return items


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} tokens ({100 * part / whole:.0f} %)" if whole else "none asked for"


def pool_title(snapshot: Snapshot) -> str:
    counters, cells = snapshot.counters, snapshot.cells
    if counters.num_blocks is None:
        return f"KV pool: {100 * snapshot.used_part:.1f} % used"
    size = 1 if cells is None else cells.blocks_per_cell
    each = "one a cell" if size == 1 else f"{size:,} a cell"
    return f"KV pool: {counters.used_blocks:,} of {counters.num_blocks:,} blocks used, {each}"


def pool_legend(counters: Counters) -> Text:
    legend = Text(no_wrap=True)
    known = ((USED, counters.used_blocks, "used"), (SHARED, counters.shared_blocks, "shared"))
    for kind, count, name in (*known, (CACHED, counters.cached_blocks, "cached")):
        if count is not None:
            legend.append(GLYPHS[kind], style="bold" if kind == SHARED else "dim" if kind == CACHED else SKY)
            legend.append(f" {name} {count:,}  " if kind != USED else f" {name}  ")
    return legend.append(f"{GLYPHS[FREE]} free")


def pool(snapshot: Snapshot, width: int, height: int) -> Text:
    """The grid over its legend; without blocks, a bar."""
    if snapshot.cells is None:
        if not snapshot.used_part:
            return Text("nothing is in use" if height else "")
        filled = min(width * height, max(1, round(width * height * snapshot.used_part)))
        cells = Cells(0, USED * filled + FREE * (width * height - filled), (0,) * filled + (-1,) * (width * height))
        return _grid(cells, width, height)
    text = _grid(snapshot.cells, width, height - 1)
    text.append("\n")
    legend = pool_legend(snapshot.counters)
    legend.truncate(width)
    return text.append_text(legend)


def pool_cells(width: int, height: int) -> int:
    """How many cells :func:`pool` has room for."""
    return max(1, width * (height - 1))


def _grid(cells: Cells, width: int, height: int) -> Text:
    tall, wide = _cell_size(len(cells.kinds), width, height)
    columns, lines = max(1, width // wide), list[Text]()
    for first in range(0, min(len(cells.kinds), columns * (height // tall)), columns):
        line = Text(no_wrap=True)
        pairs = zip(cells.kinds[first : first + columns], cells.owners[first : first + columns], strict=False)
        for (kind, owner), same in groupby(pairs):
            line.append(GLYPHS[kind] * wide * len(list(same)), style=_cell_style(kind, owner))
        lines += [line] * tall
    return Text("\n").join(lines + [Text()] * (height - len(lines)))


def _cell_size(count: int, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of the largest cell of which so many have room. A letter is twice as high as it is wide."""
    for tall, wide in ((3, 6), (2, 4), (1, 2)):
        if count <= (width // wide) * (height // tall):
            return tall, wide
    return 1, 1


def _cell_style(kind: str, owner: int) -> str:
    if kind in (FREE, CACHED):
        return "dim"
    return f"bold {owner_style(owner)}" if kind == SHARED else owner_style(owner)


def steps_title(columns: tuple[StepColumn, ...] | None) -> str:
    if not columns:
        return "tokens of each step"
    first, last = columns[0].step, columns[-1].step
    return f"tokens of steps {first:,} to {last:,}, at most {max(column.tokens for column in columns):,}"


def steps_legend(columns: tuple[StepColumn, ...]) -> Text:
    legend = Text("last:", no_wrap=True)
    for name, style in KINDS:
        legend.append(" █", style=style).append(f" {name} {getattr(columns[-1], name):,} ")
    return legend


def steps(columns: tuple[StepColumn, ...] | None, width: int, height: int) -> Text:
    """A stack for each step, the last one at the right, over their legend."""
    if columns is None:
        return Text("this server tells of no single steps")
    if not columns:
        return Text("no step yet")
    shown, rows = columns[-width:], max(1, height - 1)
    top = max(1, *(column.tokens for column in shown))
    stacks = [_stack(column, top, rows) for column in shown]
    text = Text(no_wrap=True)
    for row in reversed(range(rows)):
        for (glyph, style), same in groupby(stack[row] for stack in stacks):
            text.append(glyph * len(list(same)), style=style)
        text.append("\n")
    legend = steps_legend(shown)
    legend.truncate(width)
    return text.append_text(legend)


def _stack(column: StepColumn, top: int, rows: int) -> list[tuple[str, str]]:
    """A glyph and a style for each row, from the bottom. What a step has of a kind is seen, however little."""
    ends, end = [], 0
    total = 8 * rows
    for name, style in KINDS:
        tokens = getattr(column, name)
        end = min(total, end + max(round(total * tokens / top), int(tokens > 0)))
        ends.append((end, style))
    cells = []
    for bottom in range(0, total, 8):
        inside = [(min(end, bottom + 8) - bottom, style) for end, style in ends if end > bottom]
        cells.append(_cell(inside))
    return cells


def _cell(inside: list[tuple[int, str]]) -> tuple[str, str]:
    """The character and the style of a cell, from how far each kind reaches into it from below, in eighths."""
    if not inside:
        return " ", ""
    first, style = inside[0]
    last, other = max(inside, key=lambda one: one[0])
    if first == last:
        return EIGHTHS[first], style
    if last == 8:
        return EIGHTHS[first], f"{style} on {other}"
    return EIGHTHS[last], style if 2 * first >= last else other


def requests_title(snapshot: Snapshot) -> str:
    if not snapshot.requests:
        return "requests"
    last = snapshot.first_row + len(snapshot.requests)
    return f"requests {snapshot.first_row + 1:,} to {last:,} of {snapshot.num_requests:,}"


def requests(snapshot: Snapshot, width: int, height: int) -> Text:
    """A line for each request, under a heading."""
    if snapshot.requests is None:
        return Text("this server tells of no single requests")
    if not snapshot.num_requests:
        return Text("no requests yet" if not snapshot.counters.steps else "no requests")
    name_width = max(8, min(24, (width - 51) * 3 // 5))
    bar = max(4, min(40, width - name_width - 51))
    heading = f"  {'request':<{name_width}} {'state':<13} {'progress':<{bar}} {'tokens':>13} {'cached':>6} {'lost':>4}"
    text = Text(no_wrap=True).append(f"{heading} {'blocks':>6}"[:width], style="dim")
    for line in snapshot.requests[: height - 1]:
        text.append("\n").append_text(_request(line, width, name_width, bar))
    return text


def _request(line: RequestLine, width: int, name_width: int, bar: int) -> Text:
    times = f" ×{line.sequences}" if line.sequences > 1 else ""
    name, room = line.request_id, max(2, name_width - len(times))
    name = (name if cell_len(name) <= room else "…" + set_cell_size(name[1 - room :], room - 1)) + times
    state = f"ended: {line.reason}"[:13] if line.state == "ended" else line.state
    part, tokens = progress(line)
    filled = round(bar * part)
    live = line.state in ("prefill", "decode", "verify")
    text = Text(no_wrap=True)
    text.append("█ ", style=owner_style(line.number) if line.state != "ended" else "dim")
    text.append(f"{set_cell_size(name, name_width)} {state:<13} ", style="" if live else "dim")
    text.append("━" * filled, style=owner_style(line.number)).append("╌" * (bar - filled), style="dim")
    text.append(
        f" {tokens:>13} {line.cached_tokens:>6} {line.preemptions:>4} {line.blocks:>6}", style="" if live else "dim"
    )
    text.truncate(width)
    return text


def progress(line: RequestLine) -> tuple[float, str]:
    """How far it is, 0 to 1, and in numbers: its prompt while that is computed, then its output."""
    if line.state == "prefill" and line.computed_tokens < line.total_tokens:
        return line.computed_tokens / line.total_tokens, f"{line.computed_tokens}/{line.total_tokens} in"
    if line.state == "waiting":
        return 0.0, f"{line.prompt_tokens} in"
    most = line.most_output_tokens
    if line.state == "ended":
        return 1.0, f"{line.output_tokens} out"
    if most is None:
        return 0.0, f"{line.output_tokens} out"
    return min(1.0, line.output_tokens / max(most, 1)), f"{line.output_tokens}/{most} out"
