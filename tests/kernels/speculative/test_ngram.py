import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tritonllm.kernels import propose_ngrams, propose_ngrams_ref


def run(histories, ends, counts, most, shortest, longest, device, operation=propose_ngrams, **options):
    """Of sequences that sit in order; a length of -1 leaves a row without a seat."""
    table = torch.full((len(histories) + 1, max(map(len, histories)) + 3), 7, dtype=torch.int32)
    for seat, tokens in enumerate(histories):
        table[seat, : len(tokens)] = torch.tensor(tokens)
    seats = torch.where(torch.tensor(ends) < 0, -1, torch.arange(len(ends)))
    ids = torch.full((len(ends), most + 1), -9, dtype=torch.int32, device=device)
    drafts = torch.full((len(ends), most), -9, dtype=torch.int32, device=device)
    columns = (torch.as_tensor(column).to(device, torch.int32) for column in (seats, ends, counts))
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    operation(table.to(device), *columns, ids, drafts, shortest=shortest, longest=longest, **options)
    assert ids[:, 0].tolist() == [-9] * len(ends)
    assert torch.equal(ids[:, 1:], drafts.clamp_min(0))
    return drafts.tolist()


def longest_run(text, tokens, longest):
    """How many of the last tokens stand in ``text``, and where they end there; of equal runs the latest."""
    best = (0, -1)
    for at in range(len(text)):
        length = 0
        while length < min(longest, len(tokens)) and at >= length and text[at - length] == tokens[-1 - length]:
            length += 1
        best = max(best, (length, at))
    return best


def expected(tokens, count, most, shortest, longest, past=(), factor=0.0):
    """The same as a loop."""
    last = len(tokens) - 1
    (length, at), (other, place) = longest_run(tokens[:-1], tokens, longest), longest_run(past[:-1], tokens, longest)
    if max(length, other) < shortest:
        return [-1] * most
    count = min(count, most, int(factor * max(length, other)) if factor else most)
    found = [tokens[at + 1 + i % (last - at)] for i in range(count)]
    if other > length:
        found = [*past[place + 1 : place + 1 + count], -1]
        found = found[: found.index(-1)]
    return found + [-1] * (most - len(found))


@given(
    histories=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4),
    data=st.data(),
    most=st.integers(1, 6),
    lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
)
def test_finds_what_followed(device, histories, data, most, lengths):
    ends = [data.draw(st.sampled_from([len(tokens) - 1, len(tokens) - 1, -1])) for tokens in histories]
    counts = [data.draw(st.integers(0, most)) for _ in histories]
    wanted = [
        expected(tokens, count if end >= 0 else 0, most, *lengths) if end >= 0 and count else [-1] * most
        for tokens, end, count in zip(histories, ends, counts, strict=True)
    ]
    assert run(histories, ends, counts, most, *lengths, device) == wanted
    assert run(histories, ends, counts, most, *lengths, device, propose_ngrams_ref) == wanted


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    past=st.lists(st.integers(-1, 3), min_size=1, max_size=60),
    most=st.integers(1, 5),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 8)).map(sorted),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_finds_what_followed_in_other_texts(device, tokens, past, most, lengths, factor):
    wanted = [expected(tokens, most, most, *lengths, past, factor)]
    options = {"past": torch.tensor(past, dtype=torch.int32), "factor": factor}
    arguments = ([tokens], [len(tokens) - 1], [most], most, *lengths, device)
    assert run(*arguments, **options) == wanted
    assert run(*arguments, propose_ngrams_ref, **options) == wanted


@example(length=1023)
@example(length=1024)
@example(length=2500)
@given(length=st.integers(1000, 2500))
def test_long_histories(device, length):
    """The only earlier place of the last tokens is anywhere, over several tiles."""
    tokens = list(range(10, 10 + length))
    place = length * 7 % (length - 8)
    tokens[-3:] = tokens[place : place + 3]
    assert run([tokens], [length - 1], [4], 4, 2, 5, device) == [tokens[place + 3 : place + 7]]


def test_a_text_that_repeats_itself_goes_on(device):
    assert run([[5, 1, 2, 3, 1, 2, 3]], [6], [5], 5, 1, 4, device) == [[1, 2, 3, 1, 2]]
    assert run([[4, 4]], [1], [3], 3, 1, 4, device) == [[4, 4, 4]]
    assert run([[4]], [0], [3], 3, 1, 4, device) == [[-1, -1, -1]]


def test_beyond_the_history_there_is_nothing(device):
    assert run([[1, 1, 1]], [6], [2], 2, 1, 2, device) == [[-1, -1]]
    assert run([[1, 1, 1]], [2], [2], 2, 1, 2, device) == [[1, 1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shortest": 3}, "shortest and longest must be from 1 to 32"),
        ({"shortest": 0}, "shortest and longest must be from 1 to 32"),
        ({"longest": 33}, "shortest and longest must be from 1 to 32"),
        ({"seats": torch.zeros(3).int()}, "ends must have shape"),
        ({"counts": torch.zeros(2)}, "counts must be torch.int32"),
        ({"ids": torch.zeros(2, 4).int()}, "ids must have shape"),
        ({"drafts": torch.zeros(2, 0).int()}, "drafts must have at least one column|ids must have shape"),
        ({"history": torch.zeros(4, 2).int().t()}, "history must be contiguous"),
        ({"past": torch.zeros(0).int()}, "past must be contiguous, with at least one token"),
        ({"past": torch.zeros(3)}, "past must be torch.int32"),
        ({"factor": -1.0}, "factor must be at least 0"),
    ],
)
def test_bad_arguments(device, change, message):
    arguments = {"history": torch.zeros(2, 9).int(), "ids": torch.zeros(2, 3).int(), "drafts": torch.zeros(2, 2).int()}
    arguments |= {name: torch.zeros(2).int() for name in ("seats", "ends", "counts")}
    arguments |= {"shortest": 1, "longest": 2} | change
    arguments = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    with pytest.raises(ValueError, match=message):
        propose_ngrams(**arguments)
