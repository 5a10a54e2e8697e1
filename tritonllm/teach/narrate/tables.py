"""What a step did with the blocks of the cache: sentences, and the block tables."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from tritonllm.events import Part, StepPlanned
from tritonllm.teach.narrate.acts import BlockTables, Cell, Count, Line, Mark, Said, TableRow

NOTHING: Mapping[str, int] = MappingProxyType({})
ROWS = 6  # block tables of a step
CELLS, TAIL = 12, 4  # blocks of a table; and of these the last


def _marks(part: Part, block_tokens: int, step: StepPlanned, owners: Counter[int]) -> list[Mark]:
    loaded, copied = set(step.loads), {target for _, target in step.copies}
    new = len(part.block_ids) - part.new_blocks
    cached = part.cached_tokens // block_tokens if part.admitted and part.num_tokens else 0
    marks: list[Mark] = []
    for at, block in enumerate(part.block_ids):
        if block in copied:
            marks.append("copied")
        elif block in loaded:
            marks.append("loaded")
        elif at >= new:
            marks.append("new")
        elif at < cached:
            marks.append("cached")
        else:
            marks.append("shared" if owners[block] > 1 else "old")
    return marks


def _row(name: str, part: Part, block_tokens: int, marks: Sequence[Mark], filled: int) -> TableRow:
    cells = [Cell(block, mark) for block, mark in zip(part.block_ids, marks, strict=True)]
    head = left_out = 0
    if len(cells) > CELLS:
        head, left_out = CELLS - TAIL, len(cells) - CELLS
        cells = [*cells[:head], *cells[-TAIL:]]
    room = len(part.block_ids) * block_tokens
    return TableRow(name, tuple(cells), head, left_out, min(filled, room), room)


def _owners(step: StepPlanned) -> Counter[int]:
    return Counter(block for part in step.parts for block in part.block_ids)


def block_tables(
    step: StepPlanned, block_tokens: int, name: Callable[[str], str], verified: Mapping[str, int] = NOTHING
) -> list[Line]:
    """The tables of the first sequences of a step.

    Args:
        block_tokens: how many tokens a block holds, over all ranks.
        name: returns the name of a sequence, by its id.
        verified: for sequences with guesses, the number of tokens that stay when these were checked.
    """
    owners, rows = _owners(step), []
    parts = [part for part in step.parts if part.block_ids]  # a sibling may have nothing of its own yet
    for part in parts[:ROWS]:
        filled = verified.get(part.sequence_id, part.start + part.num_tokens)
        rows.append(_row(name(part.sequence_id), part, block_tokens, _marks(part, block_tokens, step, owners), filled))
    lines: list[Line] = [BlockTables(tuple(rows))]
    if len(parts) > ROWS:
        lines.append(Said("more_tables", {"count": Count(len(parts) - ROWS)}))
    return lines


def block_news(
    step: StepPlanned, block_tokens: int, name: Callable[[str], str], evicted: int, *, caches: bool
) -> list[tuple[str, Said]]:
    """What happened to blocks: kinds of news, each with its sentence.

    Args:
        evicted: blocks whose contents were given up for this step.
        caches: whether there is a prefix cache.
    """
    news: list[tuple[str, Said]] = []
    new = [(name(p.sequence_id), p.new_blocks) for p in step.parts if p.new_blocks]
    if new:
        many = sum(count for _, count in new)
        values = {"blocks": Count(many), "names": [n for n, _ in new], "requests": Count(len(new))}
        news.append(("allocated", Said("allocated", values)))
    found = [p for p in step.parts if p.admitted and p.num_tokens and p.cached_tokens]
    back = set(step.loads)
    for part in found[:ROWS]:
        blocks = part.block_ids[: part.cached_tokens // block_tokens]
        there = sum(block not in back for block in blocks)
        if there:
            key = "found" if caches else "found_of_sibling"
            values = {"name": name(part.sequence_id), "blocks": Count(there), "tokens": Count(there * block_tokens)}
            news.append(("found", Said(key, values)))
    owners = _owners(step)
    shared = sum(count > 1 for count in owners.values())
    if shared and any(p.admitted for p in step.parts):
        saved = sum(count - 1 for count in owners.values())
        news.append(("shared", Said("shared", {"blocks": Count(shared), "saved": Count(saved)})))
    for source, target in step.copies[:ROWS]:
        owner = next((name(p.sequence_id) for p in step.parts if target in p.block_ids), "?")
        news.append(("copied", Said("copied", {"source": source, "target": target, "name": owner})))
    if evicted:
        news.append(("evicted", Said("evicted", {"blocks": Count(evicted)})))
    if step.stores:
        news.append(("stored", Said("stored", {"blocks": Count(len(step.stores)), "ids": list(step.stores)})))
    if step.loads:
        news.append(("loaded", Said("loaded", {"blocks": Count(len(step.loads)), "ids": list(step.loads)})))
    return news
