"""The limits themselves: which tokens min-p, top-k and top-p keep, against a sort in float64."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from support.limits import check_limits

from tritonllm.kernels.sampling.candidates import SMALL, limit_candidates
from tritonllm.kernels.sampling.common import clean_ref, keep_ref, load_scan, scale_of, scale_ref, scan
from tritonllm.kernels.sampling.truncation import limits_ref, search_limits


@triton.jit
def _limits_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    max_ptr,
    sum_ptr,
    list_ptr,
    buffer_ptr,
    threshold_ptr,
    last_tie_ptr,
    total_ptr,
    found_ptr,
    V,
    n_groups,
    stride,
    NG: tl.constexpr,
    BUFFER: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
    whole_row = logits_ptr + row * stride, None, 1
    p_list, p_buffer = list_ptr + row * n_groups, buffer_ptr + row * BUFFER
    top, scale = tl.max(b_max), scale_of(tl.load(temperature_ptr + row))
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    found, threshold, last_tie, total, whole = limit_candidates(
        whole_row, p_list, p_buffer, V, n_groups, b_max, b_sum, top, scale, top_k, top_p, min_p, NG, TILE
    )
    if found == 0:
        threshold, last_tie, total = search_limits(
            whole_row, p_list, p_buffer, V, n_groups, b_max, whole, top, scale, top_k, top_p, min_p, NG, CAPACITY, TILE
        )
    tl.store(threshold_ptr + row, threshold)
    tl.store(last_tie_ptr + row, last_tie)
    tl.store(total_ptr + row, total)
    tl.store(found_ptr + row, found)


def kernel_limits(logits, temperature, top_k, top_p, min_p, *, capacity, tile, num_warps=4):
    """The three limits, and how many candidates settled them (0: the row was searched)."""
    rows, vocab = logits.shape
    group_max, group_sum = scan(logits[:, None], temperature)
    n_groups, size = group_max.shape[1], max(capacity, 2 * SMALL.value)
    groups = torch.empty(rows, n_groups, dtype=torch.int32, device=logits.device)
    buffer, threshold, total = (torch.empty(rows, n, device=logits.device) for n in (size, 1, 1))
    last_tie, found = (torch.empty(rows, dtype=torch.int32, device=logits.device) for _ in range(2))
    scratch = (group_max, group_sum, groups, buffer)
    _limits_kernel[(rows,)](
        *(logits, temperature, top_k, top_p, min_p, *scratch, threshold, last_tie, total, found),
        *(vocab, n_groups, logits.stride(0)),
        NG=triton.next_power_of_2(n_groups),
        BUFFER=size,
        CAPACITY=capacity,
        TILE=tile,
        num_warps=num_warps,
    )
    return threshold[:, 0], last_tie, total[:, 0], found


def make_rows(rows, vocab, spread, seed, dtype, device):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * spread
    masked = torch.rand(rows, vocab, generator=g) < 0.2
    masked[torch.arange(rows), torch.randint(vocab, (rows,), generator=g)] = False  # a token at least
    return logits.masked_fill(masked, -torch.inf).to(device, dtype)


@given(
    vocab=st.sampled_from([1, 2, 127, 129, 300, 700]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 8.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    top_k=st.sampled_from([0, -1, 1, 2, 50, 150, 10**6]),
    top_p=st.sampled_from([1.0, 0.99999, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 20.0]),
    capacity=st.sampled_from([16, 1024]),  # 16: passes with pivots first; 1024: straight to the buffer
    tile=st.sampled_from([1, 2, 8]),  # most groups whose tokens become candidates
    seed=st.integers(0, 2**20),
)
def test_limits(device, vocab, spread, dtype, top_k, top_p, min_p, temperature, capacity, tile, seed):
    if spread == 1e30:
        temperature = 1e30
    logits = make_rows(1, vocab, spread, seed, dtype, device)
    params = [torch.tensor([v], device=device) for v in (temperature, top_k, top_p, min_p)]
    params[1] = params[1].int()
    limits = kernel_limits(logits, *params, capacity=capacity, tile=tile)
    check_limits(limits, logits, *params)
    check_limits(limits_ref(clean_ref(logits), scale_ref(params[0]), *params[1:]), logits, *params)


@pytest.mark.parametrize("spread", [1.0, 6.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(90, 1.0), (300, 0.6), (0, 0.35), (0, 0.8)])
@pytest.mark.parametrize(("capacity", "vocab"), [(16, 900), (256, 4000)])  # samples of one group and of two
def test_passes_that_narrow_the_range(device, spread, top_k, top_p, capacity, vocab):
    """Ranges that hold more tokens than the buffer, so that passes with pivots come first."""
    logits = make_rows(3, vocab, spread, 7, torch.float32, device)
    logits = torch.where(logits > 0, logits, logits * 1e-3)  # half of the row close together
    one = torch.ones(3, device=device)
    params = (one, (one * top_k).int(), one * top_p, 0 * one)
    limits = kernel_limits(logits, *params, capacity=capacity, tile=2)
    assert spread > 1 or not limits[3].any(), "these rows should be searched"
    check_limits(limits, logits, *params)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(2, 1.0, 0.0), (4, 0.6, 0.0), (0, 0.9, 0.0), (3, 0.9, 0.01)])
def test_candidates_settle_sure_rows(device, top_k, top_p, min_p):
    """A few likely tokens over a broad background: nothing is searched, and ranks at the edge are exact."""
    logits = make_rows(2, 1000, 1.0, 5, torch.float32, device)
    for row, at in enumerate(torch.tensor([[3, 90, 200, 400, 401], [0, 128, 256, 998, 999]])):
        logits[row, at] = torch.tensor([9.0, 9.5, 9.0, 10.0, 9.0], device=device)
    one = torch.ones(2, device=device)
    params = (one, (one * top_k).int(), one * top_p, one * min_p)
    limits = kernel_limits(logits, *params, capacity=1024, tile=4)
    assert limits[3].all()
    check_limits(limits, logits, *params)


def test_reference_beyond_its_first_sort(device):
    """Nuclei wider than what the reference sorts first, beside narrow ones and rows without limits."""
    logits = make_rows(6, 3000, 1.0, 0, torch.float32, device)
    temperature = torch.ones(6, device=device)
    top_k = torch.tensor([0, 0, 2000, 2000, 5, 0], dtype=torch.int32, device=device)
    top_p = torch.tensor([0.99, 0.1, 1.0, 0.95, 1.0, 1.0], device=device)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.001], device=device)
    limits = limits_ref(clean_ref(logits), scale_ref(temperature), top_k, top_p, min_p)
    check_limits(limits, logits, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("top_k", [1, 3, 200])
def test_ties_go_to_the_lower_ids(device, top_k):
    logits = torch.zeros(1, 400, device=device)
    logits[0, 251] = 1.0
    logits[0, ::2] = -0.0  # equal to 0.0
    one = torch.ones(1, device=device)
    k = torch.tensor([top_k], dtype=torch.int32, device=device)
    threshold, last_tie, _, _ = kernel_limits(logits, one, k, one, 0 * one, capacity=16, tile=2)
    kept = keep_ref(clean_ref(logits), threshold, last_tie)[0].nonzero()[:, 0].tolist()
    assert kept == sorted([251, *range(top_k - 1)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spread", [1e-4, 1.0, 6.0])
@pytest.mark.parametrize("capacity", [1024, 8192])
def test_real_vocabulary(device, dtype, spread, capacity):
    rows = 16
    logits = make_rows(rows, 151936, spread, 1, dtype, device)
    g = torch.Generator().manual_seed(2)

    def choose(values, as_type):
        return torch.tensor(values, dtype=as_type)[torch.randint(len(values), (rows,), generator=g)].to(device)

    temperature = choose([0.3, 0.8, 1.5], torch.float32)
    top_k = choose([0, 1, 50, 2000, 100000], torch.int32)
    top_p = choose([1.0, 0.9, 0.9999], torch.float32)
    min_p = choose([0.0, 0.05], torch.float32)
    params = (temperature, top_k, top_p, min_p)
    limits = kernel_limits(logits, *params, capacity=capacity, tile=capacity // 128, num_warps=capacity // 512)
    check_limits(limits, logits, *params)
