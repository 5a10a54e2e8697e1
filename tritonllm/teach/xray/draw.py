"""Prints a watched step: its sequences with their blocks and slots, its stages, and where its time went."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tritonllm.events import Part, StepPlanned
from tritonllm.teach.xray.costs import ATTENTION, PRODUCTS, Cost
from tritonllm.teach.xray.roofline import Roofline
from tritonllm.teach.xray.stages import Operation, Recording

CELLS = 16  # of a drawn block
MOST_SEQUENCES, MOST_BLOCKS = 6, 6
NARROW = 110  # columns of a terminal
STYLES = {"sum": "dim", "head": "italic"}
KINDS = {"decode": "decode", "verify": "verifies drafts", "prefill": "prompt"}


@dataclass
class OperationRow:
    """One line of the table of stages: an operation, or several small ones.

    Attributes:
        operations: the operations that it stands for.
        stage, what: the texts of its first columns.
        detailed: whether shapes and kernels are shown.
    """

    operations: list[Operation]
    stage: str
    what: str
    detailed: bool = True
    style: str = ""

    @property
    def cost(self) -> Cost:
        flops = [operation.cost.flops for operation in self.operations if operation.cost.flops is not None]
        read = sum(operation.cost.read for operation in self.operations)
        written = sum(operation.cost.written for operation in self.operations)
        return Cost(sum(flops) if flops else None, read, written)

    @property
    def seconds(self) -> float:
        return sum(operation.seconds for operation in self.operations)


def matters(operation: Operation) -> bool:
    """Whether an operation has a line of its own."""
    return operation.name in PRODUCTS | ATTENTION or operation.name.startswith("tritonllm.")


def rows_of(operations: Sequence[Operation]) -> list[OperationRow]:
    """Lines of one layer, or of what lies outside of the layers: stages in their order, small operations together."""
    rows: list[OperationRow] = []
    for stage, group in groupby(operations, key=lambda operation: operation.stage):
        for large, some in groupby(group, key=matters):
            if large:
                rows += [OperationRow([operation], stage, operation.name) for operation in some]
            else:
                few = list(some)
                names = list(dict.fromkeys(operation.name.removeprefix("aten.") for operation in few))
                more = ", …" if len(names) > 4 else ""
                what = f"torch: {', '.join(names[:4])}{more}" if len(few) > 1 else few[0].name
                rows.append(OperationRow(few, stage, what, detailed=len(few) == 1))
    return rows


@dataclass
class Layers:
    """Layers that do the same: their numbers, and their operations."""

    numbers: list[int] = field(default_factory=list)
    operations: list[list[Operation]] = field(default_factory=list)


def groups_of(operations: Iterable[Operation]) -> list[Layers]:
    """The layers of a step by what they do, in the order of the first of each kind."""
    layers: dict[int, list[Operation]] = {}
    for operation in operations:
        if operation.layer is not None:
            layers.setdefault(operation.layer, []).append(operation)
    groups: dict[tuple[object, ...], Layers] = {}
    for number, some in layers.items():
        group = groups.setdefault(tuple(operation.signature for operation in some), Layers())
        group.numbers.append(number)
        group.operations.append(some)
    return list(groups.values())


def table_rows(recording: Recording) -> list[OperationRow]:
    """All lines: what comes before the layers, one layer in full, the others as sums, what comes after them."""
    groups = groups_of(recording.operations)
    inner = [at for at, operation in enumerate(recording.operations) if operation.layer is not None]
    first, last = (inner[0], inner[-1]) if inner else (len(recording.operations), len(recording.operations) - 1)
    between = [o for o in recording.operations[first : last + 1] if o.layer is None]
    rows = rows_of(recording.operations[:first])
    shown = max(groups, key=lambda group: len(group.numbers), default=None)
    for group in groups:
        if group is shown:
            rows.append(
                OperationRow(
                    group.operations[0],
                    f"layer {group.numbers[0]}",
                    "their sum; in full:",
                    detailed=False,
                    style="head",
                )
            )
            shown_rows = rows_of(group.operations[0])
            rows += [OperationRow(r.operations, r.stage, r.what, r.detailed, "layer") for r in shown_rows]
            rest, numbers = group.operations[1:], group.numbers[1:]
            what = f"× {len(numbers)} like layer {group.numbers[0]}"
        else:
            rest, numbers = group.operations, group.numbers
            what = f"× {len(numbers)}, {difference(group, shown)}"
        if rest:
            rows.append(OperationRow(list(chain(*rest)), f"layer {spans(numbers)}", what, detailed=False, style="sum"))
    return rows + rows_of(between) + rows_of(recording.operations[last + 1 :])


def difference(group: Layers, other: Layers | None) -> str:
    """What a layer does that another one does not, or the other way round."""
    sets = [{o.signature for o in some.operations[0]} if some is not None else set() for some in (other, group)]
    for at, some in enumerate((group, other)):
        for operation in some.operations[0] if some is not None else []:
            if operation.signature not in sets[at]:
                verb = "with" if at == 0 else "without"
                return f"{verb} {operation.stage}: {operation.name.removeprefix('aten.')} {operation.shapes}"
    return "the same in another order or number"


def spans(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0–2, 5``."""
    parts, begin = [], None
    for at, number in enumerate(numbers):
        begin = number if begin is None else begin
        if at + 1 == len(numbers) or numbers[at + 1] != number + 1:
            parts.append(f"{begin}" if begin == number else f"{begin}–{number}")
            begin = None
    return ", ".join(parts)


