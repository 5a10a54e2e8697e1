import time

import pytest
import torch

from tritonllm.kernels.runtime.registry import REFERENCES
from tritonllm.kernels.speculative import clock
from tritonllm.kernels.speculative.clock import note_time


def test_the_reference_adds_what_lies_between():
    plain, times = REFERENCES[clock._note_time], torch.zeros(2, dtype=torch.int64)
    for n in (1, 2):
        before = time.perf_counter_ns()
        plain(times, False)
        assert before <= int(times[0]) <= time.perf_counter_ns()
        time.sleep(0.002)
        plain(times, True)
        assert int(times[1]) >= n * 2_000_000


@pytest.mark.parametrize("times", [torch.zeros(3, dtype=torch.int64), torch.zeros(2)])
def test_wrong_arguments_are_named(times):
    with pytest.raises(ValueError, match="times"):
        note_time(times, end=False)


@pytest.mark.gpu
def test_a_captured_part_is_timed():
    """Of work that takes longer and longer, beside the host's view of it."""
    device = torch.device("cuda")
    times, x = torch.zeros(2, dtype=torch.int64, device=device), torch.randn(4096, 4096, device=device)
    totals = []
    for products in (1, 16):

        def work(products=products):
            note_time(times, end=False)
            for _ in range(products):
                torch.mm(x, x)
            note_time(times, end=True)

        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        times.zero_()
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        totals.append(int(times[1]))
        assert 0 < totals[-1] < time.perf_counter_ns() - begin
    assert totals[1] > 4 * totals[0]
