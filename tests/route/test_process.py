"""``tritonllm route`` as a process: start, signals, ends; and backends that are killed or stopped."""

import json
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from support.fake_backend import FakeProcess
from support.router import RouterProcess
from support.server import ROOT, eventually
from support.waiting import PATIENCE

from tritonllm.cli import main

COMPLETE = "/v1/completions"


class Streams:
    """Streams that threads read: of each, its texts, its errors, and how often it said [DONE]."""

    def __init__(self, router, count, **body):
        self.ends: dict[str, tuple[list[str], list[str], int]] = {}
        self.begun = 0
        self._threads = [
            threading.Thread(
                target=self._read, args=(router.client, {"model": "m", "stream": True, **body, "prompt": f"{i}"})
            )
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, client, body):
        texts, errors, done = [], [], 0
        try:
            with client.stream("POST", COMPLETE, json=body) as answer:
                for line in answer.iter_lines():
                    content = line.removeprefix("data: ")
                    if content == "[DONE]":
                        done += 1
                    elif content and "error" in (found := json.loads(content)):
                        errors.append(found["error"]["message"])
                    elif content:
                        self.begun += not texts
                        texts.append(found["choices"][0]["text"])
        except httpx.TransportError as error:
            errors.append(repr(error))
        self.ends[body["prompt"]] = texts, errors, done

    def end(self):
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a stream hangs"
        return self.ends


@pytest.fixture
def processes():
    made = []

    def start(*names, delay=0.01):
        made.extend(FakeProcess(name, delay) for name in names)
        return made[-len(names) :]

    yield start
    for process in made:
        process.close()


def options_of(backends):
    return [part for backend in backends for part in ("--backend", backend.url)]


# What happens again and again is quick; limits are for what never comes.
QUICK = ("--health-interval", "0.2", "--backoff-seconds", "0.1", "--connect-timeout", str(PATIENCE))


def check_ends(ends, tokens):
    """Each stream is whole, or broken with one error; ``(whole, broken)``."""
    whole = broken = 0
    for prompt, (texts, errors, done) in ends.items():
        assert texts == [f"{prompt}:{i}" for i in range(len(texts))], "a token is missing or came twice"
        if done:
            assert (len(texts), errors, done) == (tokens, [], 1)
            whole += 1
        else:
            assert len(errors) == 1
            broken += 1
    return whole, broken


@pytest.mark.parametrize(
    ("number", "silence"),  # in seconds, until a backend counts as dead: a busy machine's stands still, too
    [
        pytest.param(signal.SIGKILL, PATIENCE, id="killed"),
        pytest.param(signal.SIGSTOP, 60.0, id="stopped", marks=pytest.mark.long),
    ],
)
def test_a_backend_dies_under_100_streams(processes, number, silence):
    made = processes("a", "b", "c", delay=0.03)
    limits = ("--between-bytes-timeout", str(silence), "--health-timeout", str(silence), "--unhealthy-threshold", "1")
    with RouterProcess(*options_of(made), *QUICK, *limits) as router:
        streams = Streams(router, 100, max_tokens=100)
        eventually(lambda: streams.begun >= 50)
        made[0].signal(number)
        whole, broken = check_ends(streams.end(), 100)
        assert whole + broken == 100 and whole >= 30
        assert broken >= 1, "none of the streams was at the backend that died"
        eventually(lambda: router.client.get("/status").json()["backends"][0]["alive"] is False)
        after = Streams(router, 20, max_tokens=5).end()
        assert check_ends(after, 5) == (20, 0), after
        if number == signal.SIGSTOP:
            made[0].signal(signal.SIGCONT)
            eventually(lambda: router.client.get("/status").json()["backends"][0]["usable"])
        router.stop()
        assert router.wait() == 0


