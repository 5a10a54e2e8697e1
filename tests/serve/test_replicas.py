"""``data_parallel_size``: several engines that look like one."""

import asyncio
import json
import os
import re
import signal
from array import array
from dataclasses import fields

import pytest
import torch
from support.engines import tiny_checkpoint, tiny_llm
from support.imported_processes import imported_processes
from support.server import eventually, running_server, socket_folders
from support.streams import Stream, all_gone

from tritonllm import AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, SamplingParams, env
from tritonllm.config.engine import EngineConfig
from tritonllm.engine.data.outputs import CompletionOutput, RequestOutput
from tritonllm.engine.data.request import PACKED
from tritonllm.engine.data.stats import EngineStats
from tritonllm.serve.engines import replicas as replicas_module
from tritonllm.serve.engines.engine_client import EngineDeadError
from tritonllm.serve.engines.messages import (
    Abort,
    Add,
    Answer,
    Call,
    EngineReady,
    News,
    PoolingFacts,
    RequestFailure,
)
from tritonllm.serve.engines.replicas import Replicas, check_gpus, start_engines, together

ENGINE = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PROMPTS = [list(range(5 + i, 25 + i)) for i in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Link:
    """An engine that records what it is sent."""

    def __init__(self, seats=4):
        facts = PoolingFacts([], True, 0, [], 0)
        stats = EngineStats(num_blocks=64, num_free_blocks=64)
        self.ready = EngineReady(None, None, False, 100, 64, seats, [], 0, {}, stats, facts)
        self.sent, self.closed, self.failure, self.pid = [], False, None, 1

    def attach(self, on_news, on_death):
        self.tell, self.die = on_news, on_death

    def send(self, message):
        self.sent.append(message)

    def close(self):
        self.closed = True


def links(count=2):
    made = [Link() for _ in range(count)]
    replicas = Replicas(made, block_tokens=4)
    news, deaths = [], []
    replicas.attach(news.append, deaths.append)
    return replicas, made, news, deaths


def add(request_id, prompt=(1, 2, 3), **params):
    return Add(request_id, None, array(PACKED, prompt).tobytes(), None, params, 0)


def done(request_id, tokens=(7,)):
    return RequestOutput(
        request_id, None, (), None, [CompletionOutput(0, "", list(tokens), finish_reason="length")], True
    )


def test_requests_and_their_aborts_go_to_one_replica():
    replicas, (first, second), news, _ = links()
    assert replicas.ready.max_num_seqs == 8 and replicas.ready.stats.num_blocks == 128
    for name in "abcd":
        replicas.send(add(name))
    assert [m.request_id for m in first.sent] == ["a", "c"] and [m.request_id for m in second.sent] == ["b", "d"]
    replicas.send(Abort(["a", "b", "c", "unknown"]))
    assert (first.sent[-1].request_ids, second.sent[-1].request_ids) == (["a", "c"], ["b"])
    first.tell(News([done("a"), done("c")], EngineStats(steps=5, num_blocks=64)))
    assert news[-1].stats.steps == 5 and news[-1].stats.num_blocks == 128
    assert [update.request_id for update in news[-1].updates] == ["a", "c"]


def test_an_id_that_comes_again_before_its_end_has_come_stays():
    """Or its first updates, from another replica, could overtake the last one of the request before."""
    replicas, (first, second), _, _ = links()
    replicas.send(add("a"))
    replicas.send(Abort(["a"]))
    replicas.send(add("a"))
    replicas.send(add("b"))
    assert [type(m).__name__ for m in first.sent] == ["Add", "Abort", "Add"]
    assert [m.request_id for m in second.sent] == ["b"]
    first.tell(News([done("a")], EngineStats()))
    replicas.send(Abort(["a"]))  # the second one is still there
    assert first.sent[-1].request_ids == ["a"]
    first.tell(News([done("a")], EngineStats()))
    replicas.send(Abort(["a"]))
    assert len(first.sent) == 4, "nobody has it any more"
    assert replicas._placement.loads[0] == 0


def test_all_do_what_the_engine_is_told():
    replicas, (first, second), news, _ = links()
    replicas.send(Call(1, "reset_prefix_cache", {}))
    assert [type(m) for link in (first, second) for m in link.sent] == [Call, Call]
    first.tell(News([], EngineStats(), [Answer(1, True)]))
    assert not news[-1].answers
    second.tell(News([], EngineStats(), [Answer(1, False)]))
    assert news[-1].answers == [Answer(1, False)]
    replicas.send(Call(2, "sleep", {}))
    first.tell(News([], EngineStats(is_sleeping=True, takes_requests=False), [Answer(2)]))
    assert news[-1].stats.is_sleeping and not news[-1].stats.takes_requests
    second.tell(News([], EngineStats(), [Answer(2, error="no room")]))
    assert news[-1].answers == [Answer(2, error="replica 1: no room")]
    replicas.send(Call(3, "wake_up", {}))
    for link in (first, second):
        link.tell(News([], EngineStats(), [Answer(3, error="unknown tag", is_value_error=True)]))
    assert news[-1].answers == [Answer(3, error="unknown tag", is_value_error=True)]


def test_each_writes_a_trace_of_its_own():
    replicas, both, news, _ = links()

    def answer(number, *values):
        replicas.send(Call(number, "start_profile", {"profile_prefix": None}))
        for link, value in zip(both, values, strict=True):
            link.tell(News([], EngineStats(), [Answer(number, value)]))
        (found,) = news[-1].answers
        return found.value

    assert answer(1, {"file": "b"}, {"file": "a"}) == {"file": "b", "files": ["a", "b"]}
    assert answer(2, {"refused": "one is written"}, {"file": "a"}) == {"file": "a", "files": ["a"]}
    assert answer(3, {"refused": "one is written"}, {"refused": "as well"}) == {"refused": "one is written"}


def test_a_look_is_at_the_first_that_lives():
    replicas, (first, second), news, _ = links()
    replicas.send(Call(1, "activity", {"view": {}}))
    assert [type(m) for m in first.sent] == [Call] and not second.sent
    first.tell(News([], EngineStats(), [Answer(1, {"requests": []})]))
    assert news[-1].answers == [Answer(1, {"requests": []})]
    first.die("killed")
    replicas.send(Call(2, "activity", {"view": {}}))
    assert [type(m) for m in second.sent] == [Call]


def test_one_dies_and_the_others_go_on():
    replicas, (first, second), news, deaths = links()
    for name in "abcd":
        replicas.send(add(name))
    replicas.send(Call(1, "wake_up", {}))
    first.tell(News([], EngineStats(steps=7, num_blocks=64, num_running=2), [Answer(1)]))
    second.tell(News([], EngineStats(steps=3, num_blocks=64)))
    first.die("killed")
    assert first.closed and not deaths
    assert news[-1].updates == [RequestFailure(name, "replica 0: killed", "lost") for name in "ac"]
    assert all(update.finished for update in news[-1].updates)
    stats = news[-1].stats
    assert (stats.steps, stats.num_blocks, stats.num_running, stats.takes_requests) == (10, 64, 0, True)
    assert replicas.living == [False, True] and replicas.failure is None and replicas.deaths == ["replica 0: killed"]
    second.tell(News([], EngineStats(), [Answer(1)]))
    assert news[-1].answers == [Answer(1)]
    replicas.send(Call(2, "wake_up", {}))
    replicas.send(add("e"))
    assert [m.request_id for m in second.sent if isinstance(m, Add)] == ["b", "d", "e"]
    second.die("killed too")
    assert deaths == ["killed too"] and replicas.failure == "killed too" and replicas.pid is None
    with pytest.raises(EngineDeadError, match="killed too"):
        replicas.send(add("f"))


def test_an_answer_that_dies_with_its_replica():
    replicas, (first, second), news, _ = links()
    replicas.send(Call(1, "sleep", {}))
    second.tell(News([], EngineStats(), [Answer(1, "done")]))
    first.die("killed")
    assert news[-1].answers == [Answer(1, "done")]


def test_a_look_at_one_of_them_changes_nothing():
    replicas, (first, second), news, _ = links()
    forgotten = []
    replicas._placement.forget = lambda: forgotten.append(True)
    look = Call(1, "activity", {"view": {}}, replica=1)
    replicas.send(look)
    assert look in second.sent and look not in first.sent
    second.tell(News([], EngineStats(), [Answer(1, {"steps": []})]))
    assert news[-1].answers == [Answer(1, {"steps": []})] and not forgotten
    replicas.send(Call(2, "activity", {}, replica=0))
    first.die("killed")
    assert [answer.error for answer in news[-1].answers] == ["replica 0: killed"]
    with pytest.raises(EngineDeadError, match="replica 0 has died"):
        replicas.send(Call(3, "activity", {}, replica=0))


def test_statistics_are_added_up():
    a, b = (
        EngineStats(steps=1, num_accepted_tokens_per_pos=(3, 1)),
        EngineStats(steps=2, num_accepted_tokens_per_pos=(2,)),
    )
    assert together([a, b]) == EngineStats(steps=3, num_accepted_tokens_per_pos=(5, 1))
    assert together([a]) == a
    names = {name for name in [field.name for field in fields(EngineStats)] if isinstance(getattr(a, name), int)}
    ones = EngineStats(**{name: 1 for name in names if not isinstance(getattr(a, name), bool)})
    twice = together([ones, ones])
    assert all(getattr(twice, name) == 2 for name in names if not isinstance(getattr(a, name), bool))


def test_each_sees_its_own_gpus(monkeypatch):
    def seen(listed, indices):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if listed is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        env.see_devices(indices)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    assert seen(None, [2, 3]) == "2,3"
    assert seen("5,GPU-abc,0", [1, 2]) == "GPU-abc,0"
    assert seen("", [0]) == ""
    with pytest.raises(ValueError, match="names 2 GPUs"):
        seen("0,1", [2])


@pytest.mark.parametrize(("count", "names"), [(1, [None]), (2, [0, 1])])
def test_engines_have_names_where_there_are_several(count, names, monkeypatch):
    """Also those that are started again, which keep theirs."""
    named = []

    class Started:
        def __init__(self, config, log_level, devices, profiler, replica, place=None):
            named.append(replica)

    monkeypatch.setattr(replicas_module, "EngineProcess", Started)
    monkeypatch.setattr(replicas_module, "StartingProcess", Started)
    monkeypatch.setattr(replicas_module, "EngineClient", lambda config, process: Link())
    config = EngineConfig.from_kwargs(model="none", data_parallel_size=count, device="cpu")
    start_engines(config, max_restarts=1)._restarts._start(count - 1)
    assert named == [*names, names[-1]]


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
@pytest.mark.parametrize(("count", "message"), [(2, "^replica 1: too large$"), (1, "^too large$")])
def test_an_error_of_a_start_says_whose_it_is(count, message, kind, monkeypatch):
    killed = []

    class Started:
        def __init__(self, config, log_level, devices, profiler, replica, place=None):
            self.last = replica in (None, count - 1)

        def kill(self):
            killed.append(self)

    def client(config, process):
        if process.last:
            raise kind("too large")
        return Link()

    monkeypatch.setattr(replicas_module, "EngineProcess", Started)
    monkeypatch.setattr(replicas_module, "EngineClient", client)
    config = EngineConfig.from_kwargs(model="none", data_parallel_size=count, device="cpu")
    with pytest.raises(kind, match=message):
        start_engines(config, max_restarts=1)
    assert len(killed) == count


def test_too_few_gpus(monkeypatch):
    """Or the last engines would run on the CPU."""

    def check(there, **options):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
        check_gpus(EngineConfig.from_kwargs(model="none", **options))

    with pytest.raises(ValueError, match=r"data_parallel_size=2 times tensor_parallel_size=2 needs 4 GPUs.* sees 3"):
        check(3, data_parallel_size=2, tensor_parallel_size=2)
    check(4, data_parallel_size=2, tensor_parallel_size=2)
    check(0, data_parallel_size=2)
    check(1, data_parallel_size=2, device="cpu")
    check(1, tensor_parallel_size=2)  # one engine, which says it itself


def test_outputs_are_those_of_one_engine():
    """Seeds, several sequences and log-probabilities among them; both replicas work."""
    wish = [GREEDY, SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True), SamplingParams(seed=1, logprobs=1)]
    params = [wish[i % 3] for i in range(12)]
    expected = tiny_llm().generate(PROMPTS, params, use_tqdm=False)

    async def one(llm, number):
        async for output in llm.generate(PROMPTS[number], params[number], str(number)):
            last = output
        return last

    async def all_of_them(llm):
        outputs = await asyncio.gather(*(one(llm, number) for number in range(12)))
        assert all(stats.steps for stats in llm.replica_stats)
        assert llm.stats.generated_tokens == sum(len(c.token_ids) for o in expected for c in o.outputs)
        assert await llm.reset_prefix_cache() is True
        return outputs

    arguments = AsyncEngineArgs(model=str(tiny_checkpoint()), data_parallel_size=2, **ENGINE)
    with imported_processes():
        llm = AsyncLLM.from_engine_args(arguments, max_queue=20)
    try:
        outputs = asyncio.run(all_of_them(llm))
    finally:
        llm.shutdown()
    for mine, theirs in zip(outputs, expected, strict=True):
        assert [list(c.token_ids) for c in mine.outputs] == [list(c.token_ids) for c in theirs.outputs]
        assert [c.text for c in mine.outputs] == [c.text for c in theirs.outputs]


