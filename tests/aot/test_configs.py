"""Every configuration that ships, every default at the sizes that are tuned, and samples of what the tuner may try."""

import json

import pytest
import torch

from autotune import measure, ops
from autotune.__main__ import COMPILER_ENVIRON
from autotune.problem import make_sets
from autotune.search import Compilers, candidates, prepare
from autotune.table import LAUNCH_OPTIONS, kernel_sources
from autotune.worker import Failed, Worker
from tritonllm.kernels.compile.aot import pretend, target_of
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.chip import SHARED_MEMORY

OPS = ops.names()


@pytest.fixture(scope="module")
def compiler():
    return measure.Compiler()


def why_not(compiler, op, problem, key, config, arch=90):
    """None if the problem compiles with this configuration, fits the chip and spills nothing; else the reason."""
    try:
        compiler.compile(op, problem, key, config, arch, SHARED_MEMORY[arch])
    except Failed as reason:
        return f"{op} {key} {config}: {reason}"
    return None


def name_of(kernel):
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


def problems_by_key(compiler, op):
    """(key, index of the first problem that asks for it)."""
    found = []
    for problem in range(len(ops.load(op).problems)):
        for key in compiler.describe(op, problem, arch=90):
            if key not in [known for known, _ in found]:
                found.append((key, problem))
    return found


def defects(compiler, table):
    """Entries for which no problem asks, and configurations that do not compile (each once)."""
    known = problems_by_key(compiler, table["op"])
    found, seen = [], []
    for entry in table["entries"]:
        problem = next((problem for key, problem in known if key == entry["key"]), None)
        if problem is None:
            found.append(f"{table['op']}: no problem has the key {entry['key']}")
        elif "config" in entry and entry["config"] not in seen:
            seen.append(entry["config"])
            found.append(why_not(compiler, table["op"], problem, entry["key"], entry["config"], table["arch"]))
    return [what for what in found if what]


@pytest.mark.parametrize("op", OPS)
def test_defaults_compile_at_the_sizes_that_are_tuned(compiler, op):
    keys = problems_by_key(compiler, op)
    for key, problem in {keys[0][1]: keys[0], keys[-1][1]: keys[-1]}.values():
        assert why_not(compiler, op, problem, key, ops.load(op).default(**key)) is None


@pytest.mark.parametrize("op", OPS)
def test_space_fits_the_kernels(compiler, op):
    """All candidates for a kernel have the same names; of the first three at least one is usable."""
    tunable = ops.load(op)
    keys = problems_by_key(compiler, op)
    for key, _ in keys:
        tried = candidates(tunable, key)
        assert len(tried) > 1
        for config in tried:
            assert config.keys() - LAUNCH_OPTIONS == tunable.alike(key, config).keys() - LAUNCH_OPTIONS
        assert all(config not in tried[:index] for index, config in enumerate(tried))
    key, problem = keys[len(keys) // 2]
    reasons = []
    for config in candidates(tunable, key)[1:4]:
        reasons.append(why_not(compiler, op, problem, key, config))
        if reasons[-1] is None:
            return
    pytest.fail("\n".join(reasons))


@pytest.mark.long
def test_shipped_tables_compile(compiler):
    tables = [json.loads(path.read_text()) for path in sorted(tuning.TABLES.glob("*/*.json"))]
    assert not [what for table in tables for what in defects(compiler, table)]


@pytest.mark.parametrize("op", OPS)
def test_tables_go_stale_with_every_kernel_that_they_decide_between(compiler, op):
    """With what some of an operation's kinds of kernel launch and others do not; with its own, if there is one kind."""
    tunable = ops.load(op)
    of_kind = {}
    for key, problem in problems_by_key(compiler, op):
        inputs = make_sets(tunable.problems[problem], torch.device("cpu"), 1, values=False)[0]
        one_of_each = {config.get("kernel"): config for config in candidates(tunable, key)}
        for kind, config in one_of_each.items():
            only = tuning.override(op, tunable.only_for(key, config))
            with pretend(target_of(90)), measure.launches_skipped() as launched, only:
                tunable.problems[problem].run(inputs)
            of_kind.setdefault(kind, set()).update(launched)
    launched = set.union(*of_kind.values())
    covered = kernel_sources(tunable.module, *tunable.also).keys()
    if len(of_kind) == 1:  # a problem may need other operations, too
        assert {name_of(kernel) for kernel in launched} & covered
    else:
        decided = launched - set.intersection(*of_kind.values())
        assert {name_of(kernel) for kernel in decided} <= covered


def test_defaults_are_near_the_tuned():
    """They must do on a GPU without a table: on one with it, none takes 1.5 times as long as what the tuner found."""
    paths = sorted(tuning.TABLES.glob("*/*.json"))
    assert paths
    for path in paths:
        for entry in json.loads(path.read_text())["entries"]:
            assert entry["default_us"] <= 1.5 * entry["us"], f"{path.name}: {entry}"


@pytest.mark.parametrize(
    ("op", "key", "config", "why"),
    [
        ("act_and_mul", {"n": 3072, "tokens": 1}, {"BLOCK": 1024, "num_warps": 4}, None),
        ("act_and_mul", {"n": 3072, "tokens": 3}, {"BLOCK": 1024, "num_warps": 4}, "no problem has the key"),
        ("act_and_mul", {"n": 3072, "tokens": 1}, {"BLOCK": 1000, "num_warps": 4}, "power of 2"),
        ("act_and_mul", {"n": 3072, "tokens": 1}, {"BLOCK": 16384, "num_warps": 1}, "spills"),
        ("paged_decode_attention", None, {"BLOCK_N": 256, "num_stages": 5}, "bytes of shared memory"),
    ],
)
def test_defects_are_found(compiler, op, key, config, why):
    """The check of shipped tables, on tables that are wrong."""
    key = key or problems_by_key(compiler, op)[0][0]
    table = {"op": op, "arch": 90, "entries": [{"key": key, "config": ops.load(op).default(**key) | config}]}
    found = defects(compiler, table)
    assert [why in what for what in found] == ([True] if why else []), found


def test_candidates_compile_in_processes_of_their_own():
    """The tuner's own path but for the GPU: keys and configurations survive the way to the worker and back."""
    tunable = ops.load("copy_blocks")
    compilers = Compilers(1, lambda: Worker("autotune.measure:Compiler", COMPILER_ENVIRON))
    try:
        tasks, errors = prepare([tunable], compilers, arch=90, shared_limit=SHARED_MEMORY[90])
        assert not errors
        assert [task.key for task in tasks] == [{"elements": 8192}, {"elements": 16384}]
        outcomes = [(config, compiled.exception()) for task in tasks for config, compiled in task.compiled]
    finally:
        compilers.close()
    assert outcomes[0][1] is None
    assert all(error is None or isinstance(error, Failed) for _, error in outcomes), outcomes
    assert sum(error is None for _, error in outcomes) > len(outcomes) / 2, outcomes
