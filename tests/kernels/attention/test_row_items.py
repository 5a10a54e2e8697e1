"""How rows are dealt out to programs where keys are shared out: every share of every tile once."""

from collections import Counter

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from tritonllm.kernels.attention.schedule import count_row_items, find_row_item

BLOCK_M, BLOCK_N = 16, 8


@triton.jit
def _list_items(
    len_ptr, cu_ptr, batch, window, kv_heads, programs, count_ptr, item_ptr, most, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b_lane = tl.arange(0, 16)
    counts = count_row_items(
        b_lane, len_ptr, cu_ptr, batch, window, kv_heads, programs, GROUP, WINDOW, BLOCK_M, BLOCK_N
    )  # fmt: skip
    tl.store(count_ptr, counts[0])
    tl.store(count_ptr + 1, counts[1])
    for item in range(tl.minimum((counts[0] + counts[1]) * kv_heads, most)):
        found = find_row_item(
            b_lane, item, counts, len_ptr, cu_ptr, batch, window, kv_heads, programs, GROUP, WINDOW, BLOCK_M, BLOCK_N
        )  # fmt: skip
        for i in tl.static_range(5):
            tl.store(item_ptr + 5 * item + i, found[i])


def listed(device, new, cached, group, kv_heads, programs, window):
    """(shares of cut tiles, whole tiles) of a head, and (head, sequence, pair, share, of how many) of each item."""
    lens = torch.tensor([n + c for n, c in zip(new, cached, strict=True)], dtype=torch.int32, device=device)
    cu = torch.tensor([0, *new], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    most = kv_heads * sum(-(-n * group // BLOCK_M) for n in new) + programs
    counts = torch.empty(2, dtype=torch.int32, device=device)
    items = torch.full((most, 5), -1, dtype=torch.int32, device=device)
    options = {"GROUP": group, "WINDOW": window > 0, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
    _list_items[(1,)](lens, cu, len(new), window, kv_heads, programs, counts, items, most, **options)
    cut, whole = counts.tolist()
    assert (cut + whole) * kv_heads <= most
    return cut, whole, [tuple(item) for item in items[: (cut + whole) * kv_heads].tolist()]


@settings(max_examples=examples(25), deadline=None)
@given(
    sequences=st.lists(st.tuples(st.just(0) | st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=20),
    group=st.sampled_from([1, 3, 4]),
    kv_heads=st.sampled_from([1, 2, 3]),
    programs=st.sampled_from([1, 7, 20, 60]),
    window=st.sampled_from([0, 50]),
)
def test_every_share_of_every_tile_is_one_item(device, sequences, group, kv_heads, programs, window):
    """More sequences than lanes, empty ones everywhere."""
    new, cached = (list(column) for column in zip(*sequences, strict=True))
    cut, _, items = listed(device, new, cached, group, kv_heads, programs, window)
    shares = {(head, seq, pair): most for head, seq, pair, _, most in items}
    tiles = [(seq, pair) for seq, tokens in enumerate(new) for pair in range(0, tokens * group, BLOCK_M)]
    assert set(shares) == {(head, *tile) for head in range(kv_heads) for tile in tiles}
    assert Counter(item[:4] for item in items) == Counter((*t, i) for t, most in shares.items() for i in range(most))
    assert cut * kv_heads <= programs  # a program has one of them at most, its first item
    for number, (*tile, share, most) in enumerate(items):
        assert (most > 1) == (number < cut * kv_heads)
        assert items[number - share] == (*tile, 0, most)  # neighbours


def test_programs_go_to_tiles_by_their_keys(device):
    """One tile behind many keys, and padding that sees its own: nearly all programs share the first out."""
    _, whole, items = listed(device, [4, 8], [800, 0], group=4, kv_heads=2, programs=20, window=0)
    assert {(seq, most) for _, seq, _, _, most in items} == {(0, 9), (1, 1)}
    assert whole == 2
