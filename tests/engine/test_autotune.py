import dataclasses
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from support.waiting import PATIENCE

from autotune import __main__ as cli
from autotune import ahead, measure, ops, search, table
from autotune.ops import Tunable, product
from autotune.problem import Problem, TensorFactory, Work, make_sets
from autotune.search import Compilers, candidates, prepare, tune
from autotune.worker import Failed, Worker
from tritonllm.kernels.elementwise import activation
from tritonllm.kernels.runtime import tuning

TESTS = Path(__file__).parents[1]
MACHINE = {
    "gpu": "NVIDIA Test",
    "torch": "2",
    "triton": "3",
    "arch": 90,
    "processors": 132,
    "memory_gib": 80,
    "shared_limit": 232448,
}


@dataclass(frozen=True)
class Doubling(Problem):
    """Doubles `x` in place and copies the old one; what it does wrong depends on its configuration's BLOCK."""

    n: int
    mutates: ClassVar[tuple[str, ...]] = ("x",)

    @property
    def name(self):
        return f"double {self.n}"

    def inputs(self, new):
        return {"x": new.normal(self.n, dtype=torch.float32)}

    def run(self, x):
        block = tuning.get_config("double", x["x"].device, default_config, n=self.n)["BLOCK"]
        old = torch.empty_like(x["x"])
        if block != 5:  # 5 leaves the output unwritten
            old.copy_(x["x"])
        x["x"].mul_(2.001 if block == 6 else 2)  # 6 is wrong
        if block == 7:
            raise RuntimeError("out of something\nneeds too much")
        return old, x["x"]

    def reference(self, x):
        return x["x"].clone(), x["x"].mul_(2)

    def work(self, x):
        return Work(bytes=8 * self.n)


def default_config(n):
    return {"BLOCK": 64}


def blocks(*values):
    return Tunable("double", activation, default_config, (Doubling(64),), lambda n: product(BLOCK=values))


class InProcess:
    """A worker without a process: compiles everything but BLOCK 8, and times as its function says."""

    def __init__(self, us=lambda config, careful: 1000 / config["BLOCK"]):
        self.us, self.measured = us, []

    def call(self, method, timeout, **args):
        if method == "describe":
            return [{"n": 64}]
        if method == "measure":
            self.measured.append(args["config"]["BLOCK"])
            return self.us(args["config"], args["careful"])
        if args["config"]["BLOCK"] == 8:
            raise Failed("spills")
        return None

    def close(self):
        pass


def tune_one(tunable, gpu, seconds=PATIENCE):
    compilers = Compilers(2, InProcess)
    tasks, errors = prepare([tunable], compilers, 90, 232448)
    assert not errors
    ((task, result),) = tune(tasks, gpu, search.time.monotonic() + seconds)
    compilers.close()
    assert task.key == {"n": 64}
    return result


@pytest.fixture
def worker():
    worker = Worker("support.fake_tuner:FakeGpu", {"PYTHONPATH": str(TESTS)})
    yield worker
    worker.close()


def measure_block(worker, block, timeout=PATIENCE):
    return worker.call("measure", timeout, op="double", problem=0, key={}, config={"BLOCK": block}, careful=False)


def test_worker_answers_and_survives_failures(worker):
    first = worker.call("process", PATIENCE)
    assert measure_block(worker, 10) == 100.0
    with pytest.raises(Failed, match=r"error 0\.5 > 0\.01"):
        measure_block(worker, 3)
    assert worker.call("process", PATIENCE) == first


@pytest.mark.parametrize(
    ("block", "timeout", "why"),
    [
        (1, PATIENCE, "died.*-6"),
        (2, 1, "no answer within 1 s"),
        (4, PATIENCE, "died.*KeyError: 'a defect of the worker itself'"),
    ],
)
def test_worker_is_replaced_when_it_crashes_or_hangs(worker, block, timeout, why):
    first = worker.call("process", PATIENCE)
    with pytest.raises(Failed, match=why):
        measure_block(worker, block, timeout)
    assert measure_block(worker, 10) == 100.0
    assert worker.call("process", PATIENCE) != first


