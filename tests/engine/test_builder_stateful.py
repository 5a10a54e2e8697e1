"""What a builder keeps between steps, and what it knows of steps of decodes alone, changes no step."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.scheduling import make, make_scheduler

from tritonllm.engine.data.plan import StepPlan
from tritonllm.engine.data.step_inputs import COLUMNS, PARAMETERS
from tritonllm.engine.step.builder import StepBuilder
from tritonllm.engine.step.shared_prefix import MIN_SAVED_BYTES, CascadePlanner
from tritonllm.layers.segments import Segment, Segments, decodes

SEATS, MAX_BLOCKS, BLOCK = 5, 20, 4
ALONE = ("positions", "slot_mapping", "logit_rows", "input_ids", "seq_lens", "seats", "starts", "limits")
PARAMS = st.sampled_from(
    [
        {},
        {"temperature": 0},
        {"top_p": 0.9, "seed": 1},
        {"top_k": 3},
        {"frequency_penalty": 1.0},
        {"logprobs": 2},
        {"logprobs": -1},
        {"min_tokens": 5, "logit_bias": {0: 5.0}},
        {"min_tokens": 5},
        {"allowed_token_ids": [3, 4, 5]},
    ]
)
# when they come, the length of their prompt, of which a part is shared, and of their output, and what they ask for
REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 18), st.booleans(), st.integers(1, 14), PARAMS), min_size=1, max_size=9
)


def builder(drafts):
    planner = CascadePlanner(BLOCK, MIN_SAVED_BYTES // 2)  # pays from two blocks on
    return StepBuilder(SEATS, MAX_BLOCKS, BLOCK, planner, drafts=drafts)


def assert_same(step, fresh, plan):
    for name, column in COLUMNS.items():
        mine, theirs = getattr(step.inputs, name), getattr(fresh.inputs, name)
        assert mine.dtype == theirs.dtype == column.dtype
        np.testing.assert_array_equal(mine, theirs, name)
    assert step.block_tables.shape == fresh.block_tables.shape
    for mine, theirs, item in zip(step.block_tables, fresh.block_tables, plan.scheduled, strict=True):
        blocks = item.request.block_ids
        assert mine[: len(blocks)].tolist() == theirs[: len(blocks)].tolist() == blocks[: len(mine)]
    np.testing.assert_array_equal(step.samples, fresh.samples)
    names = "segments", "longest", "logprobs", "whole_logprobs", "late", "prompt_spans", "pooled", "limited", "redrawn"
    assert [getattr(step, name) for name in names] == [getattr(fresh, name) for name in names]
    assert (step.edited is None) == (fresh.edited is None)
    assert step.edited is None or step.edited.tolist() == fresh.edited.tolist()
    told = {edits.seat: edits for edits in fresh.new_edits}
    assert all(told[edits.seat] == edits for edits in step.new_edits)
    assert (step.shared is None) == (fresh.shared is None)
    if step.shared is not None:
        assert step.shared.blocks == fresh.shared.blocks
        np.testing.assert_array_equal(step.shared.shares, fresh.shared.shares)


def alone(plan):
    """The decodes of a plan that has others beside them."""
    n = plan.segments.decode.sequences
    return StepPlan(plan.scheduled[:n], (), Segments(decodes(n)))


def beside_a_prompt(plan):
    """A plan of decodes alone, with the last of them as a chunk of one token."""
    segments = Segments(decodes(len(plan.scheduled) - 1), chunk=Segment(1, 1, 1))
    return StepPlan(plan.scheduled, (), segments)


def assert_same_decodes(step, other, n):
    for name in ALONE:
        mine, theirs = getattr(step.inputs, name), getattr(other.inputs, name)
        np.testing.assert_array_equal(mine[:n], theirs[:n], name)
    order = step.inputs.decode_order
    assert order[order < n].tolist() == other.inputs.decode_order.tolist()
    assert step.samples[:n].all() and other.samples[:n].all()


@settings(max_examples=examples(100))
@given(REQUESTS, st.sampled_from([0, 0, 2]), st.booleans(), st.integers(12, 40))
def test_a_fresh_builder_builds_the_same_steps(requests, drafts, ahead, num_blocks):
    scheduler = make_scheduler(num_blocks, block_size=BLOCK, seats=SEATS, tokens=16, max_model_len=60, drafts=drafts)
    kept, told, in_flight, number = builder(drafts), {}, [], 0
    waiting = sorted(enumerate(requests), key=lambda one: one[1][0])
    while waiting or in_flight or scheduler.num_running + scheduler.num_waiting:
        while waiting and waiting[0][1][0] <= number:
            index, (_, length, shares, output, params) = waiting.pop(0)
            prompt = list(range(length)) if shares else list(range(100 * index, 100 * index + length))
            scheduler.add(make(str(index), prompt, length + output, arrival=index, **params))
        number += 1
        plan = scheduler.schedule()
        if plan.scheduled:
            step, fresh = kept.build(plan), builder(drafts).build(plan)
            assert_same(step, fresh, plan)
            if step.parameters is not None:
                told = step.parameters
            for seat in (item.request.seat for item in plan.scheduled):
                for name in PARAMETERS:
                    assert getattr(told, name)[seat] == getattr(fresh.parameters, name)[seat]
            n = plan.segments.decode.sequences
            if 0 < n < len(plan.scheduled) and not plan.segments.verify.sequences:
                assert_same_decodes(builder(drafts).build(alone(plan)), fresh, n)
            elif n > 1 and n == len(plan.scheduled):
                assert_same_decodes(fresh, builder(drafts).build(beside_a_prompt(plan)), n - 1)
            in_flight.append(plan)
        if in_flight and not (ahead and plan.scheduled and len(in_flight) < 2):
            done = in_flight.pop(0)
            scheduler.update(done, [[7] * (1 + item.drafts // 2) if item.samples else [] for item in done.scheduled])
