"""Processes that die and clients that leave: nobody waits for ever, and nothing is left behind."""

import dataclasses
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection

import httpx
import psutil
import pytest
from support.server import MODEL, ROOT, eventually, refuses, running_server, socket_folders
from support.streams import LONG, Stream, all_gone, leave
from support.waiting import PATIENCE

from tritonllm.http.server import listen
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.processes.run import bind, removing


def test_a_client_that_leaves_is_aborted(server):
    """Streams that are cut at random places, and whole answers that nobody waits for."""
    chance = random.Random(1)
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for _ in range(12):
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True, "n": 2}) as response:
                lines = response.iter_lines()
                for _ in range(chance.randrange(1, 8)):
                    next(lines)
    for _ in range(4):
        eventually(server.is_idle)
        leave(server.url, LONG, lambda: server.metric("vllm:num_requests_running") > 0)
    eventually(server.is_idle)
    assert server.metric("vllm:request_success_total") > 0


def test_many_short_requests_leave_no_files_open(server):
    process = psutil.Process(server.process.pid)

    def ask(count):
        for _ in range(count):
            assert server.client.post("/v1/completions", json={**LONG, "max_tokens": 1}).status_code == 200

    def needs_no_more():
        """As many requests again. A thread that is not quite free yet gets a fellow, in a pool that has its end."""
        before = process.num_fds(), len(process.threads())
        ask(60)
        eventually(lambda: process.num_fds() <= before[0])
        return len(process.threads()) <= before[1]

    ask(10)
    eventually(server.is_idle)
    eventually(needs_no_more)


def test_a_stopped_server_loses_nothing(server):
    """While the API process stands still the engine goes on; afterwards every stream is whole."""
    streams = [Stream(server, max_tokens=100 + i, return_token_ids=True) for i in range(3)]
    os.kill(server.process.pid, signal.SIGSTOP)
    time.sleep(1)
    os.kill(server.process.pid, signal.SIGCONT)
    tokens = []
    for stream in streams:
        events = stream.end()
        assert events[-1] == "[DONE]"
        tokens.append([t for e in events[:-1] for t in json.loads(e)["choices"][0]["token_ids"]])
    assert [len(ids) for ids in tokens] == [100, 101, 102]
    assert tokens[0] == tokens[1][:100] == tokens[2][:100]  # greedy, of one prompt


@contextmanager
def unread_stream(server, **more):
    """A stream that nobody reads."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({**LONG, "stream": True, **more}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        yield


def test_a_reader_that_stands_still_holds_nobody_up(server):
    with unread_stream(server, n=4, return_token_ids=True):
        eventually(lambda: server.metric("vllm:num_requests_running") > 0)
        assert server.client.post("/v1/completions", json={**LONG, "max_tokens": 3}).status_code == 200
    eventually(server.is_idle)


def test_a_killed_engine_ends_the_server():
    before = socket_folders()
    with running_server() as server:
        children = server.children()
        stream = Stream(server)
        os.kill(server.engine().pid, signal.SIGKILL)
        events = stream.end()
        assert server.wait() == 1
    error = json.loads(events[-2])["error"]
    assert error["code"] == "engine_dead"
    assert "killed by signal 9" in error["message"]
    assert "killed by signal 9" in server.text
    eventually(lambda: all_gone(children))
    assert socket_folders() <= before


def test_a_killed_server_ends_the_engine():
    before = socket_folders()
    with running_server() as server:
        children = server.children()
        stream = Stream(server)
        server.process.kill()
        stream.end()
        eventually(lambda: all_gone(children))
    eventually(lambda: socket_folders() <= before)


@pytest.mark.long
def test_sigterm_lets_requests_end_and_aborts_what_takes_too_long():
    before = socket_folders()
    with running_server("--drain-seconds", "10") as server:
        children = server.children()
        short = Stream(server, max_tokens=30)
        long = [Stream(server, n=8) for _ in range(3)]
        os.kill(server.engine().pid, signal.SIGTERM)  # as a service manager does: to all processes
        server.process.terminate()
        assert server.wait() == 0
        events = short.end()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert all(is_cut_off(stream) for stream in long)
    eventually(lambda: all_gone(children))
    assert socket_folders() <= before


def is_cut_off(stream):
    """It ends with an error that says so."""
    *_, error, end = stream.end()
    return end == "[DONE]" and json.loads(error)["error"]["code"] == "stopped"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.long
def test_a_second_sigterm_does_not_wait_and_tells_clients(processes):
    """Nor does it wait for one who does not read; and it is no error."""
    with running_server("--api-server-count", str(processes), "--drain-seconds", "10000") as server:
        children = server.children()
        streams = [Stream(server, n=8) for _ in range(2)]
        with ThreadPoolExecutor() as threads, unread_stream(server, n=8, logprobs=5):
            whole = threads.submit(httpx.post, f"{server.url}/v1/completions", json={**LONG, "n": 8}, timeout=PATIENCE)
            eventually(lambda: server.metric("vllm:num_requests_running") == 4 * 8)
            server.process.terminate()
            eventually(lambda: refuses(server))
            assert server.process.poll() is None, "the requests run"
            server.process.terminate()
            assert server.wait() == 0
            assert all(is_cut_off(stream) for stream in streams)
            assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "stopped")
        assert "Traceback" not in server.text and "stopped" in server.text
        eventually(lambda: all_gone(children))


STUCK = """
import atexit, sys, threading
from tritonllm.cli import main
from tritonllm.engine.text.input_processor import SURELY_QUICK, InputProcessor

