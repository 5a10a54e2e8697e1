import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.kernels import fill_pending_tokens, fill_pending_tokens_ref


@given(n=st.integers(0, 600), rows=st.integers(1, 300), seed=st.integers(0, 99))
def test_matches_reference(device, n, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 2**31, (rows,), generator=generator).to(device)
    ids = torch.randint(-rows, 4, (n,), generator=generator).to(device, torch.int32)
    expected = ids.clone()
    fill_pending_tokens_ref(expected, drawn)
    fill_pending_tokens(ids, drawn)
    assert torch.equal(ids, expected)
    assert (ids >= 0).all()


def test_known_tokens_stay(device):
    ids = torch.tensor([5, -1, 0, -3], dtype=torch.int32, device=device)
    fill_pending_tokens(ids, torch.tensor([7, 8, 9], device=device))
    assert ids.tolist() == [5, 7, 0, 9]


@pytest.mark.parametrize(
    ("ids", "drawn", "message"),
    [
        (torch.zeros(2), torch.zeros(3).long(), "ids must be torch.int32"),
        (torch.zeros(2, 1).int(), torch.zeros(3).long(), r"ids must have shape \[N\]"),
        (torch.zeros(2).int(), torch.zeros(3).int(), "drawn must be torch.int64"),
    ],
)
def test_bad_arguments(ids, drawn, message):
    with pytest.raises(ValueError, match=message):
        fill_pending_tokens(ids, drawn)
