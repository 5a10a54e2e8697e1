"""The kernel cases under pytest-benchmark: ``pytest bench -m gpu --benchmark-group-by=group``.

A round is one measurement of many calls in CUDA graphs; `us_per_call` in the extra information is one call's share.
"""

import pytest
import torch

from autotune.timing import Replay
from autotune.verify import prepare, verify
from bench.cases import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel(benchmark, case):
    problem = case.problem
    ready = prepare(problem, torch.device("cuda"))
    verdict = verify(problem, ready.untouched, ready.expected)
    assert verdict.ok, f"output {verdict.output}: error {verdict.error:.3g} > {verdict.limit:.3g}"
    replay = Replay(lambda i: problem.run(ready.sets[i]), len(ready.sets))

    benchmark.group = case.group
    benchmark.pedantic(replay.us, rounds=20, warmup_rounds=2)
    benchmark.extra_info["us_per_call"] = benchmark.stats.stats.median * 1e6 / replay.calls
    benchmark.extra_info["error"] = verdict.error
