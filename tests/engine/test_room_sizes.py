"""Sizes of captured steps."""

from itertools import pairwise

import pytest

from tritonllm.engine.step.room_sizes import (
    FREE_ROWS,
    SMALL,
    chunk_capacity,
    decode_sizes,
    graph_sizes,
    late_sizes,
    token_sizes,
)


@pytest.mark.parametrize(("seats", "sizes"), [(1, [1]), (8, [8]), (9, [8, 9]), (256, [8, 64, 256])])
def test_late_sizes(seats, sizes):
    assert late_sizes(seats) == sizes


@pytest.mark.parametrize("seats", [1, 8, 9, 64, 200, 256, 1024])
def test_decode_sizes(seats):
    """A step has at most a third more rows than the next smaller one, and those that sizes are rounded by."""
    for tokens in SMALL:
        sizes = decode_sizes(seats, tokens)
        assert sizes == sorted(set(sizes)) and sizes[-1] == seats
        assert all(n in graph_sizes(seats) for n in sizes)
        for fewer, more in pairwise(sizes):
            assert more + tokens <= max(FREE_ROWS, (fewer + tokens + 31) * 4 / 3), tokens
        assert sizes[0] == min(8, seats) or sizes[0] + tokens < 1.05 * (8 + tokens)
    assert decode_sizes(seats, SMALL[-1] + 1) == [seats]


def test_a_prompt_beside_decodes_costs_few_rows_more():
    assert [decode_sizes(256, tokens) for tokens in (64, 128, 1024)] == [
        [8, 64, 112, 176, 256],
        [8, 80, 160, 256],
        [8, 256],
    ]


@pytest.mark.parametrize(
    ("budget", "host_bound", "sizes"),
    [
        (8192, 18000, [64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192]),
        (8192, 8191, [64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096]),
        (8192, 4095, [64, 128, 192, 256, 384, 512, 768, 1024, 2048]),
        (8192, 0, [64, 128, 192, 256, 384, 512, 768, 1024]),
        (2048, 5000, [64, 128, 192, 256, 384, 512, 768, 1024, 2048]),
        (1024, 5000, [64, 128, 192, 256, 384, 512, 768, 1024]),
        (100, 5000, [64]),
        (16, 5000, []),
    ],
)
def test_token_sizes(budget, host_bound, sizes):
    assert token_sizes(budget, host_bound) == sizes


def test_chunk_capacity():
    assert [chunk_capacity(tokens) for tokens in (1, 64, 128, 256, 1024, 8192)] == [16, 16, 32, 64, 64, 64]
