"""Ranks that Ray starts: on two raylets they give the tokens of one process, and a lost one ends the requests."""

import os
import signal
import subprocess
import sys
from collections import Counter

import psutil
import pytest
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.ray_cluster import actors, all_free, two_nodes
from support.server import eventually, running_server
from support.waiting import PATIENCE

from tritonllm import LLM, env
from tritonllm.config.engine import EngineConfig
from tritonllm.demo import model_path
from tritonllm.dist.watch import WorkerError
from tritonllm.engine.ranks.ray_ranks import RayRanks

pytestmark = pytest.mark.long

pytest.importorskip("ray")
SETTINGS = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "step_timeout": PATIENCE}
PROMPTS = [[1, 2, 3], list(range(5, 25)), [7] * 9]


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as made:
        yield made


def listening():
    """The addresses at which this process listens, as often as it does; an actor's is also Ray's."""
    mine = psutil.Process().net_connections("inet")
    return Counter(connection.laddr.ip for connection in mine if connection.status == psutil.CONN_LISTEN)


def followers():
    return actors("Follower")


@pytest.mark.smoke
def test_tokens_are_those_of_one_process(cluster):
    before = listening()
    llm = tiny_llm(**SETTINGS)
    assert not all_free() and len(followers()) == 1
    assert set(listening() - before) <= {"127.0.0.1", llm.engine._runner._ranks._followers.host}
    params = [greedy(12), greedy(8, logprobs=2), greedy(20)]
    expected = tiny_llm().generate(PROMPTS, params, use_tqdm=False)
    for _ in range(2):
        assert token_ids(llm.generate(PROMPTS, params, use_tqdm=False)) == token_ids(expected)
    del llm
    eventually(lambda: all_free() and not followers())


def test_a_rank_that_is_killed_ends_the_requests(cluster):
    llm = tiny_llm(**SETTINGS)
    (rank,) = followers()
    os.kill(rank.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"rank 1 \(an actor of Ray\) failed: its actor ended"):
        for _ in range(1000):
            llm.generate(PROMPTS, greedy(20), use_tqdm=False)
    with pytest.raises(WorkerError):
        llm.generate(PROMPTS, greedy(2), use_tqdm=False)
    del llm
    eventually(lambda: all_free() and not followers())
    again = tiny_llm(**SETTINGS)
    assert len(again.generate([[1, 2, 3]], greedy(2), use_tqdm=False)[0].outputs[0].token_ids) == 2
    del again
    eventually(lambda: all_free())


def test_a_program_that_joined_a_cluster_ends_without_a_word(cluster):
    """It leaves its ranks before Ray leaves the cluster: behind that, what it asks of Ray would join anew."""
    command = [sys.executable, "-m", "tritonllm", "generate", "-tp", "2", "--distributed-executor-backend", "ray"]
    command += ["--temperature", "0", "--max-tokens", "12", "--prompt", "What is 20 + 22?"]
    settings = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=settings)
    assert done.returncode == 0, done.stderr
    assert "42" in done.stdout and "Traceback" not in done.stderr, done.stderr
    eventually(lambda: all_free() and not followers())


def test_what_cannot_be_is_said(cluster, monkeypatch):
    monkeypatch.setattr("tritonllm.engine.ranks.ray_ranks.PLACES", 1.0)
    with pytest.raises(ValueError, match=r"found no room for 4 ranks, each with 1 CPU, .*free in the cluster: 2 CPU"):
        tiny_llm(**{**SETTINGS, "tensor_parallel_size": 4})
    eventually(lambda: all_free())
    with pytest.raises(ValueError, match="max_model_len"):
        tiny_llm(**SETTINGS, max_model_len=10**9)
    eventually(lambda: all_free() and not followers())
    with pytest.raises(ValueError, match="leave out data_parallel_size=2"):
        LLM(str(tiny_checkpoint()), **SETTINGS, data_parallel_size=2)


def test_without_ray(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    config = EngineConfig.from_kwargs(model=str(tiny_checkpoint()), **SETTINGS)
    with pytest.raises(ValueError, match=r"needs Ray .*pip install '\.\[ray\]' in .*, or leave it out"):
        RayRanks(config)


def test_the_gpu_that_ray_keeps(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert env.index_of_device("3") == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc,0")
    assert [env.index_of_device(name) for name in ("5", "GPU-abc", "0")] == [0, 1, 2]
    with pytest.raises(ValueError, match="does not show GPU 1 to this process"):
        env.index_of_device("1")


def test_a_server_with_ranks_of_ray(cluster):
    options = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "ray"]
    with running_server(*options, environment={"RAY_ADDRESS": cluster.address}) as server:
        assert len(followers()) == 1
        body = {"model": "demo", "prompt": "There was", "max_tokens": 6, "temperature": 0}
        text = server.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        (rank,) = followers()
        os.kill(rank.pid, signal.SIGKILL)
        server.client.post("/v1/completions", json=body)
        assert server.wait() == 1 and "rank 1 (an actor of Ray) failed" in server.text
    (expected,) = LLM(str(model_path())).generate("There was", greedy(6), use_tqdm=False)
    assert text == expected.outputs[0].text
    eventually(lambda: all_free() and not followers())
