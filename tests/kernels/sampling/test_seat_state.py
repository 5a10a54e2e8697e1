import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels import advance_seats, advance_seats_ref
from tritonllm.kernels.sampling.seats import Decodes, SeatState, StepRows, Verdict

DTYPES = {"top_k": torch.int32, "seeds": torch.int64, "steps": torch.int64}


def sampling_rows(count, generator, device):
    """Random parameters; negative steps, as of seats."""
    return SamplingRows(
        *(
            -torch.randint(0, 99, (count,), generator=generator).to(device, DTYPES.get(name, torch.float32))
            for name in SamplingRows._fields
        )
    )


def make_case(seats, rows, decodes, padding, before, most, each, block_tokens, seed, device):
    """State, inputs and what was drawn. Some rows are known to the host, some only to the device. ``each`` tokens of a
    decode, ``most`` of a row that was verified."""
    g = torch.Generator().manual_seed(seed)
    integers = lambda low, high, *shape: torch.randint(low, high, shape, generator=g)  # noqa: E731
    rows, before = min(rows, seats), min(before, seats)
    used = max(0, rows - padding)
    decodes = min(decodes, used)
    width = 10
    row_seats = torch.full((seats,), -1)
    row_seats[:before] = torch.randperm(seats, generator=g)[:before]
    row_seats[integers(0, 2, seats).bool()] = -1
    furthest = width * block_tokens - each
    positions = integers(0, max(1, furthest - most), seats)
    state = SeatState(*(t.to(device, torch.int32) for t in (integers(0, 999, seats), positions, row_seats)))
    mine = torch.full((rows,), -1)
    mine[:used] = torch.randperm(seats, generator=g)[:used]
    starts = torch.full((rows,), -1)
    known = integers(0, 2, rows).bool() | (torch.arange(rows) >= decodes)
    starts[known] = integers(0, furthest, rows)[known]
    room = decodes + 2  # of decodes, with padding behind them
    tokens = torch.where(torch.arange(rows) < decodes, torch.arange(rows) * each, room * each + torch.arange(rows))
    tokens[used:] = 0
    step = StepRows(mine.to(device, torch.int32), starts.to(device, torch.int32), tokens.to(device))
    ids = torch.where(integers(0, 2, room).bool(), integers(0, 999, room), -1)
    ids[decodes:] = 0
    ids = torch.cat([ids[:, None], integers(-1, 999, room, each - 1)], 1).flatten()
    tables = torch.randperm(room * width, generator=g).view(room, width)
    places = (torch.full((room * each,), -7, dtype=torch.int64, device=device) for _ in range(2))
    lengths = torch.full((room,), -7, dtype=torch.int32, device=device)
    batch = Decodes(ids.to(device, torch.int32), *places, lengths, tables.to(device, torch.int32))
    parameters, out = sampling_rows(seats, g, device), sampling_rows(rows, g, device)
    count = max(1, before)
    drawn = integers(0, 2**31, count).to(device)
    verdict = Verdict(integers(0, 2**31, count, most).to(device), integers(-1, most, count).to(device))
    limits = integers(1, furthest, rows).to(device, torch.int32)
    optional = {"verdict": verdict, "limits": limits, "drafts": integers(0, each, rows).to(device, torch.int32)}
    optional["history"] = integers(0, 999, seats, width * block_tokens // 2 + 1).to(device, torch.int32)
    return (state, parameters, step, out, batch, drawn), optional


def copy_of(arguments):
    *tuples, drawn = arguments
    return (*(type(t)(*(x.clone() for x in t)) for t in tuples), drawn)


def copies(optional):
    return {n: Verdict(*(t.clone() for t in x)) if n == "verdict" else x.clone() for n, x in optional.items()}


def assert_same(found, expected):
    for mine, wanted in zip(found[:-1], expected[:-1], strict=True):
        for name, x, y in zip(mine._fields, mine, wanted, strict=True):
            assert torch.equal(x, y), f"{type(mine).__name__}.{name}"


@given(
    sizes=st.tuples(*(st.integers(low, 40) for low in (1, 0, 0, 0, 0))),
    most=st.integers(1, 4),
    each=st.integers(1, 4),
    block_tokens=st.integers(1, 16),
    given_=st.sets(st.sampled_from(["verdict", "limits", "drafts", "history"])),
    seed=st.integers(0, 999),
)
def test_matches_reference(device, sizes, most, each, block_tokens, given_, seed):
    arguments, optional = make_case(*sizes, most, each, block_tokens, seed, device)
    if "limits" not in given_:
        given_ -= {"drafts"}
    optional = {name: value for name, value in optional.items() if name in given_}
    expected, wanted = copy_of(arguments), copies(optional)
    advance_seats_ref(*expected, **wanted, block_tokens=block_tokens)
    advance_seats(*arguments, **optional, block_tokens=block_tokens)
    assert_same(arguments, expected)
    for name in given_ - {"verdict"}:
        assert torch.equal(optional[name], wanted[name]), name
    if "verdict" in given_:
        assert torch.equal(optional["verdict"].accepted, wanted["verdict"].accepted)


@pytest.mark.parametrize("each", [1, 3])
def test_the_same_step_again_changes_nothing(device, each):
    """A graph's rehearsal runs it before its first replay, and draws what nobody wants."""
    arguments, optional = make_case(20, 12, 8, 2, 15, 1, each, 4, 0, device)
    options = {name: optional[name] for name in ("limits", "drafts")}
    advance_seats(*arguments, **options, block_tokens=4)
    expected, drafts = copy_of(arguments), options["drafts"].clone()
    advance_seats(*arguments[:-1], torch.full_like(arguments[-1], 77), **options, block_tokens=4)
    seats = expected[2].seats[expected[2].seats >= 0].long()
    expected[0].last_tokens[seats] = arguments[0].last_tokens[seats]  # settled anew with the next step
    assert_same(arguments, expected)
    assert torch.equal(options["drafts"], drafts)


def test_steps_follow_each_other(device):
    """Seat 2 decodes, seat 0 ends its prompt beside it; then both verify two drafts, of which seat 2 accepts both; then
    they decode again."""
    one = lambda *values, dtype=torch.int32: torch.tensor(values, dtype=dtype, device=device)  # noqa: E731
    state = SeatState(one(0, 0, 0), one(0, 0, 0), one(-1, -1, -1))
    parameters = SamplingRows(
        one(0.5, 0, 1, dtype=torch.float32), one(3, 0, 7), *(one(1, 1, 1, dtype=torch.float32) for _ in "pp"),
        one(10, 11, 12, dtype=torch.int64), one(-4, 0, -2, dtype=torch.int64),
    )  # fmt: skip
    out = SamplingRows(*(t[:2].clone() for t in parameters))
    places = lambda *sizes: [one(*[0] * n, dtype=torch.int64) for n in sizes]  # noqa: E731
    tables = torch.tensor([[5, 6], [7, 8]], dtype=torch.int32, device=device)
    drawn, history = one(0, 0, dtype=torch.int64), torch.zeros(3, 6, dtype=torch.int32, device=device)
    verdict = Verdict(torch.zeros(2, 3, dtype=torch.int64, device=device), one(-1, -1, dtype=torch.int64))
    options = {"block_tokens": 4, "verdict": verdict, "history": history}
    first = Decodes(one(9), *places(1, 1), one(0), tables[:1])
    rows = StepRows(one(2, 0), one(2, 3), one(0, 4, dtype=torch.int64))
    advance_seats(state, parameters, rows, out, first, drawn, **options, limits=one(7, 7))
    assert (first.ids.tolist(), first.positions.tolist(), first.slots.tolist(), first.lengths.tolist()) == (
        *([9], [2], [22], [3]),
    )
    assert (out.steps.tolist(), out.seeds.tolist(), out.top_k.tolist()) == ([1, 0], [12, 10], [7, 3])
    drawn[:] = one(31, 4)
    second = Decodes(one(-1, -5, -5, -1, -5, -5), *places(6, 6), one(0, 0), tables)
    rows = StepRows(one(0, 2), one(-1, -1), one(0, 3, dtype=torch.int64))
    drafts = one(2, 2)
    advance_seats(state, parameters, rows, out, second, drawn, **options, limits=one(6, 9), drafts=drafts)
    assert second.ids.tolist() == [4, -5, -5, 31, -5, -5]
    assert second.positions.tolist() == [4, 5, 5, 3, 4, 5]  # of seat 0 there is room for one draft
    assert second.slots.tolist() == [24, 25, -1, 31, 32, 33]
    assert (second.lengths.tolist(), drafts.tolist()) == ([7, 6], [1, 2])
    assert history.tolist() == [[0, 0, 0, 0, 4, 0], [0] * 6, [0, 0, 0, 31, 0, 0]]
    verdict.ids[:], verdict.accepted[:] = one(71, -1, -1), one(0, 2)
    verdict.ids[1] = one(81, 82, 83)
    third = Decodes(one(-1, -1), *places(2, 2), one(0, 0), tables)
    rows = StepRows(one(0, 2), one(-1, -1), one(0, 1, dtype=torch.int64))
    advance_seats(state, parameters, rows, out, third, drawn, **options, limits=one(6, 6))
    assert third.ids.tolist() == [71, 83]
    assert third.positions.tolist() == [5, 5]  # seat 2 is at 6, beyond its limit
    assert (third.slots.tolist(), third.lengths.tolist()) == ([25, -1], [6, 6])
    assert (out.steps.tolist(), state.positions.tolist(), state.row_seats.tolist()) == ([2, 5], [5, 0, 6], [0, 2, -1])
    assert history.tolist() == [[0, 0, 0, 0, 4, 71], [0] * 6, [0, 0, 0, 31, 81, 82]]
    assert verdict.accepted.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drawn": torch.zeros(3)}, "drawn must be torch.int64"),
        ({"drawn": torch.zeros(9).long()}, "drawn must have at most 8 rows"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"limits": torch.zeros(3).int()}, "limits must"),
        ({"drafts": torch.zeros(3).int()}, "drafts must"),
        ({"history": torch.zeros(3, 4).int()}, "history must"),
    ],
)
def test_bad_arguments(device, change, message):
    arguments, _ = make_case(8, 4, 2, 0, 8, 1, 1, 4, 0, device)
    options = {"block_tokens": 4, **change}
    drawn = options.pop("drawn", arguments[-1])
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with pytest.raises(ValueError, match=message):
        advance_seats(*arguments[:-1], drawn.to(device), **options)


def test_bad_verdicts_and_tokens(device):
    arguments, optional = make_case(8, 4, 2, 0, 8, 3, 1, 4, 0, device)
    ids, accepted = optional["verdict"]
    for verdict, message in (
        (Verdict(ids[:3], accepted), "verdict.ids must have shape"),
        (Verdict(ids.t().contiguous().t(), accepted), "verdict.ids must be contiguous"),
        (Verdict(ids, accepted.int()), "verdict.accepted must be torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            advance_seats(*arguments, verdict=verdict, block_tokens=4)
    *front, decodes, drawn = arguments
    uneven = decodes._replace(ids=torch.cat([decodes.ids, decodes.ids[:1]]))
    with pytest.raises(ValueError, match="equally many for each of 4 decodes, got 5"):
        advance_seats(*front, uneven, drawn, block_tokens=4)
