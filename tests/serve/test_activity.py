"""``GET /activity``, and the dashboard of a server: ours, one that tells totals only, one that goes and comes back."""

import asyncio
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.engines import greedy, tiny_llm
from support.server import MODEL, eventually, running_server
from support.streams import Stream
from support.waiting import PATIENCE

from tritonllm.cli import main
from tritonllm.serve.engines import activity
from tritonllm.serve.engines.activity import Activity
from tritonllm.teach.dashboard.app import Dashboard
from tritonllm.teach.dashboard.source_server import NO_ACTIVITY, NO_KEY, ServerSource
from tritonllm.telemetry.snapshot import View, from_json

PROMPT = list(range(5, 25))
BODY = {"model": MODEL, "prompt": "There was a fox named", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def told(engine_activity, **view):
    return from_json(engine_activity.tell(view))


def test_the_engine_is_followed_only_while_somebody_asks(monkeypatch):
    engine = tiny_llm(async_scheduling=False).engine
    asked = Activity(engine)
    engine.add_request("a", PROMPT, greedy(30))
    engine.step()
    assert not engine._events.heard and not asked.is_followed
    first = told(asked, rows=5)
    assert engine._events.heard and asked.is_followed
    assert [(line.request_id, line.output_tokens) for line in first.requests] == [("a", 1)]
    engine.step()
    second = told(asked)
    assert [(line.state, line.output_tokens) for line in second.requests] == [("decode", 2)]
    assert (second.counters.steps, second.counters.generated_tokens, second.counters.prompt_tokens) == (2, 2, 20)
    asked.rest()
    assert asked.is_followed
    monkeypatch.setattr(activity, "LINGER", -1.0)
    asked.rest()
    assert not engine._events.heard and not asked.is_followed
    engine.step()
    third = told(asked)
    assert (third.counters.steps, third.requests[0].output_tokens, len(third.steps)) == (3, 3, 0)
    for wrong in ({"cells": 0}, {"rows": 10**9}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            asked.tell(wrong)


def get(server, query=""):
    return server.client.get(f"/activity{query}")


def test_what_a_server_tells(server):
    streams = [Stream(server, max_tokens=600) for _ in range(3)]
    seen = []
    while any(stream.thread.is_alive() for stream in streams):
        seen.append(from_json(get(server, "?rows=50&cells=64&steps=8").json()))
    busy = max(seen, key=lambda one: (one.counters.running, len(one.steps)))
    states = [line.state for line in busy.requests]
    assert busy.counters.running == states.count("decode") == 3 and busy.used_part > 0
    assert busy.cells.blocks_per_cell > 1 and len(busy.cells.kinds) <= 64 and len(busy.steps) == 8
    eventually(server.is_idle)
    last = from_json(get(server).json())
    assert last.counters.generated_tokens == server.metric("vllm:generation_tokens_total")
    assert last.counters.steps == server.metric("tritonllm:steps_total")
    assert (last.counters.running, last.counters.used_blocks) == (0, 0)
    assert not any("/activity" in line for line in server.log), "the log is not filled with the questions"


@pytest.mark.parametrize("query", ["?cells=0", "?rows=-1", "?steps=x", "?replica=1", "?replica=-1", "?cells=99999999"])
def test_questions_that_are_wrong(server, query):
    reply = get(server, query)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def look_at(source, script, size=(80, 24)):
    """Open the screen without a terminal, and do what the script says."""

    async def run():
        app = Dashboard(source, every=0.05)
        async with app.run_test(size=size) as pilot:
            await script(app, pilot)

    with source:
        asyncio.run(run())


async def until(pilot, condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await pilot.pause(0.05)


def text(app, name):
    panel = app.query_one(f"#{name}")
    return f"{panel.border_title or ''}\n{panel.render().plain}"


def test_the_dashboard_of_a_server(server):
    async def script(app, pilot):
        await until(pilot, lambda: "connected" in text(app, "headline"))
        stream = Stream(server, max_tokens=400)
        await until(pilot, lambda: app.snapshot.counters.running == 1 and app.snapshot.counters.used_blocks)
        await until(pilot, lambda: "decode" in text(app, "requests"))
        await pilot.resize_terminal(140, 40)
        await until(pilot, lambda: len(app.snapshot.cells.kinds) > 800)
        await pilot.press("down", "up", "t", "space", "n", "plus")
        stream.end()
        await until(pilot, lambda: app.snapshot.counters.running == 0)
        assert "tokens of steps" in text(app, "steps") and " a cell\n" in text(app, "pool")
        await pilot.press("q")

    look_at(ServerSource(server.url + "/v1/", every=0.1), script)


def test_keys():
    with running_server("--api-key", "secret") as server:
        assert get(server).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert server.client.get("/activity", headers=headers).json()["num_requests"] == 0
        with ServerSource(server.url, every=0.05) as source:
            eventually(lambda: source.look(View()).note == NO_KEY)
            assert source.status().kind == "running" and source.look(View()).requests is None
        with ServerSource(server.url, "secret", every=0.05) as source:
            eventually(lambda: source.look(View()).cells is not None)

            async def script(app, pilot):
                await until(pilot, lambda: app.snapshot.cells is not None)
                server.close()
                await until(pilot, lambda: "trying again" in text(app, "headline"))

        look_at(ServerSource(server.url, "secret", every=0.05), script)


METRICS = """# HELP vllm:num_requests_running Sequences in execution.
vllm:num_requests_running{model_name="m",engine="0"} 3.0
vllm:num_requests_running{model_name="m",engine="1"} 1.0
vllm:num_requests_waiting{model_name="m",engine="0"} 2.0
vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.25
vllm:generation_tokens_total{model_name="m",engine="0"} %d
vllm:prefix_cache_queries_total{model_name="m",engine="0"} 100.0
vllm:prefix_cache_hits_total{model_name="m",engine="0"} 40.0
"""


class OtherServer(ThreadingHTTPServer):
    """Has ``/metrics`` and nothing else, as vLLM's."""

    tokens = 1000
    daemon_threads = True


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.tokens += 50
        body = (METRICS % self.server.tokens).encode()
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def start_other(port=0):
    server = OtherServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


def stop(server):
    server.shutdown()
    server.server_close()


def test_a_server_that_tells_totals_only_goes_and_comes_back():
    other = start_other()
    port = other.server_address[1]

    async def script(app, pilot):
        await until(pilot, lambda: NO_ACTIVITY in text(app, "headline") and app.snapshot.tokens_per_second > 0)
        counters = text(app, "counters")
        assert "4 running" in counters and "2 in the queue" in counters and "40 of 100 tokens (40 %)" in counters
        assert "25.0 % used" in text(app, "pool") and "█" in text(app, "pool")
        assert "no single requests" in text(app, "requests") and "no single steps" in text(app, "steps")
        stop(other)
        await until(pilot, lambda: "trying again" in text(app, "headline"))
        assert "4 running" in text(app, "counters"), "what was seen last stays"
        again = start_other(port)
        await until(pilot, lambda: "connected" in text(app, "headline"))
        stop(again)

    look_at(ServerSource(f"http://127.0.0.1:{port}", every=0.05), script)


def test_a_server_that_never_was():
    other = start_other()
    stop(other)

    async def script(app, pilot):
        await until(pilot, lambda: "no answer yet" in text(app, "headline") and "refused" in text(app, "headline"))
        assert "no requests yet" in text(app, "requests")

    look_at(ServerSource(f"http://127.0.0.1:{other.server_address[1]}", every=0.05), script)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--url", "localhost:8000"], "--url must begin with http"),
        (["--every", "0"], "--every must be"),
        (["model"], "unrecognized"),
        ([], "needs a terminal"),
    ],
)
def test_wrong_usage(argv, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["dashboard", *argv])
    assert stopped.value.code == 2 and says in capsys.readouterr().err