def test_crashing_hanging_and_wrong_candidates_do_not_end_the_search(worker, monkeypatch):
    call = worker.call

    def impatient(method, timeout, **args):
        return call(method, 1.0 if args["config"]["BLOCK"] == 2 else PATIENCE, **args)

    monkeypatch.setattr(worker, "call", impatient)
    result = tune_one(blocks(1, 2, 3, 8, 100, 200), worker)
    assert result.config == {"BLOCK": 200}
    assert (result.us, result.default_us) == (5.0, 1000 / 64)
    assert result.tried == 7 and not result.cut_short
    reasons = "\n".join(sorted(result.failed))
    assert re.search("1}: the worker died.*\n.*2}: no answer.*\n.*3}: output 0: error.*\n.*8}: spills", reasons), (
        reasons
    )


def test_default_stays_unless_beaten_by_more_than_noise():
    assert tune_one(blocks(65), InProcess()).config == {"BLOCK": 64}
    assert tune_one(blocks(67), InProcess()).config == {"BLOCK": 67}


def test_finalists_are_timed_again():
    """A lucky first measurement does not win."""
    gpu = InProcess(lambda config, careful: 1.0 if config["BLOCK"] == 100 and not careful else 1000 / config["BLOCK"])
    assert tune_one(blocks(100, 200), gpu).config == {"BLOCK": 200}
    assert sorted(gpu.measured) == [64, 64, 100, 100, 200, 200]


def test_finalist_that_fails_the_second_check_is_dropped():
    def flaky(config, careful):
        if config["BLOCK"] == 200 and careful:
            raise Failed("output 0: error 0.5 > 0.01")
        return 1000 / config["BLOCK"]

    result = tune_one(blocks(100, 200), InProcess(flaky))
    assert (result.config, result.tried) == ({"BLOCK": 100}, 3)
    assert result.failed == ["{'BLOCK': 200}: output 0: error 0.5 > 0.01"]


class Asked(InProcess):
    """Notes what it is asked to compile."""

    blocks: ClassVar[list[int]] = []

    def call(self, method, timeout, **args):
        if method == "compile":
            self.blocks.append(args["config"]["BLOCK"])
        return super().call(method, timeout, **args)


def test_long_sums_in_float32_may_be_as_wrong_as_tensor_cores_make_them():
    """Only where the result is float32, and K is long."""
    product = ops.load("linear").problems[0]
    allowed = {k: dataclasses.replace(product, k=k).error_allowed(torch.float32) for k in (512, 1024, 4096)}
    assert allowed == {512: 2e-6, 1024: 2.048e-6, 4096: 8.192e-6}
    assert dataclasses.replace(product, k=14336).error_allowed(torch.bfloat16) == Doubling(1).error_allowed(
        torch.bfloat16
    )


def test_what_a_folder_lists_is_not_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setattr(Asked, "blocks", [])
    monkeypatch.setattr(ops, "load", lambda op: blocks(8, 16, 128))
    compilers = Compilers(2, Asked)
    tasks, _ = prepare([blocks(8, 16, 128)], compilers, 90, 232448)
    assert [failures for _, failures in ahead.write_list(tmp_path, tasks, 90)] == [1]
    compilers.close()
    assert sorted(Asked.blocks) == [8, 16, 64, 128]

    def tried(arch, *space):
        Asked.blocks.clear()
        compilers = ahead.CompiledAhead(tmp_path, 2, Asked)
        tasks, _ = prepare([blocks(*space)], compilers, arch, 232448)
        ((_, result),) = tune(tasks, InProcess(), time.monotonic() + PATIENCE)
        compilers.close()
        return result.tried, result.failed, sorted(Asked.blocks)

    spills = ["{'BLOCK': 8}: spills"]
    assert tried(90, 8, 16, 128) == (4, spills, [])
    assert tried(90, 8, 32, 128) == (4, spills, [32])
    assert tried(80, 8, 128) == (3, spills, [8, 64, 128])
    monkeypatch.setattr(table, "kernel_hash", lambda *modules: "changed")
    assert tried(90, 8, 128) == (3, spills, [8, 64, 128])


