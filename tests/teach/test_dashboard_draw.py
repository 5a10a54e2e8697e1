"""Whatever there is to draw, and however small the screen: it fits, and says what is true."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.teach.dashboard import draw
from tritonllm.telemetry.activity_state import State
from tritonllm.telemetry.snapshot import Cells, Counters, RequestLine, Snapshot, StepColumn, View

count = st.integers(0, 10**6)
lines = st.builds(
    RequestLine,
    request_id=st.text("abc[/]é漢", max_size=40),
    number=st.integers(0, 10**6),
    state=st.sampled_from(["waiting", "prefill", "decode", "verify", "preempted", "ended"]),
    sequences=st.integers(1, 128),
    prompt_tokens=count,
    computed_tokens=count,
    total_tokens=count,
    output_tokens=count,
    most_output_tokens=st.none() | count,
    cached_tokens=count,
    preemptions=st.integers(0, 99),
    blocks=count,
    reason=st.sampled_from(["", "stop", "length, stop"]),
)
columns = st.builds(StepColumn, step=count, decode=count, verify=count, prefill=count)
size = st.integers(1, 150), st.integers(1, 40)


@st.composite
def snapshots(draw):
    kinds = draw(st.text(".cus", max_size=300))
    return Snapshot(
        counters=draw(st.builds(Counters, *([count] * 8), num_blocks=st.just(len(kinds)))),
        requests=draw(st.none() | st.lists(lines, max_size=8).map(tuple)),
        num_requests=8,
        steps=draw(st.none() | st.lists(columns, max_size=200).map(tuple)),
        cells=draw(st.none() | st.just(Cells(1, kinds, tuple(range(len(kinds)))))),
        used_part=draw(st.floats(0, 1)),
        admission_end=draw(st.sampled_from(["", "queue", "blocks"])),
    )


@given(snapshot=snapshots(), width=size[0], height=size[1])
def test_everything_fits(snapshot, width, height):
    parts = [
        draw.pool(snapshot, width, height),
        draw.steps(snapshot.steps, width, height),
        draw.requests(snapshot, width, height),
        draw.flow(draw.counter_items(snapshot), width, height),
    ]
    for text in parts[:3]:
        assert text.plain.count("\n") < max(height, 2)
    for text in (parts[1], parts[2], parts[3]) if snapshot.steps else (parts[2], parts[3]):
        words = text.plain.startswith(("no ", "this server"))
        assert words or all(line.cell_len <= width for line in text.split("\n"))
    for title in (draw.pool_title(snapshot), draw.requests_title(snapshot), draw.steps_title(snapshot.steps)):
        assert title and "\n" not in title


@given(column=columns, rows=st.integers(1, 8))
def test_a_stack_is_as_high_as_its_step(column, rows):
    top = max(1, column.tokens)
    stack = draw._stack(column, top, rows)
    assert len(stack) == rows
    assert [cell == (" ", "") for cell in stack] == [column.tokens == 0] * rows
    half = draw._stack(column, 2 * top, rows)
    filled = sum(draw.EIGHTHS.index(glyph) if " on " not in style else 8 for glyph, style in half)
    kinds = sum(getattr(column, name) > 0 for name, _ in draw.KINDS)
    assert abs(filled - 4 * rows * (column.tokens > 0)) <= 1 + kinds
    shown = {style for _, styles in stack for style in styles.split(" on ")}
    for name, style in draw.KINDS:
        if 4 * getattr(column, name) > column.tokens and rows > 2:
            assert style in shown


def test_each_kind_of_block_has_a_shape_of_its_own():
    assert len(set(draw.GLYPHS.values())) == len(draw.GLYPHS) == 4 and len(set(draw.OWNERS)) == 6
    snapshot = Snapshot(
        Counters(num_blocks=4, used_blocks=2, shared_blocks=1), cells=Cells(1, "uscs.", (0, 1, -1, 2, -1))
    )
    text = draw.pool(snapshot, 5, 2)
    assert text.plain.split("\n")[0] == "█▚░▚·"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans if span.end <= 5}
    assert styles["█"] == draw.OWNERS[0] and styles["░"] == "dim"
    assert "2 of 4 blocks used, one a cell" in draw.pool_title(snapshot)
    assert draw.pool(snapshot, 60, 12).plain.count("█") >= 18, "few blocks are drawn large"


def test_binned_cells_say_so():
    snapshot = Snapshot(
        Counters(num_blocks=100_000, used_blocks=16_384), cells=Cells(250, "u" * 65 + "." * 335, (0,) * 400)
    )
    assert draw.pool_title(snapshot) == "KV pool: 16,384 of 100,000 blocks used, 250 a cell"


def line(state, computed=0, total=20, out=0, most=5):
    return RequestLine("a", 0, state, 1, 20, computed, total, out, most, 0, 0, 0)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (line("waiting"), (0.0, "20 in")),
        (line("prefill", computed=5), (0.25, "5/20 in")),
        (line("decode", computed=20, out=4), (0.8, "4/5 out")),
        (line("decode", computed=20, out=4, most=None), (0.0, "4 out")),
        (line("ended", out=3), (1.0, "3 out")),
    ],
)
def test_how_far_a_request_is(shown, expected):
    assert draw.progress(shown) == expected


def test_before_anything_happens():
    snapshot = State().look(View(), 0.0)
    assert draw.requests(snapshot, 60, 5).plain == "no requests yet"
    assert draw.steps(snapshot.steps, 60, 5).plain == "no step yet"
    assert "0 running" in "".join(draw.counter_items(snapshot))
    waiting = Snapshot(Counters(waiting=3, drafts=10, accepted=4), admission_end="blocks")
    assert {"3 in the queue (too few free blocks)", "4 of 10 drafts right"} <= set(draw.counter_items(waiting))
