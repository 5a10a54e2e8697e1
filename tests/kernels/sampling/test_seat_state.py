import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.kernels import advance_seats, advance_seats_ref
from tritonllm.kernels.sampling.seat_state import Decodes, SamplingRows, SeatState, StepRows

DTYPES = {"top_k": torch.int32, "seeds": torch.int64, "steps": torch.int64}


def sampling_rows(count, generator, device):
    """Random parameters; negative steps, as of seats."""
    return SamplingRows(
        *(
            -torch.randint(0, 99, (count,), generator=generator).to(device, DTYPES.get(name, torch.float32))
            for name in SamplingRows._fields
        )
    )


def make_case(seats, rows, decodes, padding, before, most, block_size, seed, device):
    """State, inputs and what was drawn. Some rows are known to the host, some only to the device."""
    g = torch.Generator().manual_seed(seed)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, generator=g)  # noqa: E731
    rows, before = min(rows, seats), min(before, seats)
    used = max(0, rows - padding)
    decodes = min(decodes, used)
    width = 6
    row_seats = torch.full((seats,), -1)
    row_seats[:before] = torch.randperm(seats, generator=g)[:before]
    row_seats[integers(0, 2, seats).bool()] = -1
    positions = integers(0, width * block_size - most - 1, seats)
    state = SeatState(*(t.to(device, torch.int32) for t in (integers(0, 999, seats), positions, row_seats)))
    mine = torch.full((rows,), -1)
    mine[:used] = torch.randperm(seats, generator=g)[:used]
    starts = torch.full((rows,), -1)
    known = integers(0, 2, rows).bool() | (torch.arange(rows) >= decodes)
    starts[known] = integers(0, width * block_size - 1, rows)[known]
    room = decodes + 2  # of decodes, with padding behind them
    tokens = torch.arange(rows) + (torch.arange(rows) >= decodes) * 5
    tokens[used:] = 0
    step = StepRows(mine.to(device, torch.int32), starts.to(device, torch.int32), tokens.to(device))
    ids = torch.where(integers(0, 2, room).bool(), integers(0, 999, room), -1)
    ids[decodes:] = 0
    tables = torch.randperm(room * width, generator=g).view(room, width)
    batch = Decodes(
        ids.to(device, torch.int32),
        *(torch.full((room,), -7, dtype=dtype, device=device) for dtype in (torch.int64, torch.int64, torch.int32)),
        tables.to(device, torch.int32),
    )
    parameters, out = sampling_rows(seats, g, device), sampling_rows(rows, g, device)
    drawn = integers(0, 2**31, max(1, before), most).to(device)
    counts = integers(1, most + 1, max(1, before)).to(device, torch.int32)
    limits = integers(1, width * block_size, rows).to(device, torch.int32)
    return (state, parameters, step, out, batch, drawn), counts, limits


def copy_of(arguments):
    *tuples, drawn = arguments
    return (*(type(t)(*(x.clone() for x in t)) for t in tuples), drawn)


def assert_same(found, expected):
    for mine, wanted in zip(found[:-1], expected[:-1], strict=True):
        for name, x, y in zip(mine._fields, mine, wanted, strict=True):
            assert torch.equal(x, y), f"{type(mine).__name__}.{name}"


@given(
    sizes=st.tuples(*(st.integers(low, 40) for low in (1, 0, 0, 0, 0))),
    most=st.integers(1, 4),
    block_size=st.integers(1, 16),
    optional=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 999),
)
def test_matches_reference(device, sizes, most, block_size, optional, seed):
    arguments, counts, limits = make_case(*sizes, most, block_size, seed, device)
    options = {"block_size": block_size, "counts": counts if optional[0] else None}
    options["limits"] = limits if optional[1] else None
    expected = copy_of(arguments)
    advance_seats_ref(*expected, **options)
    advance_seats(*arguments, **options)
    assert_same(arguments, expected)


def test_the_same_step_again_changes_nothing(device):
    """A graph's rehearsal runs it before its first replay, and draws what nobody wants."""
    arguments, _, _ = make_case(20, 12, 8, 2, 15, 1, 4, 0, device)
    advance_seats(*arguments, block_size=4)
    expected = copy_of(arguments)
    advance_seats(*arguments[:-1], torch.full_like(arguments[-1], 77), block_size=4)
    seats = expected[2].seats[expected[2].seats >= 0].long()
    expected[0].last_tokens[seats] = arguments[0].last_tokens[seats]  # settled anew with the next step
    assert_same(arguments, expected)


def test_steps_follow_each_other(device):
    """Seat 2 decodes, seat 0 ends its prompt beside it; then both decode, of which seat 2 had accepted two drafts."""
    one = lambda *values, dtype=torch.int32: torch.tensor(values, dtype=dtype, device=device)  # noqa: E731
    state = SeatState(one(0, 0, 0), one(0, 0, 0), one(-1, -1, -1))
    parameters = SamplingRows(
        one(0.5, 0, 1, dtype=torch.float32), one(3, 0, 7), *(one(1, 1, 1, dtype=torch.float32) for _ in "pp"),
        one(10, 11, 12, dtype=torch.int64), one(-4, 0, -2, dtype=torch.int64),
    )  # fmt: skip
    out = SamplingRows(*(t[:2].clone() for t in parameters))
    empty = lambda n: [one(*[0] * n, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.int32)]  # noqa: E731
    tables = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32, device=device)
    first = Decodes(one(9), *empty(1), tables[:1])
    rows = StepRows(one(2, 0), one(2, 3), one(0, 4, dtype=torch.int64))
    drawn = torch.tensor([[1, 2, 3], [4, -1, -1]], device=device)
    advance_seats(state, parameters, rows, out, first, drawn, block_size=4)
    assert (first.ids.tolist(), first.positions.tolist(), first.slots.tolist(), first.lengths.tolist()) == (
        *([9], [2], [22], [3]),
    )
    assert (out.steps.tolist(), out.seeds.tolist(), out.top_k.tolist()) == ([1, 0], [12, 10], [7, 3])
    second = Decodes(one(-1, -1), *empty(2), tables)
    rows = StepRows(one(0, 2), one(-1, -1), one(0, 1, dtype=torch.int64))
    advance_seats(state, parameters, rows, out, second, drawn, block_size=4, counts=one(3, 1))
    assert second.ids.tolist() == [4, 3]
    assert second.positions.tolist() == [4, 5]  # of seat 2: 2, and three new tokens
    assert second.slots.tolist() == [24, 33]
    assert (out.steps.tolist(), state.positions.tolist(), state.row_seats.tolist()) == ([1, 4], [4, 0, 5], [0, 2, -1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drawn": torch.zeros(3)}, "drawn must be torch.int64"),
        ({"drawn": torch.zeros(9, 1).long()}, "drawn must have at most 8 rows"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"counts": torch.zeros(3)}, "counts must"),
        ({"limits": torch.zeros(3).int()}, "limits must"),
    ],
)
def test_bad_arguments(device, change, message):
    arguments, _, _ = make_case(8, 4, 2, 0, 8, 1, 4, 0, device)
    options = {"block_size": 4, **change}
    drawn = options.pop("drawn", arguments[-1])
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with pytest.raises(ValueError, match=message):
        advance_seats(*arguments[:-1], drawn.to(device), **options)