encode = InputProcessor.encode

def stuck(self, text, add_special_tokens=True):
    if len(text) > SURELY_QUICK:
        print("a long text", file=sys.stderr, flush=True)
        threading.Event().wait()
    return encode(self, text, add_special_tokens)

InputProcessor.encode = stuck
if __name__ == "__main__":
    atexit.register(print, "said at the end", file=sys.stderr)
    sys.exit(main())
"""


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.long
def test_a_long_text_does_not_delay_the_end(processes, tmp_path):
    """A tokenizer cannot be broken off. Here it never ends, in its thread, for which Python waits."""
    (tmp_path / "stuck.py").write_text(STUCK)
    before, options = socket_folders(), ("--api-server-count", str(processes), "--drain-seconds", "0.5")
    with running_server(*options, program=[str(tmp_path / "stuck.py")]) as server, ThreadPoolExecutor() as threads:
        children = server.children()
        body = {"prompt": "long " * 20_000}
        answer = threads.submit(httpx.post, f"{server.url}/tokenize", json=body, timeout=PATIENCE)
        eventually(lambda: "a long text" in server.text)
        server.process.terminate()
        assert server.wait() == 0
        assert (answer.result().status_code, answer.result().json()["error"]["code"]) == (503, "stopped")
        for said in (
            ("INFO tritonllm.serve.processes.run: stopped", "said at the end") if processes == 1 else ("stopped",)
        ):
            assert said in server.text
        assert "Traceback" not in server.text and "killed" not in server.text
        eventually(lambda: all_gone(children))
        assert socket_folders() <= before


SLOW = """
import os, pathlib, sys, time
from tritonllm.cli import main
from tritonllm.engine.text.input_processor import SURELY_QUICK, InputProcessor
from tritonllm.serve.engines.tokenizing import Tokenizing

def told(word, method, size):
    def work(self, what, *args, **options):
        if size(what) > SURELY_QUICK:
            os.write(2, f"{word} a long text\\n".encode())  # in one piece: others write, too
            while word == "begins" and not pathlib.Path(__file__).with_name("go").exists():
                time.sleep(0.01)
        return method(self, what, *args, **options)
    return work

Tokenizing.with_tokenizer = told("takes", Tokenizing.with_tokenizer, int)
for name in ("encode", "encode_prompt"):
    setattr(InputProcessor, name, told("begins", getattr(InputProcessor, name), len))
if __name__ == "__main__":
    sys.exit(main())
