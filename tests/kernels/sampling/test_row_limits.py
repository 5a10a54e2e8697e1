"""The limits of all rows in two launches: settled by candidates, searched, or none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import FLOATS
from support.examples import examples
from support.limits import check_limits

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.sampling.common import scan
from tritonllm.kernels.sampling.row_limits import find_row_limits


def check(logits, temperature, top_k, top_p, min_p):
    """In every row that is drawn from, the limits keep what they should."""
    positions, vocab = logits.shape[1:]
    group_max, group_sum = scan(logits, temperature)
    groups = torch.empty_like(group_max, dtype=torch.int32)
    limits = find_row_limits(
        logits, SamplingRows(temperature, top_k, top_p, min_p, None, None), group_max, group_sum, groups
    )
    rows = logits.reshape(-1, vocab)
    parameters = [t.repeat_interleave(positions) for t in (temperature, top_k, top_p, min_p)]
    drawn = (parameters[0] >= 1e-5) & (rows > -torch.inf).any(-1)
    check_limits([t[drawn] for t in limits], rows[drawn], *(t[drawn] for t in parameters))


def make_case(batch, positions, vocab, dtype, seed, device):
    """Sure rows, flat ones and one of -inf; greedy sequences, such with limits of several kinds, and such without."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, positions, vocab, generator=g)
    logits[::2, :, : max(1, vocab // 50)] += 12
    logits[batch // 2, 0] = -torch.inf

    def choose(values, of):
        return torch.tensor(values, dtype=of)[torch.randint(len(values), (batch,), generator=g)].to(device)

    temperature = choose([0.0, 0.5, 1.0, 1.5], torch.float32)
    limits = (
        choose([0, 1, 7, 300], torch.int32),
        choose([1.0, 0.6, 0.97], torch.float32),
        choose([0.0, 0.01], torch.float32),
    )
    return logits.to(device, dtype), temperature, *limits


@settings(max_examples=examples(15))
@given(
    batch=st.integers(1, 3),
    positions=st.integers(1, 2),
    vocab=st.sampled_from([1, 100, 129, 700]),
    dtype=st.sampled_from(FLOATS),
    tile=st.sampled_from([1, 4]),
    seed=st.integers(0, 2**20),
)
def test_limits_of_all_rows(device, batch, positions, vocab, dtype, tile, seed):
    with tuning.override("sample", {"CAPACITY": 512, "TILE": tile, "num_warps": 4}):
        check(*make_case(batch, positions, vocab, dtype, seed, device))


def test_rows_may_lie_apart(device):
    logits, *parameters = make_case(3, 2, 300, torch.float32, 1, device)
    padded = torch.full((3, 4, 512), 99.0, device=device)
    padded[:, ::2, :300] = logits
    check(padded[:, ::2, :300], *parameters)


def test_without_limits_nothing_is_launched(device):
    logits, temperature, *_ = make_case(2, 1, 300, torch.float32, 2, device)
    groups = torch.empty(2, 3, device=device)
    assert find_row_limits(logits, SamplingRows(temperature, *[None] * 5), groups, groups, groups.int()) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_limits_of_a_real_vocabulary(device, dtype):
    check(*make_case(16, 3, 151936, dtype, 3, device))
