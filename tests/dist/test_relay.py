"""Sums in pieces: right in any order in which products, copies and numbers come, with memory that is used again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.couriers import relays
from support.turns import StuckError, Turns

from tritonllm.dist import relay
from tritonllm.dist.relay import PIECES, Shape
from tritonllm.kernels.collective import AddedNorm, all_reduce_ref

COLUMNS, DTYPE = 4, torch.float32


def whole_numbers(generator, *shape):
    return torch.randint(-8, 9, shape, generator=generator).to(DTYPE)


def run_ranks(seed, size, steps, work=None):
    """Each rank sums up rows of ``steps``, one after the other, and reads all of each sum before the next one."""
    generator = torch.Generator().manual_seed(seed)
    turns = Turns(seed)
    shape = Shape(max(steps), COLUMNS, DTYPE, size)
    ends = relays(turns, shape)
    parts = [whole_numbers(generator, size, rows, COLUMNS) for rows in steps]
    streams = [whole_numbers(generator, rows, COLUMNS) for rows in steps]
    weight = torch.ones(COLUMNS)
    expected = [AddedNorm(stream.clone(), weight) for stream in streams]
    norms = [all_reduce_ref(list(part), added=added) for part, added in zip(parts, expected, strict=True)]

    def rank_of(end):
        def run():
            for of_all, stream, added, norm in zip(parts, streams, expected, norms, strict=True):
                own, found = stream.clone(), torch.full_like(stream, torch.nan)
                total = end.begin(AddedNorm(own, weight))
                sent = []
                for piece, rows in enumerate(total.pieces):
                    turns.take()
                    sent.append(of_all[end.rank][rows].clone())
                    total.put(piece, sent[-1])
                for rows in total:
                    turns.take()
                    found[rows] = total.normed[rows]
                for part in sent:  # its memory is another tensor's now
                    part.fill_(torch.nan)
                torch.testing.assert_close(found, norm)
                mine = ~total.others(None, own.device)
                assert torch.equal(own[mine], added.residual[mine])
                assert torch.equal(own[~mine], stream[~mine])
            end.courier.end()

        return run

    for end in ends:
        turns.start(rank_of(end))
    turns.run()
    return ends


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 4),
    steps=st.lists(st.integers(1, 200), min_size=1, max_size=4),
)
def test_all_ranks_have_the_sums_whatever_comes_first(seed, size, steps):
    run_ranks(seed, size, steps)


@given(rows=st.integers(0, 5000), size=st.integers(2, 8))
def test_each_row_has_one_owner_and_room(rows, size):
    shape = Shape(5000, COLUMNS, DTYPE, size)
    memory = torch.zeros(shape.nbytes, dtype=torch.uint8)
    added = AddedNorm(torch.zeros(rows, COLUMNS), torch.ones(COLUMNS))
    owners = torch.zeros(rows, dtype=torch.int64)
    for rank in range(size):
        total = relay.Relay(shape, rank, None, memory).begin(added)
        owners += ~total.others(None, memory.device)
        assert sum(rows.stop - rows.start for rows in total.pieces) == rows
        assert torch.equal(total.others(torch.arange(rows).flip(0), None), total.others(None, memory.device).flip(0))
        for piece in range(PIECES):
            own = total._own(piece, rank)
            assert total.others(None, memory.device)[own].sum() == 0
            assert own.stop - own.start <= shape.own_rows // PIECES
    assert bool((owners == 1).all())


@pytest.mark.parametrize("rows", [2048, 2049, 8192])
@pytest.mark.parametrize("size", range(2, 9))
def test_no_piece_of_many_rows_is_small(rows, size):
    """So that each is multiplied as many rows are."""
    shape = Shape(8192, COLUMNS, DTYPE, size)
    total = relay.Relay(shape, 0, None, torch.zeros(shape.nbytes, dtype=torch.uint8)).begin(
        AddedNorm(torch.zeros(rows, COLUMNS), torch.ones(COLUMNS))
    )
    assert min(piece.stop - piece.start for piece in total.pieces) > 256


def numbers_before_parts(monkeypatch):
    put = relay.PiecedSum.put

    def broken(self, piece, part):
        end = self._relay
        for other in end.others:
            end.courier.tell(other, end.place_of(relay.PARTS, piece, end.rank), self._number)
        put(self, piece, part)

    monkeypatch.setattr(relay.PiecedSum, "put", broken)


def nobody_waits_for_norms(monkeypatch):
    wait = relay.PiecedSum._wait
    broken = lambda self, kind, piece: None if kind == relay.NORMS else wait(self, kind, piece)  # noqa: E731
    monkeypatch.setattr(relay.PiecedSum, "_wait", broken)


def one_number_for_all(monkeypatch):
    monkeypatch.setattr(relay.Relay, "place_of", lambda self, kind, piece, rank: self.shape.numbers_at)


def pieces_share_their_places(monkeypatch):
    monkeypatch.setattr(relay, "_place_of_parts", lambda share, piece: 0)


@pytest.mark.parametrize(
    "harm", [numbers_before_parts, nobody_waits_for_norms, one_number_for_all, pieces_share_their_places]
)
def test_the_orders_that_are_tried_find_what_is_wrong(harm, monkeypatch):
    harm(monkeypatch)
    with pytest.raises((AssertionError, StuckError)):
        for seed in range(60):
            run_ranks(seed, 3, [40, 200, 40])
