import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, with_row_padding

from tritonllm.kernels import apply_token_bitmask, apply_token_bitmask_ref


def random_mask(rows, vocab):
    return torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), dtype=torch.int64).to(torch.int32)


@given(
    batch=st.integers(0, 5),
    vocab=st.sampled_from([1, 31, 32, 33, 320, 2048, 2049, 5000]),
    rows=st.lists(st.integers(-1, 6), max_size=5, unique=True),
    dtype=st.sampled_from(FLOATS),
    padding=st.integers(0, 3),
)
def test_matches_reference(device, batch, vocab, rows, dtype, padding):
    logits = with_row_padding(torch.randn(batch, vocab).to(device, dtype), padding)
    at = torch.tensor(rows, dtype=torch.int32, device=device)
    mask = random_mask(len(rows), vocab).to(device)
    expected = logits.clone()
    apply_token_bitmask_ref(expected, at, mask)
    apply_token_bitmask(logits, at, mask)
    assert torch.equal(logits, expected)


def test_reference_token_by_token(device):
    logits, mask = torch.randn(3, 70, device=device), random_mask(1, 70).to(device)
    expected = logits.clone()
    for token in range(70):
        if not mask[0, token // 32].item() >> (token % 32) & 1:
            expected[2, token] = -torch.inf
    apply_token_bitmask_ref(logits, torch.tensor([2], dtype=torch.int32, device=device), mask)
    assert torch.equal(logits, expected)


def test_nan_is_banned_too(device):
    logits = torch.full((1, 40), float("nan"), device=device)
    mask = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    apply_token_bitmask(logits, torch.zeros(1, dtype=torch.int32, device=device), mask)
    assert logits[0, 0].isnan() and torch.isneginf(logits[0, 1:]).all()


@pytest.mark.parametrize(
    ("logits", "rows", "bitmask", "names"),
    [
        (torch.zeros(2), [0], (1, 1), "logits must have shape"),
        (torch.zeros(2, 40, dtype=torch.int32), [0], (1, 2), "logits must be torch.float16"),
        (torch.zeros(2, 40), [0], (1, 1), r"bitmask must have shape \[1, 2\]"),
        (torch.zeros(2, 40), [0, 1], (1, 2), r"bitmask must have shape \[2, 2\]"),
    ],
)
def test_bad_arguments(logits, rows, bitmask, names):
    with pytest.raises(ValueError, match=names):
        apply_token_bitmask(logits, torch.tensor(rows, dtype=torch.int32), torch.zeros(bitmask, dtype=torch.int32))


def test_bad_dtypes():
    logits, rows, mask = torch.zeros(1, 32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rows must be torch\.int32"):
        apply_token_bitmask(logits, rows.long(), mask)
    with pytest.raises(ValueError, match=r"bitmask must be torch\.int32"):
        apply_token_bitmask(logits, rows, mask.long())
    with pytest.raises(ValueError, match="bitmask must be contiguous"):
        apply_token_bitmask(torch.zeros(1, 64), rows, torch.zeros(1, 4, dtype=torch.int32)[:, ::2])


def test_operator(device):
    args = torch.randn(3, 70, device=device), torch.tensor([2], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.tritonllm.apply_token_bitmask.default, (*args, random_mask(1, 70).to(device)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_real_shapes(device, rows):
    logits, mask = torch.randn(256, 151936, device=device), random_mask(rows, 151936).to(device)
    at, expected = torch.randperm(256, device=device)[:rows].int(), logits.clone()
    apply_token_bitmask_ref(expected, at, mask)
    apply_token_bitmask(logits, at, mask)
    assert torch.equal(logits, expected)
