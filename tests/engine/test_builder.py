import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.inputs import upload_step
from tritonllm.engine.data.plan import ScheduledRequest, StepPlan
from tritonllm.engine.data.pooled_spans import PooledSpan
from tritonllm.engine.data.request import Pooling, Request
from tritonllm.engine.data.step_bytes import pack, unpack
from tritonllm.engine.step.builder import StepBuilder
from tritonllm.engine.step.device_seats import DeviceSeats
from tritonllm.engine.step.shared_prefix import MIN_SAVED_BYTES, CascadePlanner
from tritonllm.layers.segments import Segment, Segments, decodes

CPU = torch.device("cpu")
SEATS = 8
ADMISSIONS = itertools.count()


def item(request_id, tokens, blocks, start, count, *, seat=0, pending=False, **params):
    request = Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        params=SamplingParams(**params),
        max_total_tokens=100,
        block_ids=blocks,
        seed=len(tokens),
        seat=seat,
        admission=next(ADMISSIONS),
    )
    return ScheduledRequest(request, start, count, start + count == len(tokens) + pending, pending)


def plan_of(*items):
    n = sum(i.num_tokens == 1 and i.samples for i in items)
    counts = [i.num_tokens for i in items[n:]]
    chunk = Segment(len(counts), sum(counts), max(counts, default=0))
    return StepPlan(items, preempted=(), segments=Segments(decodes(n), chunk=chunk))


def make_builder(block_size=4, planner=None):
    return StepBuilder(SEATS, 40, block_size, planner)


def build(*items, builder=None, **kwargs):
    return (builder or make_builder(**kwargs)).build(plan_of(*items))


