"""``--restart N``: engines that die are started anew."""

import asyncio
import os
import signal
import threading
from array import array

import pytest
from support.engines import tiny_checkpoint
from support.server import eventually, running_server, socket_folders
from support.streams import Stream, all_gone
from support.waiting import PATIENCE

from tritonllm import AsyncEngineArgs, AsyncLLM, SamplingParams
from tritonllm.engine.data.outputs import CompletionOutput, RequestOutput
from tritonllm.engine.data.request import PACKED
from tritonllm.engine.data.stats import EngineStats
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.engine_client import EngineDeadError, EngineLink
from tritonllm.serve.engines.messages import (
    Abort,
    Add,
    Call,
    EngineReady,
    News,
    PoolingFacts,
    RequestFailure,
)
from tritonllm.serve.engines.replicas import Replicas
from tritonllm.serve.engines.restarts import WINDOW, Restarts


class Link(EngineLink):
    """To an engine that records what it is sent, and dies when it is told to."""

    def __init__(self):
        stats = EngineStats(num_blocks=64, num_free_blocks=64)
        super().__init__(
            "", EngineReady(None, None, False, 100, 64, 4, [], 0, {}, stats, PoolingFacts([], True, 0, [], 0))
        )
        self.sent, self.closed = [], False

    def attach(self, on_news, on_death):
        self.tell, self.die = on_news, on_death

    async def _watch(self, on_death):
        raise AssertionError("nobody listens")

    def send(self, message):
        self.sent.append(message)

    def close(self):
        self.closed = True


class Start:
    """An engine on its way, until somebody says how that ends."""

    def __init__(self):
        self._ended, self._found = threading.Event(), None
        self.killed = False

    def end(self, found):
        self._found = found
        self._ended.set()

    def link(self):
        assert self._ended.wait(PATIENCE)
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def kill(self):
        self.killed = True
        if not self._ended.is_set():
            self.end(RuntimeError("killed"))


class Starts(list):
    """Those that were asked for: numbers of engines, and the starts."""

    def __call__(self, number):
        self.append((number, Start()))
        return self[-1][1]


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def test_no_more_than_so_many_within_ten_minutes(caplog):
    async def begin():
        starts, now = Starts(), [0.0]
        restarts = Restarts(2, starts, lambda: now[0])
        begun = []
        for now[0] in (0.0, 1.0, 2.0, WINDOW - 0.5, WINDOW + 0.5, WINDOW + 0.6):
            begun.append(restarts.begin(len(begun), print))
        restarts.close()
        assert all(start.killed for _, start in starts) and not restarts.begin(0, print)
        return begun, [number for number, _ in starts]

    assert asyncio.run(begin()) == ([True, True, False, False, True, False], [0, 1, 4])
    assert caplog.text.count("that was done 2 times within 600 s") == 3


def test_what_arrives_after_the_end_is_closed():
    async def begin():
        starts, arrived = Starts(), []
        restarts = Restarts(1, starts)
        restarts.begin(0, arrived.append)
        link = Link()
        starts[0][1].end(link)  # it was ready before it could be killed
        restarts.close()
        await until(lambda: link.closed)
        return arrived

    assert asyncio.run(begin()) == []


def test_the_end_waits_for_what_a_killed_start_leaves():
    """Python may end next, and with it the thread that removes the sockets' folder. To stop starts waits for nobody."""
    removed, removes = [], threading.Event()

    class Slow(Start):
        def link(self):
            try:
                return super().link()
            finally:
                assert removes.wait(PATIENCE)
                removed.append(self)

    async def begin():
        slows = [Slow(), Slow()]
        restarts = Restarts(2, slows.__getitem__)
        restarts.begin(0, print)
        restarts.begin(1, print)
        restarts.stop()
        assert not removed and all(slow.killed for slow in slows)
        threading.Timer(0.2, removes.set).start()
        restarts.close()
        return len(removed)

    assert asyncio.run(begin()) == 2


def in_loop(work, count=2, most=3):
    """Run a coroutine with replicas, their links, starts, news and deaths."""

    async def run():
        links, starts, news, deaths = [Link() for _ in range(count)], Starts(), [], []
        replicas = Replicas(links, 4, Restarts(most, starts))
        replicas.attach(news.append, deaths.append)
        try:
            await work(replicas, links, starts, news, deaths)
        finally:
            replicas.close()

    asyncio.run(run())


def add(request_id):
    return Add(request_id, None, array(PACKED, [1, 2, 3]).tobytes(), None, {}, 0)


def test_one_of_two_comes_back(caplog):
    async def work(replicas, links, starts, news, deaths):
        first, second = links
        for name in "ab":
            replicas.send(add(name))
        first.tell(News([], EngineStats(steps=7, num_blocks=64, num_running=1)))
        second.tell(News([], EngineStats(steps=1, num_blocks=64)))
        first.die("killed")
        assert first.closed and replicas.living == [False, True] and not deaths
        assert news[-1].updates == [RequestFailure("a", "replica 0: killed", "lost")]
        for name in "cd":
            replicas.send(add(name))
        assert [m.request_id for m in second.sent] == ["b", "c", "d"]
        ((number, start),) = starts
        again = Link()
        start.end(again)
        await until(lambda: all(replicas.living))
        assert (number, replicas.restarted) == (0, [1, 0])
        replicas.send(add("e"))
        assert [m.request_id for m in again.sent] == ["e"], "it has the least to do"
        end = RequestOutput("e", None, (), None, [CompletionOutput(0, "", [7], finish_reason="length")], True)
        again.tell(News([end], EngineStats(steps=2, num_blocks=64)))
        assert news[-1].stats.steps == 10 and news[-1].stats.num_blocks == 128, "what it had counted stays"
        again.die("killed again")
        assert replicas.stats[0].steps == 9 and len(starts) == 2

    in_loop(work)
    assert "1 of 2 go on, and it is started again" in caplog.text and "replica 0 runs again" in caplog.text


