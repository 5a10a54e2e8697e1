import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import with_row_padding

from tritonllm.kernels import count_experts, count_experts_ref

dtypes = st.sampled_from([torch.int32, torch.int64])


@given(
    tokens=st.integers(0, 90),
    top_k=st.integers(1, 8),
    experts=st.integers(1, 40),
    dtype=dtypes,
    of_marks=dtypes,
    padding=st.integers(0, 3),
    seed=st.integers(0, 100),
)
def test_matches_reference_and_a_plain_count(device, tokens, top_k, experts, dtype, of_marks, padding, seed):
    """Ids out of range included; what is counted is added to what is there."""
    torch.manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (tokens, top_k))
    marks = torch.randint(-2, 3, (tokens,))
    before = torch.randint(2**40, (experts,))
    plain = before.tolist()
    for row, mark in zip(ids.tolist(), marks.tolist(), strict=True):
        for expert in row:
            if mark >= 0 and 0 <= expert < experts:
                plain[expert] += 1
    arguments = with_row_padding(ids.to(device, dtype), padding), marks.to(device, of_marks)
    for count in (count_experts, count_experts_ref):
        counts = before.clone().to(device)
        count(*arguments, counts)
        assert counts.tolist() == plain


def test_many_steps_are_added_up(device):
    ids = torch.tensor([[0, 2], [2, 1], [2, 0]], dtype=torch.int32, device=device)
    counts = torch.zeros(4, dtype=torch.int64, device=device)
    for marks in ([5, 0, -1], [-1, -1, -1], [0, -1, 3]):
        count_experts(ids, torch.tensor(marks, device=device), counts)
    assert counts.tolist() == [3, 1, 4, 0]


IDS, MARKS, COUNTS = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.zeros(4).long()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS.float(), MARKS, COUNTS), "ids must be torch.int32 or torch.int64"),
        ((IDS[0], MARKS, COUNTS), r"ids must have shape \[T, k\]"),
        ((IDS, MARKS[:1], COUNTS), r"marks must have shape \[2\], got \[1\]"),
        ((IDS, MARKS.bool(), COUNTS), "marks must be torch.int32 or torch.int64"),
        ((IDS, MARKS, COUNTS.int()), "counts must be torch.int64"),
        ((IDS, MARKS, COUNTS.to("meta")), "counts must be on cpu"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        count_experts(*arguments)


def test_operator(device):
    op = torch.ops.tritonllm.count_experts.default
    torch.library.opcheck(op, (IDS.to(device), MARKS.to(device), torch.zeros(4, dtype=torch.int64, device=device)))
