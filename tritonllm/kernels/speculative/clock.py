"""How long a part of a captured step takes, by the GPU's own clock.

A step that verifies drafts makes them in the same CUDA graph, so the host cannot time them. Two launches of one thread
each add the nanoseconds between them to a total, which the host reads with the step's results.
"""

import time

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from tritonllm.kernels.runtime.checks import check_tensor
from tritonllm.kernels.runtime.registry import register_op


@triton.jit
def _note_time_kernel(times_ptr, END: tl.constexpr):
    now = globaltimer()
    if END:
        total = tl.load(times_ptr + 1) + now - tl.load(times_ptr)
        tl.store(times_ptr + 1, total)
    else:
        tl.store(times_ptr, now)


def _reference(times: torch.Tensor, end: bool) -> None:
    now = time.perf_counter_ns()
    if end:
        times[1] += now - times[0]
    else:
        times[0] = now


@register_op(mutates=("times",), reference=_reference)
def _note_time(times: torch.Tensor, end: bool) -> None:
    if torch.version.hip is None:  # AMD's GPUs have another clock: there the total stays 0
        _note_time_kernel[(1,)](times, END=end, num_warps=1)


def note_time(times: torch.Tensor, *, end: bool) -> None:
    """Begin or end to measure what is launched between the two calls. Can be captured in a graph.

    Args:
        times: ``[2]`` int64: when it began, and the total, both in nanoseconds.

    Raises:
        ValueError: a wrong shape or dtype.
    """
    check_tensor("times", times, (2,), dtype=torch.int64)
    _note_time(times, end)