@pytest.mark.long
def test_command_line_compiles_without_a_gpu(capsys, tmp_path):
    """The real compiler, for a GPU that is not there; the folder is one that the engine's workers read, too."""
    assert cli.main(["--op", "copy_blocks", "--compile-only", str(tmp_path), "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    counts = re.findall(r"copy_blocks: .*: (\d+) candidates, 0 failed", out)
    listed = [json.loads(line) for line in (tmp_path / ahead.LIST).read_text().splitlines()]
    assert len(counts) == 2 and sum(map(int, counts)) == len(listed) > 10
    kernels = [path for path in tmp_path.glob("*/*") if not path.name.startswith("__grp__")]
    assert {path.suffix for path in kernels} == {".cubin", ".json"} and len(kernels) > 10
    for group in tmp_path.glob("*/__grp__*.json"):
        assert all((group.parent / name).is_file() for name in json.loads(group.read_text())["child_paths"])


def test_folder_without_a_list_is_refused(capsys, tmp_path):
    assert cli.main(["--op", "copy_blocks", "--compiled", str(tmp_path), "--jobs", "1"]) == 1
    assert "make it with --compile-only" in capsys.readouterr().err


def test_order_is_fixed_and_begins_with_the_default():
    orders = [InProcess(), InProcess()]
    for gpu in orders:
        tune_one(blocks(*range(10, 60)), gpu)
    first, second = (gpu.measured for gpu in orders)
    assert first == second and first[0] == 64
    assert candidates(blocks(64, 65), {"n": 64}) == [{"BLOCK": 64}, {"BLOCK": 65}]


def test_what_the_last_search_found_is_measured_second(tmp_path):
    """However short the search is; entries that keep the default name nothing."""
    tunable = blocks(*range(10, 60))
    entries = [{"key": {"n": 64}, "config": {"BLOCK": 41}}, {"key": {"n": 65}}, {"key": {"n": 66}, "config": {}}]
    table.write(table.build(tunable, MACHINE, entries), tmp_path)
    tuned = table.tuned(tmp_path, MACHINE["gpu"], tunable.op)
    order = candidates(tunable, {"n": 64}, tuned)
    assert order[:2] == [{"BLOCK": 64}, {"BLOCK": 41}]
    assert sorted(config["BLOCK"] for config in order) == [*range(10, 60), 64]
    assert candidates(tunable, {"n": 65}, tuned) == candidates(tunable, {"n": 65})
    assert table.tuned(tmp_path, "another", tunable.op) == []


def test_time_limit_leaves_the_default():
    gpu = InProcess()
    result = tune_one(blocks(100, 200), gpu, seconds=0.0)
    assert (result.config, result.tried, result.cut_short) == ({"BLOCK": 64}, 1, True)


def test_what_the_default_waits_for_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow_at_first(config, careful):
        if config["BLOCK"] == 64 and not careful:
            now[0] += 0.5
        return 1000 / config["BLOCK"]

    assert tune_one(blocks(100, 200), InProcess(slow_at_first), seconds=0.3).tried == 3


def test_failing_default_is_an_error():
    def broken(config, careful):
        raise Failed("wrong")

    assert isinstance(tune_one(blocks(100), InProcess(broken)), Failed)


@pytest.mark.parametrize(
    ("block", "why"),
    [(5, "output 0: error inf"), (6, "output 1: error 0.0005"), (7, "RuntimeError: needs too much")],
)
def test_only_right_results_are_timed(monkeypatch, block, why):
    monkeypatch.setattr(ops, "load", lambda op: blocks())
    timed = []

    def timer(call, sets, samples, sample_ms):
        timed.append(sets)
        call(0)
        return 3.0

    gpu = measure.Gpu("cpu", timer)
    args = {"op": "double", "problem": 0, "careful": False}
    assert gpu.measure(key={"n": 64}, config={"BLOCK": 32}, **args) == 3.0
    for key, config, reason in [({"n": 64}, {"BLOCK": block}, why), ({"n": 65}, {"BLOCK": 32}, "not for {'n': 65}")]:
        with pytest.raises(Failed, match=re.escape(reason)):
            gpu.measure(key=key, config=config, **args)
    assert timed == [64]


def test_inputs_are_seeded_by_the_problem():
    (a, b), (c, _) = (make_sets(Doubling(64), torch.device("cpu"), 2) for _ in range(2))
    assert torch.equal(a["x"], c["x"]) and not torch.equal(a["x"], b["x"])
    new = TensorFactory(torch.device("cpu"), seed=1)
    assert torch.equal(new.permutation(100).sort().values, torch.arange(100))
    assert 3 <= int(new.integers(3, 9, 1000).min()) <= int(new.integers(3, 9, 1000).max()) < 9


def test_table_is_read_back_by_the_lookup(monkeypatch, tmp_path):
    tunable = blocks()
    entries = [{"key": {"n": n}, "config": {"BLOCK": n}, "us": 1.0} for n in (64, 1024)]
    path = table.write(table.build(tunable, MACHINE, entries), tmp_path)
    assert path == tmp_path / "nvidia_test" / "double.json"
    written = json.loads(path.read_text())
    assert written["entries"] == entries
    assert {"op", "gpu", "triton", "torch", "kernel_hash", "date", "commit"} <= written.keys()
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    monkeypatch.setattr(tuning, "_gpu_slug_of", lambda index: "nvidia_test")
    assert tuning.get_config("double", torch.device("cuda", 0), default_config, n=700) == {"BLOCK": 1024}


@pytest.mark.parametrize(
    ("entry", "changes", "why"),
    [
        ({"key": {"n": 1}, "config": {"BLOCK": 1, "num_warps": 2, "maxnreg": 64}}, {}, None),
        ({"key": {"n": 1}, "config": {"BLOCK": 1, "BLOK": 1}}, {}, "unknown BLOK"),
        ({"key": {"n": 1}, "config": {"num_warps": 1}}, {}, "no BLOCK"),
        ({"key": {"m": 1}, "config": {"BLOCK": 1}}, {}, "unexpected keyword"),
        ({"key": {"n": 1}, "config": {"BLOCK": 1}}, {"kernel_hash": "old"}, "kernels changed"),
    ],
)
def test_check_reports_tables_that_do_not_fit(tmp_path, entry, changes, why):
    table.write(table.build(blocks(), MACHINE, [entry]) | changes, tmp_path)
    found = table.check(tmp_path, lambda op: blocks())
    assert [why in what for what in found] == ([True] if why else []), found


def test_kernel_hash_follows_the_kernels_only():
    hashes = {name: table.kernel_hash(ops.load(name).module) for name in ("act_and_mul", "rms_norm", "apply_rope")}
    assert len(set(hashes.values())) == 3
    assert hashes["rms_norm"] == table.kernel_hash(ops.load("fused_add_rms_norm").module)


def test_kernel_hash_does_not_know_where_a_kernel_lives(monkeypatch):
    before = table.kernel_hash(activation)
    monkeypatch.setattr(activation.activate.fn, "__module__", "elsewhere")
    assert any(name.startswith("elsewhere.") for name in table.kernel_sources(activation))
    assert table.kernel_hash(activation) == before


def test_every_table_that_a_launcher_asks_for_can_be_tuned():
    kernels = [path.read_text() for path in Path(tuning.__file__).parents[1].rglob("*.py")]
    asked = {name for source in kernels for name in re.findall(r'get_config\(\s*"(\w+)"', source)}
    assert asked and asked <= set(ops.names())
    for name in ops.names():
        tunable = ops.load(name)
        assert tunable.op == name
        names = [problem.name for problem in tunable.problems]
        assert names and len(set(names)) == len(names)


def test_shipped_tables_name_what_their_kernels_know():
    """Stale hashes are `python -m autotune --check`'s to report: only a GPU can mend them."""
    wrong = table.check(tuning.TABLES, ops.load)
    assert not [what for what in wrong if "kernels changed" not in what]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--list"], 0, "silu_and_mul T64 2x14336"),
        (["--op", "act_and_mul", "--limit-seconds", "0"], 2, "--limit-seconds must be positive"),
        (["--op", "act_and_mul", "--jobs", "0"], 2, "--jobs must be at least 1"),
        (["--op", "unknown"], 2, "invalid choice: 'unknown'"),
        ([], 2, "one of the arguments"),
        (["--all", "--check"], 2, "not allowed with"),
        (["--all", "--compile-only", "a", "--compiled", "b"], 2, "not allowed with"),
        (["--all", "--compile-only", "a", "--target", "sm_91"], 2, "invalid choice: 'sm_91'"),
    ],
)
def test_command_line(capsys, argv, code, says):
    try:
        assert cli.main(argv) == code
    except SystemExit as stopped:
        assert stopped.code == code
    out, err = capsys.readouterr()
    assert says in (out if code == 0 else err)


