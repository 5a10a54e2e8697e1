"""The loop of the engine process, with a socket that is a list."""

import threading
import time
from array import array
from collections import deque
from concurrent.futures import Future

import msgspec
import pytest
import zmq
from support.engines import greedy, tiny_llm
from support.waiting import eventually

from tritonllm.engine.data.request import PACKED
from tritonllm.engine.data.results import StepTimeoutError
from tritonllm.serve.engines import engine_process
from tritonllm.serve.engines.engine_process import EngineLoop
from tritonllm.serve.engines.messages import Abort, Add, Call, RequestFailure, Stop, decode_news, pack_params

PROMPT = list(range(5, 25))
MINE, THEIRS = b"api-1", b"api-2"


class Socket:
    """Gives the messages that were put in; after the last one, the order to stop."""

    def __init__(self, *messages):
        self.coming = deque(messages)
        self.sent = {MINE: [], THEIRS: []}

    def recv_multipart(self, flags):
        if self.coming and self.coming[0] is None:  # nothing has arrived: let a step run
            self.coming.popleft()
            raise zmq.Again
        if not self.coming:
            if flags:
                raise zmq.Again
            return [MINE, msgspec.msgpack.encode(Stop())]
        client, message = self.coming.popleft()
        return [client, msgspec.msgpack.encode(message)]

    def send_multipart(self, parts):
        client, data = parts
        self.sent[client].append(decode_news(data))

    def updates(self, client=MINE):
        return [update for news in self.sent[client] for update in news.updates]


def add(request_id, max_tokens=6, **more):
    ids = array(PACKED, more.pop("prompt", PROMPT)).tobytes()
    return Add(request_id, None, ids, None, pack_params(greedy(max_tokens, **more)), 0)


def last_of(updates, request_id):
    return [update for update in updates if update.request_id == request_id][-1]


def everything_is_free(engine):
    return engine.stats.num_free_blocks == engine.stats.num_blocks and not engine.has_unfinished_requests()


def test_what_was_saved_is_told_although_no_step_follows():
    """The connector answers only once the engine has nothing to do and waits for messages."""
    transfer = {"kv_connector": "support.kv_connectors:SilentConnector", "kv_role": "kv_producer"}
    engine = tiny_llm(kv_offloading_size=0.001, kv_transfer_config=transfer).engine

    class Waiting(Socket):
        def poll(self, milliseconds):
            assert not self.coming and milliseconds > 0
            for asked in engine._transfer.connector.asked:
                asked.future.set_result(len(asked.keys))
            engine._transfer.connector.asked.clear()
            return 0

    socket = Waiting((MINE, add("a")), None)
    EngineLoop(engine, socket).run()
    assert socket.sent[MINE][-1].stats.kv_saved_blocks == 6 and not socket.sent[MINE][-1].updates


def test_each_client_gets_its_own():
    engine = tiny_llm().engine
    socket = Socket((MINE, add("a")), (THEIRS, add("b", 3)), (MINE, add("c", 2)))
    EngineLoop(engine, socket).run()
    assert {update.request_id for update in socket.updates(MINE)} == {"a", "c"}
    assert {update.request_id for update in socket.updates(THEIRS)} == {"b"}
    assert last_of(socket.updates(MINE), "a").finished
    assert last_of(socket.updates(THEIRS), "b").outputs[0].finish_reason == "length"
    assert everything_is_free(engine)


def test_a_burst_of_requests_does_not_hold_up_those_that_run(monkeypatch):
    """Each of them takes as long as may be spent on messages between two steps."""
    monkeypatch.setattr(engine_process, "TAKING", 0.0)
    engine, told = tiny_llm().engine, []

    class Watched(Socket):
        def recv_multipart(self, flags):
            told.append(len(self.updates()))
            return super().recv_multipart(flags)

    socket = Watched((MINE, add("a", 30)), *((MINE, add(f"b{i}", 3)) for i in range(10)))
    EngineLoop(engine, socket).run()
    assert told[0] < told[5] < told[9], "a had tokens while the others came"
    for request_id in ("a", *(f"b{i}" for i in range(10))):
        assert last_of(socket.updates(), request_id).finished
    assert everything_is_free(engine)


