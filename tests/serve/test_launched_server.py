"""A server whose ranks torchrun has started: one of them listens, and none is left when one dies."""

import os
import re
import subprocess
import sys

import httpx
import psutil
import pytest
from support import forked_programs
from support.engines import greedy, tiny_checkpoint, tiny_llm
from support.server import ROOT, eventually
from support.waiting import PATIENCE

pytestmark = pytest.mark.long

PROMPT = list(range(5, 25))
ENGINE = {"num_blocks": 64, "max_num_seqs": 4}


class Launched:
    """``torchrun ... -m tritonllm serve`` on two ranks, and where it listens."""

    def __init__(self) -> None:
        how = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        options = ["-tp", "2", "--distributed-executor-backend", "external_launcher", "--skip-tokenizer-init"]
        options += [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
        serve = ["-m", "tritonllm", "serve", str(tiny_checkpoint()), "--device", "cpu", "--port", "0", *options]
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
    made = Launched()
    processes = psutil.Process(made.process.pid).children(recursive=True)
    yield made
    made.process.kill()
    for process in processes:
        if process.is_running():
            process.kill()


def ask(url):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)


def test_one_rank_listens_and_all_end_when_one_dies(launched):
    expected = tiny_llm(**ENGINE).generate([PROMPT], greedy(12), use_tqdm=False)[0].outputs[0].token_ids
    assert ask(launched.url).json()["choices"][0]["token_ids"] == list(expected)
    processes = psutil.Process(launched.process.pid).children(recursive=True)
    launched.engine_of(1).kill()
    status, log = launched.end()
    assert status != 0
    assert log.count(" serving ") == 1
    eventually(lambda: not any(process.is_running() for process in processes))
