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
SECRET = "TRITONLLM_RANKS_SECRET"
SCRIPT = f"""
import sys
from tritonllm import LLM, SamplingParams
# Steps may take as long as they like: that a host is lost must be noticed all the same.
arguments = {{"num_blocks": 64, "max_num_seqs": 4, "worker_timeout": {SILENCE}, "step_timeout": 86400}}
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
def start(hosts, tmp_path):
    """Starts a rank on each host, with variables of its own."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (first, _), pipe = hosts.hosts, subprocess.PIPE
    made = []

    def start_them(*variables):
        for rank, (host, own) in enumerate(zip(hosts.hosts, variables or ({}, {}), strict=True)):
            place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
            where = {"MASTER_ADDR": first.address, "MASTER_PORT": "29500"}
            command = [sys.executable, str(script), str(tiny_checkpoint())]
            with host.inside():
                all_ = environment(**place, **where, **own)
                made.append(forked_programs.Popen(command, env=all_, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return made

    yield start_them
    for process in made:
        process.kill()
        process.communicate()


def assert_first_is_lost(hosts, following):
    errors = following.communicate(timeout=PATIENCE)[1]
    assert following.returncode == 1 and f"the host of rank 0, {hosts.hosts[0].address}, is lost" in errors, errors


def assert_second_is_lost(hosts, leading, words):
    errors = leading.communicate(words, timeout=PATIENCE)[1]
    lost = f"WorkerError: a rank of the launcher failed: the host of rank 1, {hosts.hosts[1].address}, is lost"
    assert leading.returncode == 1 and lost in errors, errors


def test_ranks_on_two_hosts(hosts, start):
    """And then the second host is cut off while nobody asks for anything."""
    expected = tiny_llm().generate([[1, 2, 3]], greedy(12), use_tqdm=False)[0].outputs[0].token_ids
    leading, following = start({SECRET: "5" * 32}, {SECRET: "5" * 32})
    answer = leading.stdout.readline()
    assert answer.split() == [str(token) for token in expected], leading.stderr.read()
    hosts.cut(hosts.hosts[1])
    assert_first_is_lost(hosts, following)
    assert_second_is_lost(hosts, leading, "again\n")


def test_a_host_that_is_lost_while_steps_run(hosts, start):
    leading, following = start()
    leading.stdin.write("\n" * 50_000)
    leading.stdin.flush()
    for _ in range(3):
        assert leading.stdout.readline()
    hosts.cut(hosts.hosts[1])
    assert_first_is_lost(hosts, following)
    assert_second_is_lost(hosts, leading, None)


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        (({SECRET: "5" * 32}, {SECRET: "6" * 32}), "do not know the same secret"),
        (({SECRET: "5" * 32}, {}), "TRITONLLM_RANKS_SECRET is set where rank 0 runs: set it for all ranks"),
    ],
)
def test_a_rank_without_the_secret_does_not_come_in(start, secrets, said):
    _, following = start(*secrets)
    errors = following.communicate(timeout=PATIENCE)[1]
    assert following.returncode == 1 and said in errors, errors
