"""A step is plain data: another runner can run it from its bytes, and no request is in it."""

import dataclasses
import enum
import itertools

import numpy as np
import pytest
import torch
from support.engines import tiny_checkpoint
from support.scheduling import make
from support.tiny_models import load_decoder, random_tokens
from support.tiny_tokenizer import VOCAB_SIZE
from support.waiting import PATIENCE

from tritonllm.config.engine import EngineConfig
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.inputs import StepInbox, views
from tritonllm.engine.data.plan import ScheduledRequest
from tritonllm.engine.data.request import Request
from tritonllm.engine.data.step import OF_THE_FIRST
from tritonllm.engine.data.step_bytes import pack, unpack
from tritonllm.engine.data.step_inputs import ALIGNMENT, COLUMNS, Per, StepInputs, StepLayout, StepRoom, place
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.step.dummy_step import dummy_step
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.layers.segments import Segment, Segments, decodes

CPU, NUM_BLOCKS = torch.device("cpu"), 24
KINDS = [
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9, "seed": 1},
    {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "min_tokens": 5, "logit_bias": {0: 5.0, 7: 2.0}},
    {"temperature": 1.0, "allowed_token_ids": [3, 4, 5, 6, 7]},
]


def make_runner():
    folder = tiny_checkpoint()
    config = EngineConfig.from_kwargs(model=str(folder), block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
    runner = ModelRunner(load_decoder(folder), config, CPU, max_model_len=80)
    runner.start(NUM_BLOCKS, max_model_len=80)
    return runner, Scheduler(config.scheduler, config.block_tokens, NUM_BLOCKS, 80)


def walk(value, path="step"):
    """Every value that a step holds, with its place."""
    yield path, value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from walk(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{path}[{key!r}]")


@pytest.mark.parametrize("ahead", [False, True])
def test_another_runner_gives_the_same_tokens_for_a_steps_bytes(ahead):
    (runner, scheduler), (other, _) = make_runner(), make_runner()
    for index, kind in enumerate(KINDS * 2):
        prompt = random_tokens(3 + 5 * index, VOCAB_SIZE, seed=index)
        scheduler.add(make(f"r{index}", prompt, len(prompt) + 12, **kind, eos=[0]))
    in_flight, kinds = [], set()
    while scheduler.num_running + scheduler.num_waiting:
        plan = scheduler.schedule()
        if plan.scheduled:
            step = runner._builder.build(plan)
            own = {name: getattr(step, name) for name in OF_THE_FIRST}  # for the other one draws, too
            copy = unpack(pack(step.for_followers(), None)).step
            copy = dataclasses.replace(copy, **own, redrawn=step.redrawn)
            for path, value in walk(copy):
                assert not isinstance(value, Request | ScheduledRequest | SamplingParams | torch.Tensor), path
                plain = isinstance(value, np.ndarray | int | float | str | None | tuple | list | enum.Enum)
                assert plain or dataclasses.is_dataclass(value), path
            kinds.add((step.plain, bool(step.prompt_spans), bool(step.new_edits)))
            in_flight.append((plan, runner.run(step), other.run(copy)))
        if in_flight and not (ahead and plan.scheduled and len(in_flight) < 2):
            plan, mine, theirs = in_flight.pop(0)
            result = mine.wait(PATIENCE, str)
            assert theirs.wait(PATIENCE, str) == result
            scheduler.update(plan, result.sampled)
    assert len(kinds) >= 3
    assert scheduler.stats.preemptions > 0 and scheduler.pool.num_free == NUM_BLOCKS


def room(n, chunks, rows):
    return StepRoom(Segments(decodes(n), chunk=Segment(len(chunks), sum(chunks), max(chunks, default=0))), rows)


def test_arrays_lie_apart_and_where_kernels_want_them():
    layout = StepLayout(room(5, [3, 9], 7))
    spans = sorted((span.start, span.end) for span in layout.spans.values())
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.sent <= min(span.start for span in layout.row_spans.values())
    assert max(span.end for span in layout.row_spans.values()) <= layout.num_bytes
    arrays = layout.arrays(np.zeros(layout.sent, dtype=np.uint8))
    for name, column in COLUMNS.items():
        assert getattr(arrays, name).dtype == column.dtype
    names = ("positions", "seq_lens", "decode_order", "logit_rows", "cu_seqlens_q")
    assert [len(getattr(arrays, name)) for name in names] == [17, 7, 5, 7, 3]


def test_every_element_is_written():
    """Whatever the memory held before: of a step that has the room to itself, and of one that leaves some."""
    step = dummy_step(3, [5, 2], rows=4, width=2)
    for larger in (room(3, [5, 2], 4), room(3, [5, 2], 8), room(8, [4, 4, 4, 4], 8), room(3, [4, 4, 2], 16)):
        results = []
        for filler in (0, 255):
            layout = StepLayout(larger)
            arrays = layout.arrays(np.full(layout.num_bytes, filler, dtype=np.uint8))
            place(step.inputs, step.room, arrays, larger)
            results.append({name: getattr(arrays, name).tolist() for name in COLUMNS})
        assert results[0] == results[1]
        assert results[0]["cu_seqlens_q"][-1] == larger.segments.chunk.tokens
        assert results[0]["seats"][4:] == [-1] * (larger.rows - 4)


def test_the_device_sees_what_was_placed():
    """Of one step after the other, and nothing of the one before."""
    larger = room(4, [8, 8], 4)
    layout = StepLayout(larger)
    memory = torch.full((layout.num_bytes,), 255, dtype=torch.uint8)
    inbox, there = StepInbox(larger, memory), views(memory, layout.spans)
    for step in (
        dummy_step(4, [8], rows=4, width=1),
        dummy_step(2, [4], rows=3, width=1),
        dummy_step(0, [], rows=0, width=1),
    ):
        arrays = layout.arrays(np.zeros(layout.num_bytes, dtype=np.uint8))
        place(step.inputs, step.room, arrays, larger)
        inbox.send(step)
        for name, column in COLUMNS.items():
            tensor = there[name]
            assert tensor.numpy().dtype == column.dtype
            assert tensor.tolist() == getattr(arrays, name).tolist()
    assert (memory[layout.sent :] == 255).all()


def test_segments_move_apart_with_drafts_between_them():
    """A step of a decode, two verified sequences and a chunk in a room with more of each."""
    have = Segments(decodes(1), Segment(2, 5, 3), Segment(1, 4, 4))
    larger = StepRoom(Segments(decodes(2), Segment(3, 8, 3), Segment(2, 6, 6)), 8)
    arrays = {n: np.full(StepRoom(have, 7).count(c.per), 1, dtype=c.dtype) for n, c in COLUMNS.items()}
    arrays |= {"positions": np.arange(10), "logit_rows": np.array([0, 1, 2, 3, 4, 5, 9])}
    arrays |= {"verify_starts": np.array([0, 2, 5], dtype=np.int32), "cu_seqlens_q": np.array([0, 4], dtype=np.int32)}
    layout = StepLayout(larger)
    placed = layout.arrays(np.full(layout.num_bytes, 255, dtype=np.uint8))
    place(StepInputs(**arrays), StepRoom(have, 7), placed, larger)
    assert placed.positions.tolist() == [0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 6, 7, 8, 9, 0, 0]
    assert placed.logit_rows.tolist() == [0, 2, 3, 4, 5, 6, 13, 0]
    assert placed.verify_starts.tolist() == [0, 2, 5, 8]
    assert placed.cu_seqlens_q.tolist() == [0, 4, 6]
    assert placed.seq_lens.tolist() == [1, 0, 1, 1, 3, 1, 2]
    assert {Per.VERIFY_START, Per.CHUNK_START} <= {column.per for column in COLUMNS.values()}