"""


def test_long_texts_of_clients_that_have_left_are_not_tokenized(tmp_path):
    """They wait for their turn; whoever stays gets an answer."""
    (tmp_path / "slow.py").write_text(SLOW)
    text = "word " * 20_000
    messages = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    bodies = [
        ("/tokenize", {"prompt": text}),
        ("/tokenize", messages),
        ("/v1/chat/completions", messages),
        ("/v1/responses", {"input": text}),
        ("/v1/messages", {**messages, "max_tokens": 3}),
        ("/v1/messages/count_tokens", messages),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": text, "add_special_tokens": False}),
    ]
    with running_server(program=[str(tmp_path / "slow.py")]) as server, ThreadPoolExecutor() as threads:

        def tokenize():
            return httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=PATIENCE)

        first = threads.submit(tokenize)
        eventually(lambda: "begins a long text" in server.text)
        impatient = [HTTPConnection(server.url.removeprefix("http://")) for _ in bodies]
        for connection, (path, body) in zip(impatient, bodies, strict=True):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        eventually(lambda: server.text.count("takes a long text") == 1 + len(bodies))
        for connection in impatient:
            connection.close()
        last = threads.submit(tokenize)
        eventually(lambda: len(re.findall(r" /\S+ 499 ", server.text)) == len(bodies))
        (tmp_path / "go").touch()
        assert first.result().status_code == last.result().status_code == 200
        assert server.text.count("begins a long text") == 2


def test_a_port_that_is_taken(server):
    port = server.url.rpartition(":")[2]
    with pytest.raises(AssertionError, match=r"error: cannot listen on .*: give another --port, or 0 for a free one"):
        running_server("--port", port).__enter__()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_a_server_has_before_it_listens(host):
    """It loads its model meanwhile. Connections that are left of a server that has ended do not keep its port."""
    config = ServerConfig(model_names=("m",), host=host, port=0)
    try:
        first = bind(config)
    except OSError:
        if host == "::1":
            pytest.skip("this machine has no IPv6")
        raise
    config = dataclasses.replace(config, port=first.getsockname()[1])
    where = re.escape(f"[{host}]" if ":" in host else host)
    with pytest.raises(OSError, match=rf"cannot listen on {where}:{config.port}: .*: give another --port"):
        bind(config)
    listen(first)
    with pytest.raises(OSError, match=r"cannot listen on .*: give another --port"):
        bind(config)
    with socket.create_connection(first.getsockname()[:2]) as client:
        first.accept()[0].close()
        assert client.recv(1) == b""
    first.close()
    with bind(config) as second:
        listen(second)


def test_two_that_got_one_port():
    """As on a system that lets them, or beside connections that are left of a third: the second says so."""
    with socket.socket() as first, socket.socket() as second:
        for sock in (first, second):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        try:
            second.bind(first.getsockname())
        except OSError:
            pytest.skip("this system lets nobody have a port that is bound")
        listen(first)
        with pytest.raises(OSError, match=r"cannot listen on 127.0.0.1:\d+: .*: give another --port"):
            listen(second)


@pytest.mark.parametrize("kind", ["file", "socket", "socket of a stopped server", "link to a socket that was left"])
def test_a_path_that_is_taken(tmp_path, kind):
    path, left = tmp_path / "taken", tmp_path / "left"
    with socket.socket(socket.AF_UNIX) as other, ExitStack() as clients:
        if kind == "file":
            path.write_text("kept")
        elif kind.startswith("link"):
            other.bind(str(left))
            path.symlink_to(left)
        else:
            other.bind(str(path))
            other.listen(0)
        while kind.endswith("stopped server"):  # until its queue is full
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            if client.connect_ex(str(path)):
                break
        why = "another server listens there" if kind.startswith("socket") else "the file exists and is no socket"
        with pytest.raises(OSError, match=f"cannot listen on unix:{path}: .*: {why}: give another --uds"):
            bind(ServerConfig(model_names=("m",), uds=str(path)))
    assert kind != "file" or path.read_text() == "kept"
    assert not kind.startswith("link") or path.is_symlink()


def test_only_its_own_socket_is_removed(tmp_path):
    config = ServerConfig(model_names=("m",), uds=str(tmp_path / "socket"))
    for replaced in (False, True):
        with bind(config) as first, removing(config.uds):
            assert os.path.exists(config.uds)
            if replaced:  # an operator has removed it, and started another server
                os.unlink(config.uds)
                second = bind(config)
        assert first.fileno() < 0 and os.path.exists(config.uds) == replaced
    second.close()
    bind(config).close()  # what a killed server has left is nobody's


def test_sigterm_while_the_model_is_loaded():
    """It ends both processes at once, and not as an interruption."""
    before = socket_folders()
    command = [sys.executable, "-m", "tritonllm", "serve", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    parent = psutil.Process(process.pid)
    eventually(lambda: socket_folders() != before and len(parent.children(recursive=True)) >= 2)
    children = parent.children(recursive=True)
    process.terminate()
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    assert "stopped while the model was loaded" in log and "interrupted" not in log
    eventually(lambda: all_gone(children))
    assert socket_folders() <= before
