"""Where checkpoint tensors go: writing against a row-by-row reference, and spellings that share a place."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.models import slots
from tritonllm.models.slots import Slot, parameter_shape, unfilled

NAN = float("nan")


@st.composite
def slots_in_parameters(draw: st.DrawFn) -> tuple[Slot, tuple[int, ...]]:
    """A slot, and the shape of a parameter that has the place and perhaps more rows."""
    kind = draw(st.sampled_from(["plain", "one expert", "all experts"]))
    blocks, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    columns = draw(st.sampled_from([(), (1,), (5,)]))
    experts = draw(st.integers(1, 3))
    start, after = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    transposed = bool(columns) and draw(st.booleans())
    order = draw(st.none() | st.permutations(range(blocks)).map(tuple))
    shape = (blocks * size, *columns)
    parameter = (start + blocks * size + after, *columns)
    if transposed:
        shape = shape[::-1]
    if kind != "plain":
        parameter = (experts, *parameter)
    is_row = kind == "plain" and draw(st.booleans())
    flat = kind == "all experts" and draw(st.booleans())
    leading = (experts,) if kind == "all experts" else (draw(st.integers(1, 2)),) if is_row else ()
    whole = (experts * shape[0], *shape[1:]) if flat else (*leading, *shape)
    slot = Slot(
        parameter="p",
        shape=whole,
        expert=draw(st.integers(0, experts - 1)) if kind == "one expert" else None,
        axis=1 if kind == "all experts" else 0,
        start=start,
        transposed=transposed,
        is_row=is_row,
        flat_experts=experts if flat else 0,
        minus=draw(st.sampled_from([0.0, 1.0])),
        order=order,
    )
    return slot, parameter


def written(slot: Slot, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What ``slot.write`` should leave: row by row."""
    out, tensor = parameter.clone(), by_expert(slot, tensor[0] if slot.is_row else tensor)
    if slot.axis == 1:
        views = list(zip(out, tensor, strict=True))
    else:
        views = [(out if slot.expert is None else out[slot.expert], tensor)]
    for target, source in views:
        rows = source.T if slot.transposed else source
        size = len(rows) // len(slot.order) if slot.order else len(rows)
        for i, row in enumerate(rows):
            block = slot.order[i // size] if slot.order else 0
            target[slot.start + block * size + i % size] = row + slot.minus
    return out


def by_expert(slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor[experts, ...]`` of one with experts one below the other."""
    return torch.stack(tensor.chunk(slot.flat_experts)) if slot.flat_experts else tensor


@given(case=slots_in_parameters(), piece=st.sampled_from([1, 7, slots.PIECE]))
def test_write_and_read(case, piece):
    slot, shape = case
    tensor = torch.arange(1.0, torch.Size(slot.shape).numel() + 1).reshape(slot.shape)
    parameter = torch.full(shape, NAN)
    want = written(slot, parameter, tensor)
    with mock.patch.object(slots, "PIECE", piece):
        slot.write(parameter, tensor)
    assert torch.equal(parameter.nan_to_num(), want.nan_to_num())
    assert torch.equal(slot.read(parameter), tensor[:1].expand(slot.shape) if slot.is_row else tensor)
    place = slot.place(parameter)
    assert place.shape == slot.own_shape and not place.isnan().any()
    assert all(need <= have for need, have in zip(slot.reach(), shape, strict=True))
    assert slot.place(torch.empty(slot.reach())).shape == slot.own_shape


@given(case=slots_in_parameters().filter(lambda case: case[0].axis == 1))
def test_one_expert_of_a_stacked_tensor(case):
    slot, shape = case
    tensor = torch.arange(1.0, torch.Size(slot.shape).numel() + 1).reshape(slot.shape)
    at_once, one_by_one = torch.full(shape, NAN), torch.full(shape, NAN)
    slot.write(at_once, tensor)
    for e, of_expert in enumerate(by_expert(slot, tensor)):
        slot.of_expert(e).write(one_by_one, of_expert)
    assert torch.equal(at_once.nan_to_num(), one_by_one.nan_to_num())


@pytest.mark.parametrize("order", [None, (1, 0)])
def test_write_converts(order):
    slot = Slot(parameter="p", shape=(2, 3), order=order)
    parameter = torch.zeros(2, 3, dtype=torch.bfloat16)
    tensor = torch.randn(2, 3)
    slot.write(parameter, tensor)
    assert torch.equal(slot.read(parameter), tensor.bfloat16())


def test_read_is_a_view_unless_rows_are_reordered():
    parameter = torch.zeros(4, 3)
    Slot(parameter="p", shape=(3, 2), start=2, transposed=True).read(parameter).fill_(1.0)
    assert parameter.sum(dim=1).tolist() == [0, 0, 3, 3]
    Slot(parameter="p", shape=(4, 3), order=(1, 0)).read(parameter).fill_(2.0)
    assert parameter.sum() == 6


def test_writes_of_a_large_tensor_are_in_pieces():
    """A change of dtype on the way to a GPU needs a copy on the host: of a piece, not of the tensor."""
    sizes = []
    real = Slot._write_piece

    def record(self: Slot, target: torch.Tensor, source: torch.Tensor) -> None:
        sizes.append(source.numel())
        real(self, target, source)

    cases = [
        Slot(parameter="p", shape=(12, 10)),
        Slot(parameter="p", shape=(10, 12), transposed=True),
        Slot(parameter="p", shape=(12, 10), order=(2, 0, 1)),
        Slot(parameter="p", shape=(3, 10, 4), axis=1, transposed=True, order=(3, 1, 0, 2)),
    ]
    with mock.patch.object(slots, "PIECE", 40), mock.patch.object(Slot, "_write_piece", record):
        for slot in cases:
            sizes.clear()
            slot.write(torch.zeros(slot.own_shape), torch.zeros(slot.shape))
            assert sum(sizes) == 120 and max(sizes) <= 40


EXPERTS = 3


def two_spellings() -> dict[str, Slot]:
    """Experts one by one, then stacked; and a norm."""
    one_by_one = {
        f"experts.{e}.{name}": Slot(parameter="gate_up", shape=(2, 4), expert=e, start=2 * i)
        for e in range(EXPERTS)
        for i, name in enumerate(("gate", "up"))
    }
    stacked = {
        "experts.gate_up": Slot(parameter="gate_up", shape=(EXPERTS, 4, 4), axis=1),
        "norm": Slot(parameter="norm", shape=(4,)),
    }
    return {**one_by_one, **stacked}


def left(*present: str) -> list[str]:
    return unfilled(two_spellings(), {name: name for name in present})


def test_nothing_is_left():
    names = [f"experts.{e}.{name}" for e in range(EXPERTS) for name in ("gate", "up")]
    assert left("norm", "experts.gate_up") == []
    assert left("norm", *names) == []


def test_first_spelling():
    slots_ = two_spellings()
    one_by_one = [name for name in slots_ if name != "experts.gate_up"]
    assert left() == one_by_one
    reverse = dict(reversed(slots_.items()))
    assert unfilled(reverse, {}) == ["norm", "experts.gate_up"]


def test_the_spelling_that_is_there_is_completed():
    reverse = dict(reversed(two_spellings().items()))  # stacked first
    present = {name: name for name in reverse if name not in ("experts.gate_up", "experts.1.up")}
    assert unfilled(reverse, present) == ["experts.1.up"]


def test_no_spelling_completes_what_is_there():
    mixed = {
        "all": Slot(parameter="p", shape=(4,)),
        "first": Slot(parameter="p", shape=(3,)),
        "last": Slot(parameter="p", shape=(3,), start=1),
    }
    assert unfilled(mixed, {"first": "first"}) == ["all"]


def test_two_spellings_of_one_place():
    with pytest.raises(ValueError, match=r"tensors h\.experts\.1\.up and h\.stacked hold the same weights"):
        unfilled(two_spellings(), {"experts.1.up": "h.experts.1.up", "experts.gate_up": "h.stacked"})


def test_a_map_with_a_hole():
    hole = {"a": Slot(parameter="p", shape=(2,)), "c": Slot(parameter="p", shape=(2,), start=4)}
    with pytest.raises(ValueError, match="no tensor for a part of p"):
        unfilled(hole, {})


def test_parameter_shape():
    slots_ = two_spellings()
    assert parameter_shape([slots_["experts.gate_up"]]) == (3, 4, 4)
    assert parameter_shape(slot for slot in slots_.values() if slot.expert is not None) == (3, 4, 4)
    assert parameter_shape([slots_["experts.0.gate"]]) == (1, 2, 4)


def test_a_number_is_a_row_of_a_parameter():
    """A tensor without dimensions, as the constants of Apertus' activation are."""
    parameter, slot = torch.zeros(3), Slot(parameter="p", shape=(), start=1)
    slot.write(parameter, torch.tensor(0.5))
    assert parameter.tolist() == [0.0, 0.5, 0.0]
    assert slot.read(parameter).shape == () and float(slot.read(parameter)) == 0.5
    assert slot.own_shape == (1,) and slot.reach() == (2,)
