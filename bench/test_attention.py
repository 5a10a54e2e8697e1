"""The attention cases under pytest-benchmark: ``pytest bench/test_attention.py -m gpu --benchmark-group-by=group``.

A round is one measurement of many calls in CUDA graphs; `us_per_call` in the extra information is one call's share.
"""

import pytest
import torch

from autotune.timing import Replay
from autotune.verify import compare, prepare, verify
from bench.attention_cases import ROWS
from bench.attention_peers import PEERS, installed
from bench.attention_runner import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BESIDE = [(row, name) for row in ROWS for name in installed() if PEERS[name].takes(row)]


def record(benchmark, ready, verdict, call):
    assert verdict.ok, f"error {verdict.error:.3g} > {verdict.limit:.3g}"
    replay = Replay(call, len(ready.sets))
    benchmark.group = ready.problem.name
    benchmark.pedantic(replay.us, rounds=20, warmup_rounds=2)
    benchmark.extra_info["us_per_call"] = benchmark.stats.stats.median * 1e6 / replay.calls
    benchmark.extra_info["error"] = verdict.error


@pytest.mark.parametrize("problem", dict.fromkeys(CASES), ids=lambda problem: problem.name)
def test_attention(benchmark, problem):
    ready = prepare(problem, torch.device("cuda"))
    verdict = verify(problem, ready.untouched, ready.expected)
    record(benchmark, ready, verdict, lambda i: problem.run(ready.sets[i]))


@pytest.mark.parametrize(("problem", "name"), BESIDE, ids=[f"{row.name} {name}" for row, name in BESIDE])
def test_peer(benchmark, problem, name):
    ready = prepare(problem, torch.device("cuda"))
    try:
        call = PEERS[name].prepare(problem, ready.sets)
        outputs = call(0)
    except RuntimeError as reason:
        pytest.skip(f"{name} cannot do this: {reason}")
    record(benchmark, ready, compare(problem, outputs, ready.expected), call)