def test_a_client_aborts_only_its_own():
    engine = tiny_llm().engine
    socket = Socket((MINE, add("a", 30)), None, (THEIRS, Abort(["a"])), None, (MINE, Abort(["a", "nobody"])))
    EngineLoop(engine, socket).run()
    last = last_of(socket.updates(), "a")
    assert last.outputs[0].finish_reason == "abort"
    assert socket.updates(THEIRS) == []
    assert everything_is_free(engine)


def test_what_the_engine_refuses_ends_that_request_only():
    engine = tiny_llm().engine
    socket = Socket((MINE, add("bad", prompt=[])), (MINE, add("good")), (MINE, add("good")))
    EngineLoop(engine, socket).run()
    refused = [update for update in socket.updates() if isinstance(update, RequestFailure)]
    assert [update.request_id for update in refused] == ["bad", "good"]
    assert "empty" in refused[0].why
    assert "in use" in refused[1].why
    assert last_of(socket.updates(), "good").finished


def test_a_fault_while_a_request_is_taken_ends_that_request_only(monkeypatch):
    engine = tiny_llm().engine
    take = engine.inputs.take_params

    def broken(params):
        if params.max_tokens == 3:
            raise TypeError("a fault of ours")
        return take(params)

    monkeypatch.setattr(engine.inputs, "take_params", broken)
    socket = Socket((MINE, add("a")), None, (MINE, add("bad", 3)), (MINE, add("b", 4)))
    EngineLoop(engine, socket).run()
    (bad,) = [update for update in socket.updates() if update.request_id == "bad"]
    assert bad.finished and bad.error == "TypeError: a fault of ours"
    assert [last_of(socket.updates(), one).outputs[0].finish_reason for one in "ab"] == ["length", "length"]
    assert everything_is_free(engine)


def slowly_parsed(engine, monkeypatch, grammar):
    """Requests for three tokens wait for this grammar."""
    monkeypatch.setattr(engine.inputs, "parse", lambda params: grammar if params.max_tokens == 3 else None)


def once(condition, action, *arguments):
    """In a thread."""

    def wait():
        eventually(condition)
        time.sleep(0.1)  # whoever waits for the action does so by then
        action(*arguments)

    threading.Thread(target=wait, daemon=True).start()


def test_steps_do_not_wait_for_a_grammar_that_is_parsed(monkeypatch):
    """And a request does, also when nothing else is left to do."""
    engine, grammar = tiny_llm().engine, Future()
    slowly_parsed(engine, monkeypatch, grammar)
    socket = Socket((MINE, add("slow", 3)), (MINE, add("a", 5)), None, (MINE, add("b", 4)))
    ended = lambda: {update.request_id for update in socket.updates() if update.finished}  # noqa: E731
    once(lambda: ended() == {"a", "b"}, grammar.set_result, None)
    EngineLoop(engine, socket).run()
    order = [update.request_id for update in socket.updates()]
    assert order.index("slow") > max(place for place, one in enumerate(order) if one in "ab")
    assert [last_of(socket.updates(), one).outputs[0].finish_reason for one in ("slow", "a", "b")] == ["length"] * 3
    assert everything_is_free(engine)


def test_a_request_that_waits_for_its_grammar_can_be_aborted(monkeypatch):
    """By its own client. It ends when its grammar is parsed, before it has computed anything."""
    engine, grammar = tiny_llm().engine, Future()
    slowly_parsed(engine, monkeypatch, grammar)
    socket = Socket(
        (MINE, add("slow", 3)), (THEIRS, Abort(["slow"])), None, (MINE, Abort(["slow"])), (MINE, add("a", 2))
    )
    once(lambda: not socket.coming, grammar.set_result, None)
    EngineLoop(engine, socket).run()
    (slow,) = [update for update in socket.updates() if update.request_id == "slow"]
    assert slow.finished and slow.outputs[0].finish_reason == "abort" and not slow.outputs[0].token_ids
    assert last_of(socket.updates(), "a").outputs[0].finish_reason == "length"
    assert everything_is_free(engine)