@given(
    block_size=st.integers(1, 9),
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 19)), min_size=1, max_size=SEATS),
    seed=st.integers(0, 99),
)
def test_positions_and_slots(block_size, spans, seed):
    """Of chunks anywhere in their sequences, whose blocks lie anywhere; of decodes as the device derives them."""
    blocks = iter(np.random.default_rng(seed).permutation(1000).tolist())
    items, positions, slots = [], [], []
    for seat, (start, count) in enumerate(spans):
        mine = [next(blocks) for _ in range(-(-(start + count) // block_size))]
        items.append(item(str(seat), list(range(100)), mine, start, count, seat=seat))
        positions += range(start, start + count)
        slots += [mine[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
    items.sort(key=lambda i: i.num_tokens > 1 or not i.samples)
    batch = upload_step(build(*items, block_size=block_size), len(items), block_size, CPU)
    DeviceSeats(SEATS, block_size, CPU).advance(batch)
    inputs = batch.inputs
    assert (inputs.positions.tolist(), inputs.slot_mapping.tolist()) == (positions, slots)
    assert inputs.input_ids.tolist() == positions
    assert inputs.seq_lens.tolist() == [start + count for start, count in spans]


def test_a_mixed_step():
    decode = item("a", [5, 6, 7, 8, 9], [3, 1], 4, 1, seat=5, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1)
    in_flight = item("p", [5, 6], [7], 2, 1, seat=0, pending=True, temperature=0)
    last_chunk = item("b", [10, 11, 12], [0], 1, 2, seat=2, temperature=0)
    first_chunk = item("c", [20, 21, 22, 23], [2, 4], 0, 3, seat=1)
    step = build(decode, in_flight, last_chunk, first_chunk)
    batch, seats = upload_step(step, 4, 4, CPU), DeviceSeats(SEATS, 4, CPU)
    metadata, inputs, sampling = batch.metadata, batch.inputs, batch.sampling(3)
    assert inputs.input_ids.tolist() == [9, -1, 11, 12, 20, 21, 22]
    assert (inputs.seats.tolist(), inputs.starts.tolist()) == ([5, 0, 2, -1], [4, -1, 2, -1])
    seats.tell(step.parameters)
    seats._state.last_tokens[0], seats._state.positions[0] = 33, 2  # of p
    seats.advance(batch)
    assert inputs.input_ids.tolist() == [9, 33, 11, 12, 20, 21, 22]
    assert inputs.positions.tolist() == [4, 2, 1, 2, 0, 1, 2]
    assert metadata.slot_mapping.tolist() == [4, 30, 1, 2, 8, 9, 10]
    assert metadata.block_tables.tolist() == [[3, 1], [7, 0], [0, 0], [2, 4]]
    assert metadata.seq_lens.tolist() == [5, 3, 3, 3]
    assert metadata.decode_order.tolist() == [0, 1]
    assert metadata.cu_seqlens_q.tolist() == [0, 2, 5]
    assert metadata.segments == Segments(decodes(2), chunk=Segment(sequences=2, tokens=5, longest=3))
    assert step.samples.tolist() == [True, True, True, False]
    assert inputs.logit_rows.tolist() == [
        0,
        1,
        3,
        0,
    ]  # the first chunk of `c` samples nothing; one row that nobody wants
    assert seats._state.row_seats.tolist() == [5, 0, 2, -1, -1, -1, -1, -1]  # a, p and b get tokens
    assert [t[3].item() for t in batch.rows] == [0.0, 0, 1.0, 0.0, 0, 0]  # nobody's
    assert sampling.temperature.tolist() == [0.5, 0.0, 0.0]
    assert sampling.top_k.tolist() == [7, 0, 0]
    assert torch.allclose(sampling.top_p, torch.tensor([0.9, 1.0, 1.0]))
    assert torch.allclose(sampling.min_p, torch.tensor([0.1, 0.0, 0.0]))
    assert sampling.seeds.tolist() == [5, 2, 3]
    assert sampling.steps.tolist() == [0, 1, 0]


def test_decodes_only():
    step = build(item("a", [5], [3], 0, 1))
    assert step.inputs.cu_seqlens_q.tolist() == [0]
    assert step.segments == Segments(decodes(1)) and step.segments.only_decodes
    assert step.inputs.decode_order.tolist() == [0]


def test_decodes_from_the_longest_to_the_shortest():
    """Prompt chunks do not count, however long; among equals the first comes first."""
    ends = (3, 7, 1, 7, 5)
    ones = [
        item(str(seat), list(range(end)), [2 * seat, 2 * seat + 1], end - 1, 1, seat=seat)
        for seat, end in enumerate(ends)
    ]
    step = build(*ones, item("prompt", list(range(90)), list(range(20, 40)), 0, 80, seat=5))
    assert step.inputs.decode_order.tolist() == [1, 3, 4, 0, 2]
    assert upload_step(step, 5, 4, CPU).metadata.decode_order.dtype == torch.int32


def test_a_seat_is_told_of_new_blocks_a_new_request_and_a_preemption():
    builder = make_builder()
    first = item("a", list(range(30)), [3, 1], 0, 5, seat=4, temperature=0.5)
    assert build(first, builder=builder).block_tables.tolist() == [[3, 1]]
    first.request.block_ids += [9]
    assert build(first, builder=builder).block_tables.tolist() == [[3, 1]]  # as many as the step needs
    assert builder.seats.tables[4, :4].tolist() == [3, 1, 9, 0]
    second = item("b", list(range(5)), [8, 7], 0, 5, seat=4, temperature=0, top_p=0.5)
    step = build(second, builder=builder)
    assert step.block_tables.tolist() == [[8, 7]]
    assert (step.parameters.temperature[4], step.parameters.top_p[4], step.parameters.steps[4]) == (0.0, 0.5, -5)
    assert build(second, builder=builder).parameters is None  # nothing has changed
    second.request.admission = next(ADMISSIONS)
    second.request.block_ids = [2, 6]  # as many as before, but others
    step = build(second, builder=builder)
    assert step.block_tables.tolist() == [[2, 6]] and step.parameters is None  # it has forked, or is in its seat again
    third = item("c", list(range(5)), [2, 6], 0, 5, seat=4, temperature=0.25)
    del first, second, step  # nobody knows who had the seat
    assert build(third, builder=builder).parameters.temperature[4] == 0.25


@given(st.lists(st.booleans(), min_size=1, max_size=SEATS), st.integers(0, 9))
def test_last_tokens_of_decodes(pending, prompt):
    """Of prompts and of outputs; those in flight only the device knows."""
    items = []
    for seat, flies in enumerate(pending):
        items.append(item(str(seat), list(range(10, 11 + prompt)), [seat], prompt + seat, 1, seat=seat, pending=flies))
        items[-1].request.output_token_ids = [100 + place for place in range(seat)]
    items = [one._replace(samples=True) for one in items]
    ids = build(*items, block_size=32).inputs.input_ids.tolist()
    last = [100 + seat - 1 if seat else 10 + prompt for seat in range(len(pending))]
    assert ids == [-1 if flies else token for flies, token in zip(pending, last, strict=True)]


def test_decodes_that_share_a_prefix():
    """The plan is over the decodes alone, however many chunks begin with the same blocks."""
    own = {"a": 1, "b": 2, "c": 3}
    ones = [item(name, [1] * 11, [8, 9, block], 10, 1, seat=block) for name, block in own.items()]
    chunk = item("d", [1] * 11, [8, 9, 4], 8, 3, seat=0)
    planner = CascadePlanner(block_tokens=4, block_bytes=MIN_SAVED_BYTES // 4)
    metadata = upload_step(build(*ones, chunk, planner=planner), 4, 4, CPU).metadata
    cascade = metadata.cascade
    assert cascade.prefix_tables[cascade.prefix_lens > 0].flatten().tolist() == [8, 9]
    assert cascade.suffix_tables[:, 0].tolist() == [1, 2, 3]
    assert cascade.suffix_lens.tolist() == [3, 3, 3]
    assert metadata.block_tables[:, 1].tolist() == [9] * 4  # whole, for layers that do not share
    assert build(*ones, chunk).shared is None
    assert build(ones[0], chunk, planner=planner).shared is None


def pooled(request_id, tokens, start, count, how, *, seat=0):
    made = item(request_id, tokens, [seat, 9, 8, 7], start, count, seat=seat)
    made.request.pooling = Pooling(how)
    return made


def test_the_spans_of_a_step():
    """Of those that are pooled; rows count those who draw, too. The step can be sent to another process."""
    decode = item("a", [5, 6, 7], [3], 2, 1, seat=3)
    one = pooled("b", [9], 0, 1, "mean", seat=2)
    part = pooled("c", [1, 2, 3, 4], 1, 2, "all", seat=1)
    rest = pooled("d", [1, 2, 3], 1, 2, "last", seat=0)
    step = build(decode, one, part, rest)
    assert step.pooled == (
        PooledSpan("b", 2, Pooling("mean"), first=0, begin=1, end=2, row=1),
        PooledSpan("c", 1, Pooling("all"), first=1, begin=2, end=4, row=-1),
        PooledSpan("d", 0, Pooling("last"), first=1, begin=4, end=6, row=2),
    )
    assert (step.wants_all, step.draws, [span.length for span in step.pooled]) == (True, True, [1, 3, 3])
    assert unpack(pack(step, None)).step.pooled == step.pooled


def test_first_tokens_of_whole_prompts_are_rows():
    """Of a prompt in several steps the first token is gone when it ends."""
    whole, begun = pooled("a", [1, 2, 3], 0, 3, "cls", seat=0), pooled("b", [4, 5, 6], 1, 2, "cls", seat=1)
    last = pooled("c", [7, 8], 0, 2, "last", seat=2)
    step = build(whole, begun, last)
    assert step.inputs.logit_rows.tolist() == [0, 4, 6]
    assert [span.in_row for span in step.pooled] == [True, False, True]
    assert step.wants_all
    assert not build(whole, last).wants_all


def test_steps_without_pooled_prompts():
    builder = make_builder()
    rest = build(pooled("d", [1, 2, 3], 1, 2, "last", seat=0), builder=builder)
    assert (rest.wants_all, rest.draws, rest.num_rows) == (False, False, 1)
    step = build(item("e", [1, 2, 3], [4], 1, 2, seat=0), builder=builder)  # the seat's next owner
    assert (step.pooled, step.draws, step.wants_all) == ((), True, False)
