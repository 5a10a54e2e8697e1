"""What the x-ray prints: blocks and slots, stages, layers that are alike, and notes on kernels."""

import dataclasses
import inspect
import io
import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support.engines import greedy, tiny_llm
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from tritonllm.events import StepPlanned
from tritonllm.kernels.runtime import tuning
from tritonllm.teach.xray import draw, kernels
from tritonllm.teach.xray.costs import Cost
from tritonllm.teach.xray.kernels import Launch, reason_of, watched_launches
from tritonllm.teach.xray.roofline import Roofline
from tritonllm.teach.xray.stages import Operation, Recording

ROOF = Roofline("CPU", 1e10, 4e10, torch.float32)


@cache
def real_step():
    """A step as an engine plans it, whose fields the tests change."""
    llm, steps = tiny_llm(async_scheduling=False), []
    llm.engine.subscribe(lambda event: steps.append(event) if isinstance(event, StepPlanned) else None)
    llm.generate([list(range(5, 16))], greedy(1), use_tqdm=False)
    return steps[0]


def part(**changes):
    """Six tokens behind five known ones, in three blocks."""
    some = {"sequence_id": "a", "start": 5, "num_tokens": 6, "block_ids": (7, 2, 9), "new_blocks": 2}
    return real_step().parts[0]._replace(**{**some, **changes})


def planned_of(*parts):
    return dataclasses.replace(real_step(), parts=parts)


def test_blocks_and_slots():
    """Positions 5 to 10 in blocks 7, 2 and 9 of four: one known in the second, two new blocks, slots by block."""
    console = Console(file=io.StringIO(), width=200)
    draw.print_blocks(console, planned_of(part(), part(sequence_id="b", block_ids=(7,), new_blocks=0, num_tokens=0)), 4)
    text = console.file.getvalue()
    assert "=#7 ████ +#2 █▓▓▓ +#9 ▓▓▓·" in " ".join(text.split())
    assert draw.slots(part(), 4) == "positions 5–7 → slots 9–11, positions 8–10 → slots 36–38"
    assert draw.slots(part(start=8, num_tokens=1), 4) == "position 8 → slot 36"
    assert draw.shown_blocks(part(block_ids=tuple(range(40)))) == [0, None, 35, 36, 37, 38, 39]
    assert draw.cells(part(start=40, num_tokens=100), 0, 256).plain == "███▓▓▓▓▓▓" + 7 * "·"


def operation(layer, stage="qkv", seconds=1e-6, name="aten.linear", shapes="x"):
    return Operation(name, layer, stage, shapes, (), (), "why", seconds, Cost(200, 60, 40))


def test_layers_that_do_the_same_are_one_line():
    some = [operation(None, "embedding"), *(operation(at) for at in (0, 1, 2)), operation(3, shapes="y")]
    recording = Recording([*some, operation(None, "logits")], 1e-5, 0.0, "a clock", ())
    rows = [(row.stage, row.what, len(row.operations)) for row in draw.table_rows(recording)]
    assert rows == [
        ("embedding", "aten.linear", 1),
        ("layer 0", "their sum; in full:", 1),
        ("qkv", "aten.linear", 1),
        ("layer 1–2", "× 2 like layer 0", 2),
        ("layer 3", "× 1, with qkv: linear y", 1),
        ("logits", "aten.linear", 1),
    ]
    assert draw.numbers_of(draw.OperationRow(some[1:4], "", ""), ROOF) == ["300 B", "600 F", "2", "3 µs", "1%"]
    assert [draw.duration(x) for x in (2.5, 0.0125, 3e-6)] == ["2.5 s", "12.5 ms", "3 µs"]
    assert draw.spans([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"


@pytest.mark.parametrize("width", [80, 140])
def test_nothing_is_cut_off_in_a_terminal(width):
    """Every stage and operation can be read, and so can the numbers, in a narrow one too."""
    some = [operation(None, "embedding"), *(operation(at, name="aten.scaled_dot_product_attention") for at in range(9))]
    recording = Recording(some, 1e-5, 0.0, "a clock", ())
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    draw.print_step(console, planned_of(part()), recording, ROOF, 4)
    text = console.file.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    folded = re.sub(r"\s+", "", text)
    for word in (
        "embedding",
        "scaled_dot_product_attention",
        "layer1–8",
        "×8likelayer0",
        "100B",
        "200F",
        "10operations",
    ):
        assert word in folded, word


def test_launches_of_triton(monkeypatch):
    """What is asked before a launch tells the kernel and its grid. (Whether a real launch asks it, a GPU shows.)"""
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    metadata = SimpleNamespace(num_warps=4, num_stages=3, shared=1024)
    kernel = SimpleNamespace(name="some_kernel", metadata=metadata)
    plain = CompiledKernel.launch_metadata
    with watched_launches() as launches:
        assert CompiledKernel.launch_metadata(kernel, (132, 2, 1), 0, "argument") is None
    assert launches == [Launch("some_kernel", (132, 2, 1), 4, 3, 1024)]
    assert str(launches[0]) == "some_kernel grid 132×2×1, 4 warps, 3 stages, 1,024 B shared"
    assert CompiledKernel.launch_metadata is plain
    assert "kernel.launch_metadata(grid, stream, " in inspect.getsource(JITFunction.run)


def test_reasons_and_configurations_are_notes(monkeypatch):
    """As on a GPU: an operation that asked the tables says what they said."""
    choice = tuning.ConfigChoice(
        "linear", {"m": 1}, {"kernel": "rows", "BLOCK_N": 32}, "table entry gpu/linear, nearest to m=2"
    )
    launch = Launch("rows_kernel", (96,), 4, 2, 0)
    asked = Operation("tritonllm.linear", 0, "qkv", "x", (choice,), (launch,), "why", 1e-6, Cost(2, 1, 1))
    note = draw.kernel_of(asked)
    assert note == (
        "rows_kernel grid 96, 4 warps, 2 stages, 0 B shared; "
        "linear with kernel=rows, BLOCK_N=32 (table entry gpu/linear, nearest to m=2)"
    )
    notes = draw.Notes()
    assert [notes.number(asked), notes.number(operation(0)), notes.number(asked)] == [1, 2, 1]
    x = torch.zeros(1, 4)
    func = torch.ops.tritonllm.linear.default
    assert reason_of(func, (x,), {}, (choice,)) == "linear: table entry gpu/linear, nearest to m=2"
    assert reason_of(func, (x,), {}, ()) == "reference in plain torch, because the tensors are on the CPU"
    monkeypatch.setattr(kernels.env, "CPU_BACKEND", "interpret")
    assert "Triton's interpreter" in reason_of(func, (x,), {}, ())
    meta = torch.zeros(100, 4, device="meta")  # as on a GPU
    assert reason_of(func, (meta,), {}, ()) == "one configuration for all sizes"
    assert "100 rows are more than" in reason_of(torch.ops.aten.linear.default, (meta, meta), {}, ())
