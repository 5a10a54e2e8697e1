"""Several engines as one: what is handed over and when, what becomes of failures, and how it ends. No process."""

import gc
import time

import pytest
from support.waiting import PATIENCE

from tritonllm import SamplingParams
from tritonllm.config.engine import EngineConfig
from tritonllm.engine.data.outputs import CompletionOutput, RequestOutput
from tritonllm.engine.data.stats import EngineStats
from tritonllm.offline.engines import Engines
from tritonllm.offline.interface import RequestRefusedError
from tritonllm.serve.engines.engine_client import EngineDeadError
from tritonllm.serve.engines.messages import Abort, Add, EngineReady, News, PoolingFacts, RequestFailure
from tritonllm.serve.engines.replicas import Replicas

SEATS = 2  # of each engine, so 4 run at once, and 8 are handed over
PARAMS = SamplingParams(max_tokens=1)


class Link:
    """An engine that records what it is sent."""

    def __init__(self):
        stats = EngineStats(num_blocks=64, num_free_blocks=64)
        self.ready = EngineReady(
            None, None, False, 100, 64, SEATS, [], 0, {}, stats, PoolingFacts(["embed"], True, 0, [], 0)
        )
        self.sent, self.closed, self.failure, self.pid = [], False, None, 1

    def attach(self, on_news, on_death):
        self.on_news, self.on_death = on_news, on_death

    def send(self, message):
        self.sent.append(message)

    def close(self):
        self.closed = True


@pytest.fixture
def links():
    return [Link(), Link()]


@pytest.fixture
def engines(links):
    made = Engines(EngineConfig.from_kwargs(model="none", data_parallel_size=2), Replicas(links, block_tokens=4))
    yield made
    made.shutdown()


def in_thread(engines, work, *args):
    """Let something happen in the thread that talks to the engines."""
    engines._talk._loop.call_soon_threadsafe(work, *args)


def tell(engines, link, request_id, *, error=None):
    output = RequestOutput(
        request_id, None, (), None, [CompletionOutput(0, "", [7], finish_reason="length")], True, error=error
    )
    in_thread(engines, link.on_news, News([output], link.ready.stats))


def added(links):
    return [[message.request_id for message in link.sent if isinstance(message, Add)] for link in links]


def until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def hand_over(engines, links, count):
    """What there is room for, until the engines have got so many in all."""
    engines._hand_over()
    until(lambda: sum(map(len, added(links))) == count)


def test_the_models_length_is_the_one_that_the_engines_found(engines):
    assert (engines.model_config.model, engines.model_config.max_model_len) == ("none", 64)


def test_as_many_are_handed_over_as_run_and_as_many_again(engines, links):
    for number in range(10):
        engines.add_request(str(number), [1, 2, 3], PARAMS)
    assert engines.has_unfinished_requests() and added(links) == [[], []], "the rest of a batch may be bad"
    hand_over(engines, links, 8)
    assert added(links) == [["0", "2", "4", "6"], ["1", "3", "5", "7"]]
    tell(engines, links[1], "3")
    tell(engines, links[1], "1")
    assert [output.request_id for _ in range(2) for output in engines.step()] == ["3", "1"]
    until(lambda: sum(map(len, added(links))) == 9)  # the second step handed over one for the first that had ended
    engines.abort_request([str(number) for number in range(10)])
    assert not engines.has_unfinished_requests()
    until(lambda: sum(len(m.request_ids) for link in links for m in link.sent if isinstance(m, Abort)) == 7)


def test_what_runs_several_sequences_counts_so_often(engines, links):
    for number, n in enumerate((40, 5, 3, 1)):
        engines.add_request(str(number), [1, 2, 3], SamplingParams(max_tokens=1, n=n))
    hand_over(engines, links, 1)
    tell(engines, links[0], "0")
    engines.step()
    hand_over(engines, links, 3)  # 5 and 3 are as many as may be


def test_earlier_priorities_go_first(engines, links):
    for number, priority in enumerate((3, 1, 2, 1)):
        engines.add_request(str(number), [1, 2, 3], PARAMS, priority=priority)
    hand_over(engines, links, 4)
    assert added(links) == [["1", "2"], ["3", "0"]]


def test_a_refused_request_is_named(engines, links):
    engines.add_request("a", [1, 2, 3], PARAMS)
    hand_over(engines, links, 1)
    in_thread(engines, links[0].on_news, News.of([RequestFailure("a", "it is bad")], links[0].ready.stats))
    with pytest.raises(RequestRefusedError, match="it is bad") as error:
        engines.step()
    assert error.value.request_id == "a" and not engines.has_unfinished_requests()


def test_a_failed_step_is_an_error_and_a_failed_request_an_output(engines, links):
    for name in "ab":
        engines.add_request(name, [1, 2, 3], PARAMS)
    hand_over(engines, links, 2)
    tell(engines, links[0], "a", error="the step failed: RuntimeError: out of memory")
    tell(engines, links[1], "b", error="a logits processor raised")
    with pytest.raises(RuntimeError, match="the step failed: RuntimeError: out of memory"):
        engines.step()
    (output,) = engines.step()
    assert output.error == "a logits processor raised"


def test_one_that_dies_while_nothing_runs_is_noticed_by_the_next_call(engines, links):
    in_thread(engines, links[1].on_death, "the engine process was killed by signal 9")
    until(lambda: engines._llm.replica_deaths)
    for call in (
        lambda: engines.add_request("a", [1, 2, 3], PARAMS),
        engines.reset_prefix_cache,
        engines.step,
        lambda: engines.sleep(1),
    ):
        with pytest.raises(EngineDeadError, match=r"^replica 1: the engine process was killed by signal 9; the others"):
            call()
    assert links[0].closed and links[1].closed


def test_one_that_dies_ends_the_batch(engines, links):
    for name in "ab":
        engines.add_request(name, [1, 2, 3], PARAMS)
    hand_over(engines, links, 2)
    in_thread(engines, links[0].on_death, "it ended with status 1: no memory")
    with pytest.raises(EngineDeadError, match=r"^replica 0: it ended with status 1: no memory; the others"):
        engines.step()
    assert links[1].closed
    engines.abort_request(["a", "b"])
    assert not engines.has_unfinished_requests()


def test_both_die_at_once(engines, links):
    engines.add_request("a", [1, 2, 3], PARAMS)
    hand_over(engines, links, 1)
    in_thread(engines, lambda: (links[1].on_death("second"), links[0].on_death("first")))
    with pytest.raises(EngineDeadError, match=r"^replica 1: second; the others"):
        engines.step()


def test_the_last_reference_ends_them(links):
    engines = Engines(EngineConfig.from_kwargs(model="none", data_parallel_size=2), Replicas(links, block_tokens=4))
    engines.add_request("a", [1, 2, 3], PARAMS)
    hand_over(engines, links, 1)
    thread = engines._talk._thread
    del engines
    gc.collect()
    assert links[0].closed and links[1].closed and not thread.is_alive()


def test_a_shutdown_ends_what_runs(engines, links):
    engines.add_request("a", [1, 2, 3], PARAMS)
    hand_over(engines, links, 1)
    engines.shutdown()
    engines.shutdown()
    with pytest.raises(EngineDeadError, match="the engines were shut down: make a new LLM"):
        engines.step()
    assert links[0].closed and not engines._talk._thread.is_alive()
