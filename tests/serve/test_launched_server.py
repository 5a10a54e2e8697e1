"""A server whose ranks torchrun has started: one of them listens, and all end together."""

import os
import re
import subprocess
import sys

import httpx
import psutil
import pytest
from support import forked_programs
from support.engines import greedy, tiny_checkpoint, tiny_llm
from support.ports import reserved_port
from support.server import ROOT, eventually
from support.streams import all_gone
from support.waiting import PATIENCE

from tritonllm.config.engine import EngineConfig
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.processes import run

PROMPT = list(range(5, 25))
ENGINE = {"num_blocks": 64, "max_num_seqs": 4}


class Launched:
    """``torchrun ... -m tritonllm serve`` on two ranks, and where it listens.

    Args:
        where: options that say it.
    """

    def __init__(self, where: list[str]) -> None:
        how = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        options = ["-tp", "2", "--distributed-executor-backend", "external_launcher", "--skip-tokenizer-init"]
        options += [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
        serve = ["-m", "tritonllm", "serve", str(tiny_checkpoint()), "--device", "cpu", *where, *options]
        self.process = forked_programs.Popen(
            [sys.executable, "-m", "torch.distributed.run", *how, *serve],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving .* on (http\S+)", line):
                self.url = found[1]
                return
        raise AssertionError(f"the server did not start:\n{''.join(self.log)}")

    def engine_of(self, rank: int) -> psutil.Process:
        """The process of a rank that holds its part of the model."""
        server = forked_programs.children(self.process.pid)[rank]
        return max(forked_programs.children(server.pid, recursive=True), key=lambda child: child.memory_info().rss)

    def end(self) -> tuple[int, str]:
        """Wait for the launcher: its status, and all that was written."""
        rest = self.process.communicate(timeout=PATIENCE)[1]
        return self.process.returncode, "".join(self.log) + rest


@pytest.fixture
def launched():
    """On a port that it is told: of an address of its own, so that nobody else can be given it meanwhile."""
    with reserved_port() as port:
        made = Launched(["--host", "127.0.0.7", "--port", str(port)])
        assert made.url == f"http://127.0.0.7:{port}"
        processes = psutil.Process(made.process.pid).children(recursive=True)
        yield made
        made.process.kill()
        for process in processes:
            if process.is_running():
                process.kill()


def ask(url):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


@pytest.mark.long
def test_one_rank_listens_and_all_end_when_one_dies(launched):
    expected = tiny_llm(**ENGINE).generate([PROMPT], greedy(12), use_tqdm=False)[0].outputs[0].token_ids
    assert ask(launched.url).json()["choices"][0]["token_ids"] == list(expected)
    processes = psutil.Process(launched.process.pid).children(recursive=True)
    launched.engine_of(1).kill()
    status, log = launched.end()
    assert status != 0
    assert log.count(" serving ") == 1
    eventually(lambda: not any(process.is_running() for process in processes))


@pytest.mark.long
def test_running_requests_end_first(launched):
    """The launcher sends SIGTERM to all ranks; the others still compute what the first one answers."""
    body = {"prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    processes = psutil.Process(launched.process.pid).children(recursive=True)
    with httpx.stream("POST", f"{launched.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)
        launched.process.terminate()
        rest = list(lines)
    log = launched.end()[1]
    assert "error" not in first and rest[-1] == "data: [DONE]" and not any('"error"' in line for line in rest)
    assert log.count("INFO tritonllm.serve.processes.launched: stopped") == 1, log
    eventually(lambda: all_gone(processes))


def test_only_the_first_rank_takes_the_address(monkeypatch):
    """The second one would find it taken."""
    followed = []
    monkeypatch.setattr(run, "bind", lambda config: followed.append("bound"))
    monkeypatch.setattr(run, "follow_the_first", lambda config, place, *others: followed.append(place.rank) or 0)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    backend = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    engine = EngineConfig.from_kwargs(model=str(tiny_checkpoint()), **backend)
    assert run.serve(engine, ServerConfig(model_names=("tiny",)), max_queue=1) == 0
    assert followed == [1]
