"""Ranks that a launcher starts on two hosts: they meet over the network, and none waits for a host that is lost."""

import subprocess
import sys

import pytest
from support import forked_programs
from support.checkout import environment
from support.engines import greedy, tiny_checkpoint, tiny_llm
from support.namespaces import network
from support.waiting import PATIENCE

pytestmark = pytest.mark.long

SILENCE = 5.0  # seconds
SCRIPT = f"""
import sys
from tritonllm import LLM, SamplingParams
arguments = {{"num_blocks": 64, "max_num_seqs": 4, "step_timeout": {SILENCE}}}
llm = LLM(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="external_launcher", **arguments)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
while True:
    output = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]
    print(*output.outputs[0].token_ids, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def hosts():
    with network(2) as made:
        yield made


@pytest.fixture
def ranks(hosts, tmp_path):
    """One on each host; they have met when rank 0 answers."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (first, _), pipe = hosts.hosts, subprocess.PIPE
    made = []
    for rank, host in enumerate(hosts.hosts):
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        where = {"MASTER_ADDR": first.address, "MASTER_PORT": "29500"}
        command = [sys.executable, str(script), str(tiny_checkpoint())]
        with host.inside():
            variables = environment(**place, **where)
            made.append(forked_programs.Popen(command, env=variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
    yield made
    for process in made:
        process.kill()
        process.communicate()


def test_ranks_on_two_hosts(hosts, ranks):
    """And then the second host is cut off while nobody asks for anything."""
    expected = tiny_llm().generate([[1, 2, 3]], greedy(12), use_tqdm=False)[0].outputs[0].token_ids
    leading, following = ranks
    answer = leading.stdout.readline()
    assert answer.split() == [str(token) for token in expected], leading.stderr.read()
    hosts.cut(hosts.hosts[1])
    errors = following.communicate(timeout=PATIENCE)[1]
    assert following.returncode == 1 and f"the host of rank 0, {hosts.hosts[0].address}, is lost" in errors
    errors = leading.communicate("again\n", timeout=PATIENCE)[1]
    assert leading.returncode == 1 and "WorkerError: a rank of the launcher failed" in errors
