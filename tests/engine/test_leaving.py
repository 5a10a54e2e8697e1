"""How ranks leave one another: captured steps go first, since NCCL waits for them; and what warns of a launcher."""

import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tritonllm.config.engine import EngineConfig, ModelConfig
from tritonllm.config.parallel import ParallelConfig
from tritonllm.dist import group as group_module
from tritonllm.dist.group import ConnectedGroup, is_leaving
from tritonllm.dist.pipeline import Team
from tritonllm.engine.ranks import backends, executor, shared_experts
from tritonllm.engine.ranks.launched import Leaving, Wire
from tritonllm.engine.step.runner import ModelRunner


class Backend:
    """NCCL's of two ranks: its abort waits until no graph with one of its collectives is left."""

    rank, size = staticmethod(lambda: 0), staticmethod(lambda: 2)

    def __init__(self) -> None:
        self.released = threading.Event()
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.released.wait()
        self.aborted.set()


class Graphs:
    """Captured steps, whose end lets the backend go."""

    def __init__(self, backend: Backend) -> None:
        weakref.finalize(self, backend.released.set)


class Stream:
    def __init__(self, busy: int) -> None:
        self.busy = busy

    def query(self) -> bool:
        self.busy -= 1
        if self.busy == 0:
            raise RuntimeError("CUDA error: the device is broken")
        return self.busy < 0


def runner_with(graphs: Any) -> ModelRunner:
    runner = ModelRunner.__new__(ModelRunner)
    runner._graphs, runner._device = graphs, torch.device("cuda")
    return runner


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(-1))
    monkeypatch.setattr(group_module, "PATIENCE", 60.0)
    backend = Backend()
    yield backend
    backend.released.set()


def test_rank_0_of_spawned_ranks_lets_go_of_its_graphs_before_it_leaves(backend):
    runner, team = runner_with(Graphs(backend)), Team(ConnectedGroup(backend, torch.device("cuda")))
    watch, mailbox = SimpleNamespace(stop=lambda: None), SimpleNamespace(send=lambda message, patience: None)
    executor._end(watch, mailbox, {}, [team], [weakref.ref(runner)], os.getpid())
    assert backend.aborted.is_set() and not is_leaving()


def test_an_engine_that_shares_experts_lets_go_of_its_graphs_before_it_leaves(backend):
    runner = runner_with(Graphs(backend))
    shared_experts._leave(ConnectedGroup(backend, torch.device("cuda")), [weakref.ref(runner)])
    assert backend.aborted.is_set() and not is_leaving()


@pytest.mark.parametrize("there", [True, False])
def test_a_launched_rank_lets_go_of_its_graphs_before_it_leaves(backend, there):
    runner, group = runner_with(Graphs(backend)), ConnectedGroup(backend, torch.device("cuda"))
    leaving = Leaving(Wire(group_module.ALONE, b"key"), Team(group), os.getpid(), int, int)
    leaving.runners.append(weakref.ref(runner))
    if not there:
        del runner  # and its graphs with it
    leaving()
    assert backend.aborted.is_set() and not is_leaving()


def test_a_thread_that_waits_for_ever_is_known(backend, monkeypatch):
    monkeypatch.setattr(group_module, "PATIENCE", 0.05)
    ConnectedGroup(backend, torch.device("cuda")).shut()
    assert is_leaving()


@pytest.mark.parametrize(("busy", "stays"), [(3, True), (10**9, True), (-1, False)])
def test_graphs_of_a_device_that_is_broken_or_waits_stay(monkeypatch, busy, stays):
    stream = Stream(busy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    runner = runner_with("captured steps")
    runner.release_graphs(patience=0.02)
    assert (runner._graphs is not None) == stays
    runner_with(None).release_graphs()  # a rank that has none asks no device


@pytest.mark.parametrize(
    ("options", "processes", "warns"),
    [
        ({"tensor_parallel_size": 2}, "2", True),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, "2", False),
        ({"tensor_parallel_size": 2}, "4", False),
        ({"tensor_parallel_size": 2}, None, False),
        ({}, "1", False),
    ],
)
def test_ranks_of_each_process_of_a_launcher_are_warned_of(options, processes, warns, monkeypatch, caplog):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    if processes is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", processes)
    backends.ranks_of(EngineConfig(model=ModelConfig(model="m"), parallel=ParallelConfig(**options)))
    assert ("a launcher has started 2 processes" in caplog.text) == warns
