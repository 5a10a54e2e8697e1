import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.data.inputs import upload_cascade
from tritonllm.engine.data.step import SharedPrefix
from tritonllm.engine.step import shared_prefix
from tritonllm.engine.step.dummy_step import dummy_step
from tritonllm.engine.step.room_sizes import graph_sizes
from tritonllm.engine.step.shared_prefix import CascadePlanner, find_shared_prefix
from tritonllm.kernels.attention.cascade import cascade_parts


@st.composite
def batches(draw):
    """Block tables as a prefix cache makes them: random paths down a tree, and zeros after them."""
    sequences = draw(st.lists(st.lists(st.integers(0, 1), max_size=8), min_size=1, max_size=9))
    ids: dict[tuple[int, ...], int] = {}
    width = max(map(len, sequences)) + draw(st.integers(0, 2))
    tables = np.zeros((len(sequences), width), dtype=np.int32)
    for row, sequence in enumerate(sequences):
        for i in range(len(sequence)):
            tables[row, i] = ids.setdefault(tuple(sequence[: i + 1]), len(ids))
    full = [draw(st.integers(0, len(sequence))) for sequence in sequences]
    return tables, np.array(full)


@given(batches(), st.integers(1, 20))
def test_what_is_found_is_shared_and_worth_it(batch, least):
    tables, full = batch
    found = find_shared_prefix(tables, full, least)
    if found is None:
        return
    blocks, shares = found
    assert (full[shares] >= blocks).all()
    assert (tables[shares, :blocks] == tables[shares][0, :blocks]).all()
    assert (shares.sum() - 1) * blocks >= least
    assert 2 * shares.sum() >= len(tables)
    others = tables[~shares & (full >= blocks), :blocks]
    assert not (others == tables[shares][0, :blocks]).all(1).any()  # nobody is left out


@given(batches(), st.integers(1, 20), st.integers(1, 5))
def test_a_prefix_of_all_is_found_if_it_is_worth_it(batch, least, shared):
    tables, full = batch
    own = np.full((len(tables), shared), 77, dtype=np.int32) + np.arange(shared, dtype=np.int32)
    tables, full = np.concatenate((own, tables), axis=1), full + shared
    found = find_shared_prefix(tables, full, least)
    if (len(tables) - 1) * shared >= least:
        blocks, shares = found
        assert (shares.sum() - 1) * blocks >= (len(tables) - 1) * shared


def test_copies_of_the_prefix_stay_outside():
    """The first requests computed the prompt before it was cached; the others found it."""
    tables = np.arange(20 * 10, dtype=np.int32).reshape(20, 10)
    tables[3:, :8] = tables[3, :8]
    blocks, shares = find_shared_prefix(tables, np.full(20, 9), 100)
    assert blocks == 8
    assert shares.tolist() == [False] * 3 + [True] * 17
    assert find_shared_prefix(tables, np.full(20, 9), 16 * 8 + 1) is None
    assert find_shared_prefix(tables, np.full(20, 9), 16 * 8) is not None


def test_no_sequence_and_one():
    assert find_shared_prefix(np.zeros((0, 0), dtype=np.int32), np.zeros(0, dtype=np.int32), 1) is None
    assert find_shared_prefix(np.zeros((1, 4), dtype=np.int32), np.array([4]), 1) is None


def test_a_shared_minority_is_left_alone():
    tables = np.arange(20 * 10, dtype=np.int32).reshape(20, 10)
    tables[:9, :8] = tables[0, :8]
    assert find_shared_prefix(tables, np.full(20, 9), 1) is None
    tables[:10, :8] = tables[0, :8]
    assert find_shared_prefix(tables, np.full(20, 9), 1) is not None


def test_the_planner_counts_bytes(monkeypatch):
    """Three sequences of 9 tokens in blocks of 4 share at most 2 blocks: 4 reads of a block less."""
    tables = np.array([[5, 6, 1], [5, 6, 2], [5, 6, 3]], dtype=np.int32)
    lens = np.array([9, 9, 9], dtype=np.int32)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 400)
    planner = CascadePlanner(block_tokens=4, block_bytes=100)
    plan = planner.plan(tables, lens)
    assert (planner.may_plan(3, 8), planner.may_plan(3, 7), planner.may_plan(1, 1000)) == (True, False, False)
    assert plan.blocks == 2
    assert plan.shares.tolist() == [True] * 3
    step = dataclasses.replace(dummy_step(3, [], rows=0, width=3), block_tables=tables, shared=plan)
    step.inputs.seq_lens[:] = lens
    plan = upload_cascade(step, 4, torch.device("cpu"))
    assert plan.suffix_lens.tolist() == [1] * 3
    assert plan.suffix_tables[:, 0].tolist() == [1, 2, 3]
    assert plan.prefix_lens.sum() == 8
    assert plan.prefix_tables[plan.prefix_lens > 0].flatten().tolist() == [5, 6]
    # the second block takes the new token: one block, two reads saved
    assert planner.plan(tables, np.array([9, 8, 9], dtype=np.int32)) is None
    assert CascadePlanner(block_tokens=4, block_bytes=99).plan(tables, lens) is None


@pytest.mark.parametrize(
    ("block_bytes", "captured", "shares"), [(100, "graph", False), (101, "graph", True), (100, None, True)]
)
def test_beside_prompts_a_captured_step_that_shares_nothing_is_sooner_done(monkeypatch, block_bytes, captured, shares):
    """Unless sharing saves much: here two reads of a block. What is asked for is the step that shares nothing."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BESIDE_PROMPTS", 201)
    step = dataclasses.replace(dummy_step(3, [4], rows=4, width=2), shared=SharedPrefix(1, np.ones(3, dtype=bool)))
    asked = []
    chosen = CascadePlanner(4, block_bytes).unless_captured(step, lambda one: asked.append(one.shared) or captured)
    assert (chosen is step) == shares and (chosen.shared is step.shared) == shares
    assert asked == ([] if block_bytes == 101 else [None])


@given(batches(), st.integers(1, 4), st.data())
def test_a_step_that_gets_a_plan_was_expected(batch, block_size, data):
    """Graphs are captured for the batch sizes of which may_plan is true."""
    tables, full = batch
    lens = np.array([data.draw(st.integers(n * block_size + 1, (n + 1) * block_size)) for n in full], dtype=np.int32)
    planner = CascadePlanner(block_size, block_bytes=shared_prefix.MIN_SAVED_BYTES // 6)
    if planner.plan(tables, lens) is not None:
        assert planner.may_plan(len(lens), int(lens.max()))


@pytest.mark.parametrize("seats", [1, 7, 8, 9, 40, 100, 256, 300])
def test_a_padded_batch_takes_the_plan_of_the_batch(seats):
    sizes = graph_sizes(seats)
    for n in range(1, seats + 1):
        assert cascade_parts(n) == cascade_parts(next(size for size in sizes if size >= n))


def test_plans_are_plain_data():
    tables = np.zeros((20, 5000), dtype=np.int32)
    plan = CascadePlanner(16, 1 << 20).plan(tables, np.full(20, 80_000, dtype=np.int32))
    assert (type(plan.blocks), type(plan.shares)) == (int, np.ndarray)
