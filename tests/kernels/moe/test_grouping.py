from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.kernels.moe.grouping import GROUP, group_by_expert
from tritonllm.kernels.runtime import tuning

SMALL_CHUNKS = {"CHUNK": 32, "COLS": 8, "num_warps": 1}  # several for a hundred pairs


def shares(count, block_m, unit):
    """(first, pairs) of an expert's blocks: as few as it needs, whose units differ by one at most."""
    units, blocks = -(-count // unit), -(-count // block_m)
    ends = [min(units * (block + 1) // blocks * unit, count) for block in range(blocks)]
    return [(first, end - first) for first, end in zip([0, *ends], ends, strict=False)]


def assert_grouped(ids, experts, block_m, expert_map=None, unit=None):
    """Compare with lists: each expert's pairs in their order, then cut in blocks, then in groups of blocks."""
    blocks = group_by_expert(ids, experts, block_m, expert_map, unit=unit)
    local = [i if 0 <= i < experts else -1 for i in ids.flatten().tolist()]
    if expert_map is not None:
        rows = expert_map.tolist() if expert_map.dim() == 2 else [expert_map.tolist()]
        mappings = [dict(enumerate(row)) for row in rows]
        local = [mappings[t % len(rows)].get(i, -1) for t, row in enumerate(ids.tolist()) for i in row]
    pairs = [[] for _ in range(experts)]
    for pair, expert in enumerate(local):
        if expert >= 0:
            pairs[expert].append(pair)
    order = [pair for own in pairs for pair in own]
    assert blocks.order[: len(order)].tolist() == order
    table, groups, first = [], [], 0
    for expert, own in enumerate(pairs):
        parts = shares(len(own), block_m, unit or block_m)
        assert all(0 < rows <= block_m for _, rows in parts)
        for block in range(len(parts)):
            begin = block // GROUP * GROUP
            groups.append([len(table) + begin, min(GROUP, len(parts) - begin)])
        table += [[expert, first + begin, rows] for begin, rows in parts]
        first += len(own)
    rows = blocks.table.T.tolist()
    assert rows[: len(table)] == table
    assert all(row[2] == 0 for row in rows[len(table) :])
    count = blocks.table.shape[1]
    behind = blocks.table.as_strided((2 * count + 1,), (1,), blocks.table.numel())
    assert behind[0] == len(table)
    assert behind[1:].view(2, count).T[: len(table)].tolist() == groups


@given(
    tokens=st.integers(1, 40),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 20),
    block=st.sampled_from([(1, None), (2, None), (16, None), (8, 2), (10, 2), (3, 1)]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    small_chunks=st.booleans(),
)
def test_pairs_by_expert(device, tokens, top_k, experts, block, dtype, small_chunks):
    block_m, unit = block
    ids = torch.randint(-1, experts + 2, (tokens, top_k + 1)).to(device, dtype)[:, :top_k]  # also out of range
    with tuning.override("moe_grouping", SMALL_CHUNKS) if small_chunks else nullcontext():
        assert_grouped(ids, experts, block_m, unit=unit)


@given(tokens=st.integers(1, 20), experts=st.integers(1, 20), here=st.integers(1, 8), small_chunks=st.booleans())
def test_experts_elsewhere_are_left_out(device, tokens, experts, here, small_chunks):
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[torch.randperm(experts)[:here]] = torch.arange(min(here, experts), dtype=torch.int32)
    ids = torch.randint(-1, experts + 2, (tokens, 3), dtype=torch.int32)
    with tuning.override("moe_grouping", SMALL_CHUNKS) if small_chunks else nullcontext():
        assert_grouped(ids.to(device), here, 4, expert_map.to(device))
        in_turns = torch.stack([expert_map, expert_map.roll(1), expert_map.roll(2)])
        assert_grouped(ids.to(device), here, 4, in_turns.to(device))


@pytest.mark.parametrize("experts", [1, 3])
def test_all_to_one_expert_and_none_to_any(device, experts):
    for value in (experts - 1, -1):
        assert_grouped(torch.full((50, 2), value, dtype=torch.int32, device=device), experts, 16)


def test_the_table_has_room_for_the_worst_case(device):
    """One pair in each expert but the last, which takes the rest: as many blocks as there can be."""
    ids = torch.tensor([*range(7), *[7] * 10], dtype=torch.int32, device=device)[:, None]
    table = group_by_expert(ids, 8, 2).table
    assert (table[2] > 0).sum() == table.shape[1] == 12


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 100, 1024, 8192])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (8, 2), (512, 10), (2000, 4)])
def test_real_shapes(device, tokens, experts, top_k):
    ids = torch.rand(tokens, experts).topk(top_k).indices.to(device, torch.int32)
    assert_grouped(ids, experts, 64)
    assert_grouped(ids, experts, 272, unit=16)