def test_what_cannot_be_is_said():
    with pytest.raises(ValueError, match="data_parallel_size=2: this is one engine; LLM, AsyncLLM and"):
        LLMEngine.from_engine_args(EngineArgs(model=str(tiny_checkpoint()), data_parallel_size=2))
    before = socket_folders()
    arguments = AsyncEngineArgs(model=str(tiny_checkpoint()), data_parallel_size=2, max_model_len=10**9)
    with pytest.raises(ValueError, match="max_model_len"):
        AsyncLLM.from_engine_args(arguments)
    assert socket_folders() <= before, "none of them is left"


@pytest.mark.long
def test_a_server_with_two_loses_one_and_ends_with_the_last(llm):
    """Streams of the other one go on to their ends."""
    before = socket_folders()
    with running_server("--data-parallel-size", "2") as server:
        assert sorted(re.findall(r"INFO .*: (replica \d): \w+ .* is ready", server.text)) == ["replica 0", "replica 1"]
        streams = [Stream(server, prompt=f"{i} + {i} =", max_tokens=600, return_token_ids=True) for i in range(6)]
        engines = [child for child in server.children() if child.memory_info().rss > 150e6]
        assert len(engines) == 2
        os.kill(engines[0].pid, signal.SIGKILL)
        eventually(lambda: server.metric("tritonllm:engine_up") == 1)
        ends = [stream.end() for stream in streams]
        whole = [end for end in ends if end[-1] == "[DONE]" and "error" not in json.loads(end[-2])]
        broken = [end for end in ends if end not in whole]
        assert whole and broken, "both had some, and only one of them lost its own"
        assert all(sum('"error"' in event for event in end) == 1 for end in broken), "one error each"
        params = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)
        for stream in streams:
            if stream.events in whole:
                (expected,) = llm.generate(
                    [f"{streams.index(stream)} + {streams.index(stream)} ="], params, use_tqdm=False
                )
                assert stream.tokens() == list(expected.outputs[0].token_ids)
        assert server.client.get("/health").status_code == 200
        body = {"model": "demo", "prompt": "There was", "max_tokens": 4}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        eventually(server.is_idle)
        children = server.children()
        os.kill(engines[1].pid, signal.SIGKILL)
        assert server.wait() == 1
        eventually(lambda: all_gone([*children, *engines]))
    assert socket_folders() <= before