def test_an_id_that_comes_again_waits_for_the_one_before(monkeypatch):
    """So that its client hears of the end of that first."""
    engine, grammar = tiny_llm().engine, Future()
    slowly_parsed(engine, monkeypatch, grammar)
    socket = Socket((MINE, add("x", 3)), (MINE, Abort(["x"])), (MINE, add("x", 2)), None, (MINE, add("a", 2)))
    once(lambda: not socket.coming, grammar.set_result, None)
    EngineLoop(engine, socket).run()
    first, *more = [update for update in socket.updates() if update.request_id == "x"]
    assert first.finished and first.outputs[0].finish_reason == "abort"
    assert more[-1].outputs[0].finish_reason == "length" and not any(update.finished for update in more[:-1])
    assert everything_is_free(engine)


@pytest.mark.parametrize("abort", [False, True])
def test_a_call_that_waits_for_requests_waits_for_those_that_are_parsed(abort, monkeypatch):
    engine, grammar = tiny_llm().engine, Future()
    slowly_parsed(engine, monkeypatch, grammar)
    ended = []
    monkeypatch.setattr(engine, "reload_weights", lambda: ended.append(len(socket.updates())))
    call = Call(1, "reload_weights", {}, abort)
    socket = Socket((MINE, add("slow", 3)), (MINE, call), (MINE, add("late", 2)), None)
    once(lambda: not socket.coming, grammar.set_result, None)
    EngineLoop(engine, socket).run()
    slow, late = last_of(socket.updates(), "slow"), last_of(socket.updates(), "late")
    assert slow.outputs[0].finish_reason == ("abort" if abort else "length")
    assert late.kind == "asleep" and "until reload_weights is done" in late.why
    assert ended == [len(socket.updates())]  # after the last of them
    assert everything_is_free(engine)


def test_what_is_wrong_with_a_grammar_is_said_once_it_is_parsed(monkeypatch):
    engine, grammar = tiny_llm().engine, Future()
    slowly_parsed(engine, monkeypatch, grammar)
    monkeypatch.setattr(engine.inputs, "grammar", lambda params: grammar.result() if params.max_tokens == 3 else None)
    socket = Socket((MINE, add("slow", 3)), (MINE, add("a", 5)))
    once(lambda: not socket.coming, grammar.set_exception, ValueError("structured_outputs: wrong"))
    EngineLoop(engine, socket).run()
    assert last_of(socket.updates(), "slow") == RequestFailure("slow", "structured_outputs: wrong")
    assert last_of(socket.updates(), "a").outputs[0].finish_reason == "length"
    assert everything_is_free(engine)


def failing(engine, monkeypatch, errors):
    """The engine, whose next launches raise these; ``None`` lets one through."""
    launch, coming = engine._runner.launch, deque(errors)

    def broken(plan):
        error = coming.popleft() if coming else None
        if error is not None:
            raise error
        return launch(plan)

    monkeypatch.setattr(engine._runner, "launch", broken)
    return engine


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(monkeypatch):
    engine = failing(tiny_llm().engine, monkeypatch, [None, RuntimeError("lost"), None, None, RuntimeError("again")])
    socket = Socket((MINE, add("a")), None, None, None, (MINE, add("b")), None, None, None, None, (MINE, add("c")))
    EngineLoop(engine, socket).run()
    ends = {one: last_of(socket.updates(), one) for one in "abc"}
    assert "lost" in ends["a"].error
    assert ends["a"].outputs[0].finish_reason == "error"
    assert "again" in ends["b"].error
    assert ends["c"].outputs[0].finish_reason == "length"
    assert everything_is_free(engine)


@pytest.mark.parametrize(
    "errors", [[RuntimeError("one"), RuntimeError("two")], [StepTimeoutError("no answer")]], ids=["twice", "timeout"]
)
def test_an_engine_that_cannot_go_on_ends(monkeypatch, errors):
    engine = failing(tiny_llm().engine, monkeypatch, errors)
    socket = Socket((MINE, add("a")), None, None, (MINE, add("b")))
    with pytest.raises(type(errors[-1]), match=str(errors[-1])):
        EngineLoop(engine, socket).run()


def test_statistics_come_without_updates():
    engine = tiny_llm().engine
    socket = Socket((MINE, add("a", 30)), None, (MINE, Abort(["a"])), (THEIRS, Abort(["nobody"])))
    EngineLoop(engine, socket).run()
    assert socket.sent[THEIRS][-1].stats.num_free_blocks == engine.stats.num_blocks
    assert socket.sent[THEIRS][-1].stats == engine.stats