def many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def positions_of(start: int, end: int) -> str:
    return f"position {start}" if end == start + 1 else f"positions {start}–{end - 1}"


def scaled(value: float, unit: str) -> str:
    """``1572864, "B"`` -> ``1.57 MB``."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    return (
        scaled(seconds, "s")
        if seconds >= 1
        else f"{1e3 * seconds:.3g} ms"
        if seconds >= 1e-3
        else f"{1e6 * seconds:.3g} µs"
    )


def kernel_of(operation: Operation) -> str:
    """What was launched, with which configuration, and why that."""
    lines = [str(launch) for launch in operation.launches]
    for choice in operation.choices:
        numbers = ", ".join(f"{name}={value}" for name, value in choice.config.items())
        lines.append(f"{choice.op} with {numbers} ({choice.reason})")
    return "; ".join(lines if operation.choices else [*lines, operation.reason])


class Notes:
    """Numbers the distinct notes under a table."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def number(self, operation: Operation) -> int:
        return self.texts.setdefault(kernel_of(operation), len(self.texts) + 1)


def print_step(
    console: Console, planned: StepPlanned, recording: Recording, roofline: Roofline, block_tokens: int
) -> None:
    """Everything of one step; ``block_tokens``: tokens of a block of the cache."""
    counts = f"{many(planned.num_tokens, 'token')} of {many(len(planned.parts), 'sequence')}"
    console.rule(Text(f"step {planned.step}: {counts}"))
    print_blocks(console, planned, block_tokens)
    notes = Notes()
    look = {"plain": not console.is_terminal, "narrow": console.width < NARROW}
    console.print(stage_table(recording, roofline, notes, **look))
    console.print(Text("Kernels, their configurations, and why these:", style="bold"))
    for note, number in notes.texts.items():
        console.print(Text(f"  [{number}] {note}"), soft_wrap=not console.is_terminal)
    print_times(console, recording, roofline)