def test_sigterm_lets_requests_end(processes):
    with RouterProcess(*options_of(processes("a"))) as router:
        streams = Streams(router, 3, max_tokens=60)
        eventually(lambda: streams.begun == 3)
        router.stop()
        assert check_ends(streams.end(), 60) == (3, 0)
        assert router.wait() == 0
    assert "stopped" in router.text


def test_sigterm_ends_what_takes_too_long_with_an_error(processes):
    with RouterProcess(*options_of(processes("a")), "--drain-seconds", "0.5") as router:
        streams = Streams(router, 3, max_tokens=100_000)
        eventually(lambda: streams.begun == 3)
        router.stop()
        assert check_ends(streams.end(), 100_000) == (0, 3)
        assert all("shutting down" in errors[0] for _, errors, _ in streams.ends.values())
        assert router.wait() == 0


def test_a_second_signal_does_not_wait_and_tells_clients(processes):
    with RouterProcess(*options_of(processes("a"))) as router:
        streams = Streams(router, 1, max_tokens=100_000)
        eventually(lambda: streams.begun == 1)
        router.stop()
        eventually(lambda: refuses(router.url))
        router.stop()
        assert router.wait() == 0
        assert check_ends(streams.end(), 100_000) == (0, 1)
        assert all("shutting down" in errors[0] for _, errors, _ in streams.ends.values())


def refuses(url):
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), PATIENCE).close()
    except ConnectionRefusedError:
        return True
    return False


def test_sighup_reads_the_file_again(processes, tmp_path):
    a, b = processes("a", "b")
    path = tmp_path / "router.toml"
    path.write_text(f'[[backends]]\nurl = "{a.url}"\n')
    with RouterProcess("--config", str(path), "--policy", "round-robin") as router:
        path.write_text(f'policy = "prefix"\n[[backends]]\nurl = "{b.url}"\n')
        router.process.send_signal(signal.SIGHUP)
        eventually(lambda: [x["url"] for x in router.client.get("/status").json()["backends"]] == [b.url])
        assert router.client.get("/status").json()["policy"] == "round-robin"  # the option wins
        assert router.client.post(COMPLETE, json={"model": "m", "prompt": "x"}).json()["from"] == "b"
        router.stop()
        assert router.wait() == 0


def test_heads_have_limits(processes):
    limits = "--max-header-bytes", "1000", "--h11-max-header-count", "10", "--header-timeout", "0.1"
    with RouterProcess(*options_of(processes("a")), *limits) as router:
        host, _, port = router.url.removeprefix("http://").partition(":")
        for head, status in ((b"x-long: " + b"a" * 1000, 431), (b"a: b\r\n" * 11, 431), (b"", 408)):
            with socket.create_connection((host, int(port)), PATIENCE) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head)
                assert connection.recv(1000).startswith(b"HTTP/1.1 %d " % status)
        assert router.client.get("/health").status_code == 200


def test_sighup_without_a_file_is_no_end(processes):
    with RouterProcess(*options_of(processes("a"))) as router:
        router.process.send_signal(signal.SIGHUP)
        eventually(lambda: "no configuration file" in router.text)
        assert router.client.get("/health").status_code == 200


def test_a_taken_address_is_an_error(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["route", "--backend", "http://127.0.0.1:1", "--port", port]) == 1
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use: give another --port, or 0" in said


def test_it_needs_no_torch():
    """All that the router imports, and then the command, in a process of its own."""
    code = (
        "import sys, tritonllm.route.run\n"
        "parts = 'engine', 'kernels', 'serve', 'models'\n"
        "above = {m for m in sys.modules if m.startswith(tuple('tritonllm.' + part for part in parts))}\n"
        "import tritonllm.cli\n"
        "heavy = {'torch', 'triton', 'transformers', 'numpy', 'fastapi'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {above}' if heavy or above else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_the_extra(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("tritonllm.route.")]:
        if name not in ("tritonllm.route.config",):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["route", "--backend", "http://127.0.0.1:1"]) == 1
    assert "pip install '.[route]'" in capsys.readouterr().err
