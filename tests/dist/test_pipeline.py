"""Stages that meet, send round and leave, as threads here."""

import threading

import pytest
import torch
from support.ranks import in_threads
from support.waiting import PATIENCE

from tritonllm.config.parallel import ParallelConfig
from tritonllm.dist.group import ConnectedGroup, Group
from tritonllm.dist.pipeline import Pipeline, Team, meet

CPU = torch.device("cpu")


def run_stages(stages, ranks, work):
    """What ``work`` returns on each rank of all stages."""
    parallel = ParallelConfig(tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    return in_threads(stages * ranks, lambda store, rank: meet(store, rank, parallel, CPU, timeout=PATIENCE), work)


@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (3, 1), (2, 2)])
def test_what_is_sent_goes_round(stages, ranks):
    def work(team):
        pipe, x = team.pipe, torch.zeros(3, dtype=torch.int64)
        for step in range(5 * stages):
            if pipe.first:
                pipe.send(x.fill_(step))
                assert pipe.receive(x).tolist() == [step + stages - 1] * 3
            else:
                pipe.send(pipe.receive(x) + 1)
        return team.pipe.stage

    assert run_stages(stages, ranks, work) == [rank // ranks for rank in range(stages * ranks)]


def test_first_messages_are_sent_before_the_first_step(monkeypatch):
    """NCCL's first send waits until the other end receives. In a step the last stage's would wait for rank 0, which
    receives only when it has told the last stage of the next step."""
    sent, send = {}, ConnectedGroup.send

    def noted_send(group, x, to):
        sent.setdefault(threading.current_thread(), []).append(x.dtype)
        return send(group, x, to)

    monkeypatch.setattr(ConnectedGroup, "send", noted_send)

    def work(team):
        before = list(sent[threading.current_thread()])
        team.pipe.send(torch.ones(2))
        return before, sent[threading.current_thread()], team.pipe.receive(torch.zeros(2)).tolist()

    for before, after, received in run_stages(3, 1, work):
        assert before == [torch.uint8] and after == [torch.uint8, torch.float32] and received == [1.0, 1.0]


def test_groups_are_left_at_once():
    """An abort may wait for what waits in another group, which is not aborted yet."""
    all_called = threading.Barrier(4)

    class Waiting(Group):
        def shut(self):
            all_called.wait(PATIENCE)

    class Stage(Pipeline):
        groups = (Waiting(), Waiting(), Waiting())

    Team(Waiting(), Stage(0, 2)).shut()
    assert not all_called.broken
    left = []

    class Noted(Group):
        def shut(self):
            left.append(threading.current_thread())

    Team(Noted()).shut()
    assert left == [threading.current_thread()]