def stage_table(recording: Recording, roofline: Roofline, notes: Notes, *, plain: bool, narrow: bool) -> Table:
    """``narrow``: an operation stands under its stage, and not beside it."""
    table = Table(box=box.ASCII2 if plain else box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", no_wrap=not narrow, overflow="fold")
    if not narrow:
        table.add_column("operation: what goes in → what comes out", overflow="fold")
    for title in ("kernel", "bytes", "FLOPs", "FLOP/B", "time", "roofline"):
        table.add_column(title, justify="right", no_wrap=True)
    before = None
    for row in table_rows(recording):
        stage = row.stage if row.stage != before else ""
        before = row.stage
        if row.style == "layer" and stage:
            stage = f"│ {stage}"
        what, one, kernel = Text(row.what), row.operations[0], ""
        if row.detailed:
            what.append(f": {one.shapes}", style="dim")
            kernel = f"[{notes.number(one)}]"
        numbers = map(Text, [kernel, *numbers_of(row, roofline)])
        table.add_row(*_names(stage, what, narrow), *numbers, style=STYLES.get(row.style, ""))
    table.add_section()
    total = OperationRow(recording.operations, "all", many(len(recording.operations), "operation"))
    numbers = map(Text, ["", *numbers_of(total, roofline)])
    table.add_row(*_names(total.stage, Text(total.what), narrow), *numbers, style="bold")
    return table


def _names(stage: str, what: Text, narrow: bool) -> list[Text]:
    """The cells in front of the numbers."""
    if not narrow:
        return [Text(stage), what]
    return [Text.assemble((f"{stage}\n", "bold"), what) if stage else what]


def numbers_of(row: OperationRow, roofline: Roofline) -> list[str]:
    """Bytes, FLOPs, FLOPs for each byte, time, percent of the roofline."""
    cost = row.cost
    least = sum(roofline.seconds(o.cost.bytes, o.cost.flops) for o in row.operations)
    return [
        scaled(cost.bytes, "B"),
        "–" if cost.flops is None else scaled(cost.flops, "F"),
        "–" if cost.flops is None or not cost.bytes else f"{cost.flops / cost.bytes:.2g}",
        duration(row.seconds),
        f"{100 * least / row.seconds:.0f}%" if row.seconds and least else "–",
    ]


def print_times(console: Console, recording: Recording, roofline: Roofline) -> None:
    whole = max(recording.seconds, 1e-12)

    def share(seconds: float) -> str:
        return f"{duration(seconds)} ({100 * seconds / whole:.0f}%)"

    gaps = recording.clock.startswith("CUDA")
    rest = "gaps between kernels" if gaps else "Python between the operations, which being watched makes slower"
    text = f"Time of the step, by {recording.clock}: {duration(recording.seconds)} = operations "
    text += f"{share(recording.explained)} + "
    if recording.own:
        text += f"x-ray's own work {share(recording.own)} + "
    text += f"not explained {share(recording.rest)}: {rest}."
    least = roofline.seconds(*_sum(recording.operations))
    text += f" At the roofline all bytes and FLOPs of the step would take {duration(least)}."
    console.print(Text(text))
    for failure in recording.failures:
        console.print(Text(f"Could not be counted: {failure}", style="red"))


def _sum(operations: Sequence[Operation]) -> tuple[int, int]:
    return sum(o.cost.bytes for o in operations), sum(o.cost.flops or 0 for o in operations)


def print_roofline(console: Console, roofline: Roofline) -> None:
    dtype = str(roofline.dtype).removeprefix("torch.")
    text = f"Roofline of this {roofline.chip}, measured now: copies {scaled(roofline.bandwidth, 'B/s')}, products of "
    text += f"{dtype} {scaled(roofline.peak, 'FLOP/s')}. Below {roofline.ridge:.3g} FLOPs for each byte the memory is "
    text += "the limit, above it arithmetic."
    if roofline.chip == "CPU":
        text += " What fits into the CPU's caches can be faster than 100%."
    console.print(Text(text))


def print_blocks(console: Console, planned: StepPlanned, block_tokens: int) -> None:
    """The block tables of the step's sequences, and the slots that its tokens are stored in."""
    owners: dict[int, int] = {}
    for part in planned.parts:
        for number in part.block_ids:
            owners[number] = owners.get(number, 0) + 1
    for part in planned.parts[:MOST_SEQUENCES]:
        end = part.start + part.num_tokens
        heading = f"sequence {part.sequence_id}, {KINDS[part.kind]}: "
        heading += positions_of(part.start, end) if part.num_tokens else "no token of its own"
        heading += f", {many(part.start, 'key')} known" + (", draws a token" if part.samples else "")
        console.print(Text(heading, style="bold"))
        line = Text("  blocks ")
        for at in shown_blocks(part):
            if at is None:
                line.append(" … ")
                continue
            number = part.block_ids[at]
            sign = "+" if at >= len(part.block_ids) - part.new_blocks else "=" if owners[number] > 1 else ""
            line.append(f" {sign}#{number} ", style="cyan")
            line.append_text(cells(part, at, block_tokens))
        console.print(line)
        if part.num_tokens:
            console.print(Text(f"  slots   {slots(part, block_tokens)}"))
    if len(planned.parts) > MOST_SEQUENCES:
        console.print(Text(f"  … and {len(planned.parts) - MOST_SEQUENCES} more sequences"))
    legend = "█ keys and values known, ▓ written by this step, · free; + new, = shared; slot = block × "
    console.print(Text(f"  {legend}{block_tokens} + place", style="dim"))


def shown_blocks(part: Part) -> list[int | None]:
    """Places of a block table that are drawn; ``None`` for those left out."""
    count = len(part.block_ids)
    if count <= MOST_BLOCKS:
        return list(range(count))
    return [0, None, *range(count - MOST_BLOCKS + 1, count)]


def cells(part: Part, at: int, block_tokens: int) -> Text:
    """One block: a cell for a slot, or for some if blocks are large."""
    each = -(-block_tokens // CELLS)
    text = Text()
    for first in range(0, block_tokens, each):
        position = at * block_tokens + first
        if position < part.start:
            text.append("█", style="blue")
        elif position < part.start + part.num_tokens:
            text.append("▓", style="green")
        else:
            text.append("·", style="dim")
    return text


def slots(part: Part, block_tokens: int) -> str:
    """``positions 20–22 → slots 116–118``, one for each run of slots."""
    runs: list[tuple[int, int, int]] = []  # position, slot, length
    for position in range(part.start, part.start + part.num_tokens):
        if position // block_tokens >= len(part.block_ids):
            break
        slot = part.block_ids[position // block_tokens] * block_tokens + position % block_tokens
        if runs and slot == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((position, slot, 1))
    texts = []
    for position, slot, length in runs[:4]:
        last = slot + length - 1
        target = f"slot {slot}" if length == 1 else f"slots {slot}–{last}"
        texts.append(f"{positions_of(position, position + length)} → {target}")
    return ", ".join(texts) + (", …" if len(runs) > 4 else "")
