"""Is the result right? Asked before anything is timed.

Every allocation during the checked call is filled with NaN (the largest value for integers), outputs and scratch alike:
what a kernel forgets to write, or reads before it wrote, cannot pass.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autotune.problem import Inputs, Problem, Work, make_sets, without_effects
from autotune.timing import sets_needed
from tritonllm.testing import relative_error


@dataclass(frozen=True)
class Verdict:
    """An output's error, the limit for it, and which output it is."""

    error: float
    limit: float
    output: int

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Inside, ``torch.empty`` and its kin return NaN, or the largest integer."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@dataclass(frozen=True)
class Prepared:
    """A problem on a device, ready to be checked and timed.

    Attributes:
        problem: what was prepared.
        sets: inputs to time with, enough to leave the cache behind; a problem that works in place changes them.
        untouched: the inputs of the first set, to check with; they never change.
        expected: the reference's results for those.
        work: the least work for them.
    """

    problem: Problem
    sets: list[Inputs]
    untouched: Inputs
    expected: Sequence[torch.Tensor]
    work: Work


def prepare(problem: Problem, device: torch.device) -> Prepared:
    first = make_sets(problem, device, 1)[0]
    work = problem.work(first)
    expected = problem.reference(first)
    del first
    sets = make_sets(problem, device, sets_needed(work.bytes))
    return Prepared(problem, sets, without_effects(problem, sets[0]), expected, work)


def verify(problem: Problem, x: Inputs, expected: Sequence[torch.Tensor]) -> Verdict:
    """Run the problem once on ``x``, which stays as it is, and compare with what is expected."""
    fresh = without_effects(problem, x)
    with poisoned_allocations():
        outputs = problem.run(fresh)
    return compare(problem, outputs, expected)


def compare(problem: Problem, outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Verdict:
    """The verdict on the output that is furthest beyond its limit, or least within."""
    verdicts = []
    for index, (out, ref) in enumerate(zip(outputs, expected, strict=True)):
        if out.dtype.is_floating_point:
            error, limit = relative_error(out, ref), problem.error_allowed(out.dtype)
        else:
            error, limit = float((out != ref).double().mean()), problem.mismatches_allowed()
        verdicts.append(Verdict(error, limit, index))
    return max(verdicts, key=lambda verdict: verdict.error - verdict.limit)
