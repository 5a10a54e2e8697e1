"""``--api-server-count``: several processes speak HTTP in front of one engine."""

import json
import os
import signal
from collections import Counter

import httpx
import psutil
import pytest
from support.server import MODEL, eventually, refuses, running_server, socket_folders
from support.streams import Stream, all_gone
from support.waiting import PATIENCE

from tritonllm import SamplingParams

BODY = {"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def apis(server):
    """The API processes: those of the server's children that hold the socket it listens on."""
    port = int(server.url.rpartition(":")[2])
    held = lambda child: any(one.laddr.port == port for one in child.net_connections() if one.status == "LISTEN")  # noqa: E731
    return [child for child in server.children() if held(child)]


@pytest.fixture(scope="module")
def several():
    with running_server("--api-server-count", "3") as running:
        yield running


def test_all_of_them_answer_and_count_together(several, llm):
    assert len(apis(several)) == 3
    prompts = [f"{i} + {i} =" for i in range(30)]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    before = {process.pid: process.cpu_times().user for process in apis(several)}
    for prompt, text in zip(prompts, expected, strict=True):
        with httpx.Client(base_url=several.url, timeout=PATIENCE) as client:  # a connection of its own
            reply = client.post("/v1/completions", json={**BODY, "prompt": prompt}).json()
        assert reply["choices"][0]["text"] == text
    eventually(several.is_idle)
    assert several.metric("vllm:e2e_request_latency_seconds_count") == 30, "whichever process is asked"
    assert several.metric("vllm:generation_tokens_total") == 240
    used = Counter({process.pid: process.cpu_times().user - before[process.pid] for process in apis(several)})
    assert sum(seconds > 0 for seconds in used.values()) >= 2, "one process did it all"


def test_streams_of_several_processes_are_not_mixed_up(several, llm):
    streams = [Stream(several, prompt=f"{i} + {i} =", max_tokens=20, return_token_ids=True) for i in range(12)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    outputs = llm.generate([f"{i} + {i} =" for i in range(12)], params, use_tqdm=False)
    for stream, output in zip(streams, outputs, strict=True):
        assert stream.tokens() == list(output.outputs[0].token_ids)
    eventually(several.is_idle)


@pytest.mark.parametrize("who", ["engine", "api"])
@pytest.mark.long
def test_one_process_that_is_killed_ends_all(who):
    before = socket_folders()
    with running_server("--api-server-count", "2") as server:
        streams = [Stream(server) for _ in range(4)]
        children = server.children()
        victim = server.engine() if who == "engine" else apis(server)[0]
        os.kill(victim.pid, signal.SIGKILL)
        assert server.wait() == 1
        for stream in streams:
            stream.end()
        eventually(lambda: all_gone(children))
    assert socket_folders() <= before


@pytest.mark.long
def test_sigterm_lets_requests_end():
    with running_server("--api-server-count", "2") as server:
        streams = [Stream(server, max_tokens=150) for _ in range(4)]
        children = server.children()
        for process in [psutil.Process(server.process.pid), *apis(server)]:  # as a service manager does: to all
            process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert all(stream.end()[-1] == "[DONE]" for stream in streams)
        assert all(len(stream.events) > 100 for stream in streams)
        eventually(lambda: all_gone(children))


@pytest.mark.long
def test_an_engine_that_is_killed_while_requests_end_is_not_waited_for():
    with running_server("--api-server-count", "2", "--drain-seconds", "10000") as server:
        streams, children, engine = [Stream(server, n=8) for _ in range(4)], server.children(), server.engine()
        server.process.terminate()
        eventually(lambda: refuses(server))
        assert server.process.poll() is None, "the requests run"
        engine.kill()
        assert server.wait() == 1
        for stream in streams:
            error = json.loads(stream.end()[-2])["error"]
            assert error["code"] == "engine_dead"
        eventually(lambda: all_gone(children))


@pytest.mark.long
def test_a_killed_parent_leaves_nobody():
    before = socket_folders()
    with running_server("--api-server-count", "2") as server:
        children = server.children()
        server.process.kill()
        server.wait()
        eventually(lambda: all_gone(children))
    assert socket_folders() <= before


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--max-concurrency", "4"), "busy"),
        pytest.param(("--max-num-seqs", "4", "--max-queue", "0"), "queue_full", marks=pytest.mark.long),
    ],
)
def test_a_limit_holds_for_all_of_them_together(options, code):
    """Whichever processes the connections go to: all four are let in, and nobody else."""
    with running_server("--api-server-count", "3", *options) as server:
        for _ in range(2):  # the second time: what ended has been counted off
            streams = [Stream(server, max_tokens=500) for _ in range(4)]
            answers = []
            for _ in range(12):
                with httpx.Client(base_url=server.url, timeout=PATIENCE, verify=False) as client:
                    answers.append(client.post("/v1/completions", json={**BODY, "prompt": "x"}))
            assert {answer.status_code for answer in answers} == {429}
            assert {answer.json()["error"]["code"] for answer in answers} == {code}
            for stream in streams:
                assert stream.end()[-1] == "[DONE]"
            eventually(server.is_idle)
            with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
                assert client.post("/v1/completions", json={**BODY, "prompt": "x"}).status_code == 200