def test_command_line_check(capsys, tmp_path):
    assert cli.main(["--check", "--gpu-table-dir", str(tmp_path)]) == 1
    assert f"{tmp_path}: there is no table" in capsys.readouterr().out
    table.write(table.build(ops.load("act_and_mul"), MACHINE, []), tmp_path)
    assert cli.main(["--check", "--gpu-table-dir", str(tmp_path)]) == 0
    other = table.build(ops.load("act_and_mul"), MACHINE, []) | {"op": "gone"}
    gone = table.write(other, tmp_path)
    assert cli.main(["--check", "--gpu-table-dir", str(tmp_path)]) == 1
    assert "nvidia_test/gone.json: there is no operation gone: remove the table" in capsys.readouterr().out
    gone.unlink()
    table.write(table.build(ops.load("act_and_mul"), MACHINE, []) | {"kernel_hash": "old"}, tmp_path)
    assert cli.main(["--check", "--gpu-table-dir", str(tmp_path)]) == 1
    assert "nvidia_test/act_and_mul.json: the kernels changed" in capsys.readouterr().out


def test_a_folder_for_tables_that_cannot_be_written_ends_it_at_once(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert cli.main(["--op", "act_and_mul", "--gpu-table-dir", str(tmp_path / "file" / "tables")]) == 1
    assert "Not a directory" in capsys.readouterr().err


def test_command_line_tunes_and_writes(capsys, monkeypatch, tmp_path):
    """The whole way with workers that fake both the compiler and the GPU."""

    class Fake(InProcess):
        def call(self, method, timeout, **args):
            return MACHINE if method == "info" else super().call(method, timeout, **args)

    monkeypatch.setattr(cli, "Worker", lambda *args, **kwargs: Fake())
    monkeypatch.setattr(ops, "load", lambda op: blocks(8, 16, 128))
    assert cli.main(["--op", "act_and_mul", "--gpu-table-dir", str(tmp_path), "--jobs", "2"]) == 0
    written = json.loads((tmp_path / "nvidia_test" / "double.json").read_text())
    assert written["entries"] == [
        {"key": {"n": 64}, "config": {"BLOCK": 128}, "us": 7.812, "default_us": 15.625, "tried": 4, "failed": 1}
    ]
    out = capsys.readouterr().out
    assert (
        "double: double 64: 15.62 -> 7.81 us {'BLOCK': 128} (4 of 4 tried; 1 failed, as {'BLOCK': 8}: spills)" in out
        and "2.00x" in out
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_command_line_without_a_gpu(capsys, tmp_path):
    assert cli.main(["--op", "act_and_mul", "--gpu-table-dir", str(tmp_path), "--jobs", "1"]) == 1
    assert "no GPU to tune on" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
