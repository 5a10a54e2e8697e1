"""``tritonllm batch --ray N``: every request is answered once, also when an engine of the cluster dies."""

import io
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ray_cluster import actors, all_free, two_nodes
from support.server import MODEL, ROOT, eventually
from support.waiting import PATIENCE

from tritonllm import SamplingParams
from tritonllm.serve.processes.batch import Line
from tritonllm.serve.ray.batch import RESTARTS, TRIES, Fleet

pytestmark = pytest.mark.long

pytest.importorskip("ray")
COUNT = 40
GREEDY = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}  # one engine is not done before the other starts


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as made:
        yield made


def begin(cluster, folder, engines):
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--served-model-name", MODEL]
    command = [sys.executable, "-m", "tritonllm", "batch", *files, "--ray", str(engines), "--max-concurrency", "2"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def write_requests(path):
    lines = []
    for i in range(COUNT):
        body = {"model": MODEL, "prompt": f"{i} + {i} =", **GREEDY, **({"top_p": 7} if i == 3 else {})}
        lines.append(json.dumps({"custom_id": f"number-{i}", "url": "/v1/completions", "body": body}))
    path.write_text("\n".join(lines) + "\n")


def test_an_engine_dies_and_no_request_is_lost(cluster, tmp_path, llm):
    write_requests(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    process = begin(cluster, tmp_path, 2)
    eventually(lambda: out.exists() and out.read_bytes().count(b"\n") >= 6)
    eventually(lambda: len(actors("BatchEngine.answer")) == 2)  # one that dies while it starts ends the whole
    workers = actors("BatchEngine")
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and "40 requests answered, 1 of them with an error" in errors, errors
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert Counter(answer["custom_id"] for answer in answers) == {f"number-{i}": 1 for i in range(COUNT)}
    found = {answer["custom_id"]: answer["response"] for answer in answers}
    assert found.pop("number-3")["status_code"] == 400
    expected = llm.generate([f"{i} + {i} =" for i in range(COUNT)], SamplingParams(**GREEDY), use_tqdm=False)
    for name, response in found.items():
        text = expected[int(name.removeprefix("number-"))].outputs[0].text
        assert response["body"]["choices"][0]["text"] == text
    eventually(lambda: all_free() and not actors("BatchEngine"))
    before = out.read_bytes()
    out.write_bytes(b"".join(before.splitlines(keepends=True)[:37]))
    assert begin(cluster, tmp_path, 1).wait(PATIENCE) in (0, 1)
    assert out.read_bytes().startswith(b"".join(before.splitlines(keepends=True)[:37]))
    assert out.read_bytes().count(b"\n") == COUNT, "only what was missing was asked for"


def test_a_cluster_that_is_too_small(cluster, tmp_path):
    write_requests(tmp_path / "in.jsonl")
    process = begin(cluster, tmp_path, 5)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0 and "--ray 5 needs 5 CPUs, and the cluster has 2: lower it" in errors


class LostError(Exception):
    """What the stand-in for Ray raises for a dead actor."""


class Result:
    """What a call of an actor will return."""

    def __init__(self, engine, line):
        self.engine, self.line = engine, line


class Engine:
    """An actor that lives until chance ends it."""

    def __init__(self):
        self.alive, self.begun, self.most = True, 0, 0
        self.ready = self.answer = self

    def remote(self, line=None):
        self.begun += line is not None
        self.most = max(self.most, self.begun)
        return Result(self, line)


class Ray:
    """Answers come in any order, and any of them may be its actor's end."""

    class exceptions:
        RayError = LostError

    def __init__(self, chance, deadly):
        self.chance, self.deadly = chance, deadly

    def wait(self, results, num_returns):
        return [self.chance.choice(results)], None

    def get(self, result):
        engine, line = result.engine, result.line
        engine.alive = engine.alive and (line is None or self.chance.random() >= self.deadly)
        if not engine.alive:
            raise LostError("it died")
        engine.begun -= line is not None
        return line and (line.custom_id.encode() + b"\n", False)

    def kill(self, engine):
        engine.alive = False


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 5), st.sampled_from([0.0, 0.02, 0.1, 0.6]))
def test_each_line_is_answered_once_whoever_dies(seed, count, at_once, deadly):
    engines, lines = [], [Line(str(number), "/v1/completions", {}) for number in range(30)]

    def make():
        engines.append(Engine())
        return engines[-1]

    file = io.BytesIO()
    fleet = Fleet(Ray(random.Random(seed), deadly), make, count, at_once)
    try:
        assert fleet.run(lines, file) == 0
        assert Counter(file.getvalue().split()) == {line.custom_id.encode(): 1 for line in lines}
    except RuntimeError as error:
        assert deadly and (f"in {TRIES} tries" in str(error) or f"died {RESTARTS + 1} times" in str(error))
        assert max(Counter(file.getvalue().split()).values(), default=1) == 1
    fleet.end()
    assert all(engine.most <= at_once for engine in engines) and len(engines) <= count * (1 + RESTARTS)
    assert len(engines) == count or deadly
    assert not any(engine.alive for engine in engines), "also those that others have replaced"