def test_while_none_lives_requests_are_refused_and_then_taken():
    async def work(replicas, links, starts, news, deaths):
        replicas.send(add("a"))
        replicas.send(Call(1, "wake_up", {}))
        links[0].die("killed")
        assert (
            news[-1].failures == [RequestFailure("a", "replica 0: killed", "lost")]
            and news[-1].answers[0].error == "replica 0: killed"
        )
        assert replicas.failure is None and replicas.pid is None and not deaths
        for message in (add("b"), Call(2, "wake_up", {}), Call(3, "activity", {"view": {}})):
            with pytest.raises(EngineDeadError, match="is started again"):
                replicas.send(message)
        replicas.send(Abort(["a"]))  # by somebody who has not heard yet
        again = Link()
        starts[0][1].end(again)
        await until(lambda: any(replicas.living))
        replicas.send(add("b"))
        assert [m.request_id for m in again.sent] == ["b"]

    in_loop(work, count=1)


def test_a_start_that_fails_is_tried_again_until_no_more_is_allowed():
    async def work(replicas, links, starts, news, deaths):
        links[0].die("killed")
        starts[0][1].end(RuntimeError("no memory"))
        await until(lambda: len(starts) == 2)
        assert replicas.failure is None
        starts[1][1].end(ValueError("no model"))
        await until(lambda: deaths)
        assert deaths == ["the engine did not start again: no model"] == [replicas.failure]
        assert len(starts) == 2
        with pytest.raises(EngineDeadError, match="no model"):
            replicas.send(add("b"))

    in_loop(work, count=1, most=2)


def test_after_the_last_restart_the_link_has_failed():
    async def work(replicas, links, starts, news, deaths):
        links[0].die("killed")
        again = Link()
        starts[0][1].end(again)
        await until(lambda: any(replicas.living))
        again.die("killed again")
        assert deaths == ["killed again"] and len(starts) == 1

    in_loop(work, count=1, most=1)


def test_other_weights_end_it():
    """An engine that is started anew has the weights of the beginning."""

    async def work(replicas, links, starts, news, deaths):
        links[0].die("killed")
        replicas.send(Call(1, "reload_weights", {}))
        assert starts[0][1].killed and not replicas.living[0]
        links[1].die("killed, too")
        assert deaths == ["killed, too"] and len(starts) == 1

    in_loop(work)


def test_who_ends_ends_what_is_on_its_way():
    async def work(replicas, links, starts, news, deaths):
        links[0].die("killed")
        replicas.close()
        assert starts[0][1].killed
        await asyncio.sleep(0.05)
        assert not deaths and len(starts) == 1

    in_loop(work)


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="--restart must be at least 0, got -1"):
        ServerConfig(model_names=("a",), restart=-1)
    with pytest.raises(ValueError, match="leave --api-server-count at 1"):
        ServerConfig(model_names=("a",), restart=1, api_server_count=2)
    config = AsyncEngineArgs(model=str(tiny_checkpoint())).create_engine_config()
    for wrong in (-1, True, 1.5):
        with pytest.raises(ValueError, match="max_restarts must be an integer of at least 0"):
            AsyncLLM(config, max_restarts=wrong)


@pytest.mark.long
def test_a_server_heals_and_gives_up_in_the_end(llm):
    before = socket_folders()
    with running_server("--restart", "1") as server:
        stream = Stream(server, prompt="3 + 4 =", max_tokens=2000)
        children = server.children()
        os.kill(server.engine().pid, signal.SIGKILL)
        assert sum('"error"' in event for event in stream.end()) == 1
        eventually(lambda: server.client.get("/health").status_code == 503)
        body = {"model": "demo", "prompt": "There was", "max_tokens": 4, "temperature": 0}
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
        assert "is started again" in answer.json()["error"]["message"] and answer.headers["Retry-After"]
        eventually(lambda: server.client.get("/ready").status_code == 200)
        (expected,) = llm.generate("There was", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        answer = server.client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == expected.outputs[0].text
        assert server.metric("tritonllm:engine_restarts_total") == 1
        children += server.children()
        os.kill(server.engine().pid, signal.SIGKILL)
        assert server.wait() == 1
        eventually(lambda: all_gone(children))
        assert "not started again: that was done 1 times" in server.text
    assert socket_folders() <= before


@pytest.mark.long
def test_a_server_can_be_stopped_while_an_engine_starts():
    before = socket_folders()
    with running_server("--restart", "5") as server:
        children = server.children()
        os.kill(server.engine().pid, signal.SIGKILL)
        eventually(lambda: server.client.get("/health").status_code == 503)
        eventually(lambda: len([child for child in server.children() if child not in children]) > 0)
        children += server.children()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        eventually(lambda: all_gone(children))
    assert socket_folders() <= before
