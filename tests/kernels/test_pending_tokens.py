import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.kernels import fill_pending_tokens, fill_pending_tokens_ref


@given(n=st.integers(0, 600), seats=st.integers(1, 300), seed=st.integers(0, 99))
def test_matches_reference(device, n, seats, seed):
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, count):
        return torch.randint(low, high, (count,), generator=generator)

    last_tokens = integers(0, 2**31, seats).to(device)
    ids = integers(-1, 4, n).to(device, torch.int32)
    at = integers(0, seats, n).to(device)
    expected = ids.clone()
    fill_pending_tokens_ref(expected, at, last_tokens)
    fill_pending_tokens(ids, at, last_tokens)
    assert torch.equal(ids, expected)
    assert (ids >= 0).all()


def test_seats_of_known_tokens_are_not_read(device):
    """They may lie outside of the table."""
    ids = torch.tensor([5, -1], dtype=torch.int32, device=device)
    fill_pending_tokens(ids, torch.tensor([2**40, 1], device=device), torch.tensor([7, 8], device=device))
    assert ids.tolist() == [5, 8]


@pytest.mark.parametrize(
    ("ids", "seats", "last_tokens", "message"),
    [
        (torch.zeros(2), torch.zeros(2).long(), torch.zeros(3).long(), "ids must be torch.int32"),
        (torch.zeros(2).int(), torch.zeros(3).long(), torch.zeros(3).long(), r"seats must have shape \[2\]"),
        (torch.zeros(2).int(), torch.zeros(2).int(), torch.zeros(3).long(), "seats must be torch.int64"),
        (torch.zeros(2).int(), torch.zeros(2).long(), torch.zeros(3).int(), "last_tokens must be torch.int64"),
    ],
)
def test_bad_arguments(ids, seats, last_tokens, message):
    with pytest.raises(ValueError, match=message):
        fill_pending_tokens(ids, seats, last_tokens)
