"""AsyncLLM by itself: an async generator for each request, over an engine in another process."""

import asyncio
import json
import os
import signal
from types import SimpleNamespace

import httpx
import pytest
from support.engines import tiny_checkpoint, tiny_llm
from support.imported_processes import imported_processes
from support.server import eventually
from support.waiting import PATIENCE

from tritonllm import AsyncEngineArgs, AsyncLLM, SamplingParams
from tritonllm.config.sampling_params import RequestOutputKind
from tritonllm.engine.data.outputs import CompletionOutput, RequestOutput
from tritonllm.engine.data.stats import EngineStats
from tritonllm.serve.api.answering import Service
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.collector import Collector
from tritonllm.serve.engines.engine_client import EngineDeadError, EngineLink
from tritonllm.serve.engines.messages import News, encode_news
from tritonllm.serve.engines.room import QueueFullError

PROMPT = list(range(5, 25))
ENGINE = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def loop():
    """One event loop for all tests here, as an AsyncLLM serves one only."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(loop):
    with imported_processes():
        made = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_checkpoint()), **ENGINE), max_queue=4)
    yield made
    made.shutdown()


def params(**more):
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **more})


async def idle(llm):
    while llm.stats.num_free_blocks != llm.stats.num_blocks or llm.stats.num_running or llm.stats.num_waiting:
        await asyncio.sleep(0.01)
    assert llm.num_unfinished == 0


async def collected(llm, request_id, *, prompt=PROMPT, **more):
    return [output async for output in llm.generate(prompt, params(**more), request_id)]


def test_outputs_are_those_of_the_offline_engine(llm, loop):
    (offline,) = tiny_llm().generate([PROMPT], params(n=2, logprobs=1), use_tqdm=False)
    kinds = {kind: loop.run(collected(llm, kind.name, n=2, logprobs=1, output_kind=kind)) for kind in RequestOutputKind}
    assert len(kinds[RequestOutputKind.FINAL_ONLY]) == 1
    for kind in (RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE):
        last = kinds[kind][-1]
        assert last.finished
        for mine, theirs in zip(last.outputs, offline.outputs, strict=True):
            assert (list(mine.token_ids), mine.text) == (list(theirs.token_ids), theirs.text)
            assert mine.finish_reason == theirs.finish_reason == "length"
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
            assert [list(entries) for entries in mine.logprobs] == [list(entries) for entries in theirs.logprobs]
    for index, theirs in enumerate(offline.outputs):
        parts = [output.outputs[index] for output in kinds[RequestOutputKind.DELTA]]
        assert [token for part in parts for token in part.token_ids] == list(theirs.token_ids)
        assert "".join(part.text for part in parts) == theirs.text
    lengths = [len(output.outputs[0].token_ids) for output in kinds[RequestOutputKind.CUMULATIVE]]
    assert lengths == sorted(lengths)
    assert lengths[0] < 12, "the first output is not the last"


def test_arguments_of_vllms_methods(llm, loop):
    async def last(request_id, **more):
        return [output async for output in llm.generate(PROMPT, params(max_tokens=1), request_id, **more)][-1]

    none = {"tokenization_kwargs": None, "trace_headers": None, "data_parallel_rank": None}
    assert loop.run(last("neutral", **none)).finished
    for name, value in (("tokenization_kwargs", {"a": 1}), ("trace_headers", {"a": "b"}), ("data_parallel_rank", 1)):
        with pytest.raises(ValueError, match=f"{name}=.*tritonllm does not have this"):
            loop.run(last(name, **{name: value}))
    assert loop.run(llm.reset_prefix_cache(reset_running_requests=False)) is True
    with pytest.raises(ValueError, match="reset_running_requests=True"):
        loop.run(llm.reset_prefix_cache(reset_running_requests=True))


def test_the_text_keeps_a_token_that_ends_it_if_asked(llm, loop):
    (x,) = llm.inputs.encode("x", add_special_tokens=False)
    for kind in RequestOutputKind:
        for kept, text in ((False, ""), (True, "x")):
            more = {"stop_token_ids": [x], "include_stop_str_in_output": kept, "output_kind": kind}
            output = loop.run(collected(llm, f"{kind.name}-{kept}", allowed_token_ids=[x], **more))[-1].outputs[0]
            assert (output.text, list(output.token_ids), output.stop_reason) == (text, [x], x)


def test_a_prompt_is_truncated_before_its_length_is_checked(llm, loop):
    ids = list(range(5, 25)) * 100
    for most, kept in ((7, 7), (-1, llm.max_model_len - 1)):
        more = {"truncate_prompt_tokens": most, "max_tokens": 1}
        output = loop.run(collected(llm, f"truncated-{most}", prompt={"prompt_token_ids": ids}, **more))[-1]
        assert list(output.prompt_token_ids) == ids[-kept:]
        assert len(output.outputs[0].token_ids) == 1


def test_drafts_in_the_engines_process(llm, loop):
    """The second time another request's output is what follows; a step may bring a reader several tokens."""
    config = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_spec_factor": 4.0}
    args = AsyncEngineArgs(model=str(tiny_checkpoint()), **(ENGINE | {"max_num_seqs": 1}), speculative_config=config)
    with imported_processes():
        drafting = AsyncLLM.from_engine_args(args)
    try:
        expected = loop.run(collected(llm, "plain", max_tokens=24))[-1].outputs[0]
        for name in ("first", "second"):
            outputs = loop.run(collected(drafting, name, max_tokens=24))
            found = outputs[-1].outputs[0]
            assert (list(found.token_ids), found.text) == (list(expected.token_ids), expected.text)
        metrics, stats = outputs[-1].metrics, drafting.stats
        assert 0 < metrics.num_accepted_tokens <= metrics.num_draft_tokens <= stats.num_draft_tokens
        assert metrics.num_accepted_tokens <= stats.num_accepted_tokens
        assert sum(metrics.num_accepted_tokens_per_pos) == metrics.num_accepted_tokens
        assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens and stats.draft_seconds > 0
    finally:
        drafting.shutdown()


def test_what_a_reader_keeps_does_not_change(llm, loop):
    outputs = loop.run(collected(llm, "kept"))
    assert [len(output.outputs[0].token_ids) for output in outputs] == sorted(
        {len(output.outputs[0].token_ids) for output in outputs}
    )


def test_a_slow_reader_loses_nothing(llm, loop):
    async def slow():
        tokens = []
        async for output in llm.generate(PROMPT, params(output_kind=RequestOutputKind.DELTA, logprobs=0), "slow"):
            assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs)
            tokens.append(list(output.outputs[0].token_ids))
            await idle_engine(llm)
        return tokens

    async def idle_engine(llm):
        while llm.stats.num_running:
            await asyncio.sleep(0.01)

    parts = loop.run(slow())
    (whole,) = loop.run(collected(llm, "fast", output_kind=RequestOutputKind.FINAL_ONLY))
    assert [token for part in parts for token in part] == list(whole.outputs[0].token_ids)
    assert len(parts) == 2, "all that came while it did not read is one output"


def test_prompt_logprobs(llm, loop):
    (offline,) = tiny_llm().generate([PROMPT], params(prompt_logprobs=1), use_tqdm=False)
    output = loop.run(collected(llm, "scored", prompt_logprobs=1))[-1]
    assert output.prompt_logprobs[0] is None
    assert [list(entries) for entries in output.prompt_logprobs[1:]] == [
        list(entries) for entries in offline.prompt_logprobs[1:]
    ]


def test_closing_the_generator_aborts(llm, loop):
    async def leave():
        generator = llm.generate(PROMPT, params(max_tokens=200), "left")
        await anext(generator)
        await generator.aclose()
        await idle(llm)

    loop.run(leave())


def test_cancelling_the_task_aborts(llm, loop):
    async def cancel():
        tasks = [asyncio.create_task(collected(llm, f"c{i}", max_tokens=200)) for i in range(6)]
        while not llm.stats.num_running:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
        await idle(llm)

    loop.run(cancel())


def test_abort_ends_the_generator(llm, loop):
    async def abort():
        task = asyncio.create_task(collected(llm, "ended", max_tokens=200))
        while not llm.stats.num_running:
            await asyncio.sleep(0)
        await llm.abort(["ended", "unknown"])
        outputs = await task
        await idle(llm)
        return outputs

    last = loop.run(abort())[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")


def test_more_than_the_queue_holds_is_refused(llm, loop):
    """Four seats and four places in the queue."""

    async def crowd():
        tasks = [asyncio.create_task(collected(llm, f"q{i}", max_tokens=200)) for i in range(11)]
        done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 3:
            more, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert [type(task.exception()) for task in done] == [QueueFullError] * 3
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await idle(llm)
        assert (await collected(llm, "afterwards"))[-1].finished

    loop.run(crowd())
    with pytest.raises(ValueError, match="n=9 is more than this engine queues, 8"):
        loop.run(collected(llm, "never", n=9))


def served(llm, loop, prompts, **more):
    """What one body with these prompts gets, as a server runs it."""

    async def run():
        service = Service(llm, ServerConfig(model_names=("m",)))
        return [item async for item in service.run("body", prompts, params(**more), 0)]

    return loop.run(run())


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ([], r"^prompt\[2\] is empty"),
        ([10**6], r"^prompt\[2\]: prompt_token_ids must be integers"),
        ({"prompt_token_ids": [5], "cache_salt": ""}, r"^prompt\[2\]\['cache_salt'\] must be"),
        (PROMPT * 100, r"^prompt\[2\] has 2000 tokens"),
    ],
)
def test_no_prompt_of_a_body_runs_before_all_are_checked(llm, loop, monkeypatch, last, message):
    sent = []
    monkeypatch.setattr(llm._client, "send", sent.append)
    with pytest.raises(ValueError, match=message):
        served(llm, loop, [PROMPT, PROMPT, last])
    assert not sent and llm.num_unfinished == 0


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_body_may_have_more_prompts_than_the_engine_takes(llm, loop, monkeypatch, n):
    """A client cannot do anything about a queue that is always full of its own prompts."""
    most = []

    class Watch:
        def added(self, request_id, prompt_tokens, params):
            most.append(llm.num_unfinished)

        def updated(self, output): ...

        def aborted(self, request_id): ...

    monkeypatch.setattr(llm, "observer", Watch())
    prompts = [[5, 6 + index] for index in range(20)]
    items = served(llm, loop, prompts, n=n, max_tokens=3)
    ended = sorted(index for index, output in items if output.finished)
    assert ended == list(range(20))
    assert len(most) == 20 and max(most) == max(4 // n * n, n), "others find a place"
    loop.run(idle(llm))


@pytest.fixture
def others(llm, loop, monkeypatch):
    """Fills so many places of eight, and all prompts of a body may run at once."""
    monkeypatch.setattr(Service, "_at_once", lambda self, params: 100)
    tasks = []

    async def fill(count):
        tasks.extend(asyncio.create_task(collected(llm, f"other{i}", max_tokens=200)) for i in range(count))
        while llm.num_unfinished < count:
            await asyncio.sleep(0)

    async def leave():
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(llm)

    yield lambda count: loop.run(fill(count))
    loop.run(leave())


@pytest.mark.parametrize("n", [1, 2])
def test_a_body_that_has_begun_waits_while_others_fill_the_queue(llm, loop, others, n):
    """Its client would lose what has run."""
    others(6)
    items = served(llm, loop, [[5, 6 + index] for index in range(12)], n=n, max_tokens=3)
    assert sorted(index for index, output in items if output.finished) == list(range(12))


def test_a_body_whose_client_leaves_waits_no_longer(llm, loop, others, monkeypatch):
    added = []

    class Watch:
        def added(self, request_id, prompt_tokens, params):
            added.append(request_id)

        def updated(self, output): ...

        def aborted(self, request_id): ...

    others(7)

    async def leave():
        monkeypatch.setattr(llm, "observer", Watch())
        service = Service(llm, ServerConfig(model_names=("m",)))
        body = service.run("body", [[5, 6 + index] for index in range(12)], params(max_tokens=200), 0)
        await anext(body)
        await body.aclose()
        assert llm.num_unfinished <= 7 and len(added) < 12
        count = len(added)
        await asyncio.sleep(0.2)  # what still waited would find room
        assert len(added) == count

    loop.run(leave())


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ([], {}, "prompt is empty"),
        ([10**6], {}, "prompt_token_ids must be integers"),
        (PROMPT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        # the API process does not see these: the engine refuses
        (PROMPT, {"bad_words": ["a" * 300]}, "bad_words"),
    ],
)
def test_bad_input_is_refused(llm, loop, prompt, more, message):
    with pytest.raises(ValueError, match=message):
        loop.run(collected(llm, "bad", prompt=prompt, **more))
    loop.run(idle(llm))


def test_an_id_may_come_again_as_soon_as_its_request_is_aborted(llm, loop):
    """What the engine still says of the first one is not taken for the second."""

    async def again():
        for _ in range(5):
            generator = llm.generate(PROMPT, params(max_tokens=60), "same")
            await anext(generator)
            await generator.aclose()
            outputs = await collected(llm, "same", max_tokens=5)
            assert outputs[-1].outputs[0].finish_reason == "length"
            assert len(outputs[-1].outputs[0].token_ids) == 5
        await idle(llm)

    loop.run(again())


def test_an_id_is_used_once_at_a_time(llm, loop):
    async def twice():
        generator = llm.generate(PROMPT, params(max_tokens=200), "same")
        await anext(generator)
        with pytest.raises(ValueError, match="'same' is in use"):
            await collected(llm, "same")
        await generator.aclose()
        await idle(llm)

    loop.run(twice())
    with pytest.raises(ValueError, match="request_id must be a string"):
        loop.run(collected(llm, None))


def test_another_event_loop_is_refused(llm):
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(collected(llm, "elsewhere"))


def test_a_killed_engine_fails_its_requests():
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_checkpoint()), **ENGINE))
    deaths = []
    llm.on_death = deaths.append

    async def kill():
        generators = [llm.generate(PROMPT, params(max_tokens=230), f"k{i}") for i in range(3)]
        for generator in generators:
            await anext(generator)
        assert llm.is_running
        os.kill(llm.engine_pid, signal.SIGKILL)
        for generator in generators:
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                async for _ in generator:
                    pass
        assert llm.errored and not llm.is_running and len(deaths) == 1
        with pytest.raises(EngineDeadError):
            await collected(llm, "late")
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        transport = httpx.ASGITransport(make_app(llm, ServerConfig(model_names=("m",))))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            body = {"prompt": PROMPT}
            replies = [await client.get("/health"), await client.get("/ready")]
            replies += [await client.post("/v1/completions", json={**body, "stream": s}) for s in (False, True)]
            assert [reply.status_code for reply in replies] == [503] * 4
            assert {reply.json()["error"]["code"] for reply in replies} == {"engine_dead"}
            assert (await client.get("/metrics")).status_code == 200

    asyncio.run(kill())
    llm.shutdown()
    llm.shutdown()


def test_shutdown_ends_requests_and_process():
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_checkpoint()), **ENGINE))
    pid = llm.engine_pid

    async def shut_down():
        generator = llm.generate(PROMPT, params(max_tokens=230), "r")
        await anext(generator)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in generator:
                pass

    asyncio.run(shut_down())
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_bad_model_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tmp_path)))
    with pytest.raises(ValueError, match="max_queue must be"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tmp_path)), max_queue=-1)


def test_an_output_that_cannot_be_made_ends_its_request_alone(llm, loop, monkeypatch):
    """The tokenizer may be anybody's code."""
    put = Collector.put

    def broken(self, update):
        if update.request_id == "bad":
            raise IndexError("piece id is out of range")
        put(self, update)

    async def run():
        good = asyncio.create_task(collected(llm, "good"))
        with pytest.raises(RuntimeError, match=r"cannot be made \(IndexError: piece id is out of range\)"):
            await asyncio.wait_for(collected(llm, "bad"), PATIENCE)
        outputs = await asyncio.wait_for(good, PATIENCE)
        await idle(llm)
        return outputs

    monkeypatch.setattr(Collector, "put", broken)
    assert loop.run(run())[-1].finished
    assert loop.run(collected(llm, "later"))[-1].finished


class UnwatchedLink(EngineLink):
    async def _watch(self, on_death):
        await asyncio.sleep(3600)
        on_death("it has ended")


def test_news_that_cannot_be_taken_in_are_the_engines_death():
    """Whoever waits for them would wait for ever."""

    def take(news):
        raise KeyError("no key")

    async def receive():
        link, told, news = UnwatchedLink("nowhere", None), [], asyncio.Queue()
        link._socket = SimpleNamespace(recv=news.get)
        link._tasks = [
            asyncio.create_task(work) for work in (link._receive(take, told.append), link._watch(told.append))
        ]
        news.put_nowait(encode_news(News([], EngineStats())))
        done, _ = await asyncio.wait(link._tasks, timeout=PATIENCE)
        return told, link.failure, len(done), link._tasks[1].cancelled()

    why = "what the engine tells cannot be taken in (KeyError: 'no key')"
    assert asyncio.run(receive()) == ([why], why, 2, True)


class FailingLLM:
    """Two outputs, then what is given: an engine that fails in the middle of an answer."""

    def __init__(self, llm, end):
        self._llm, self._end = llm, end

    def __getattr__(self, name):
        return getattr(self._llm, name)

    async def generate(self, prompt, params, request_id, *, priority):
        for end in (None, None, self._end):
            if isinstance(end, Exception):
                raise end
            yield RequestOutput(
                request_id, None, PROMPT, None, [CompletionOutput(0, "x", [7])], end is not None, error=end
            )


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        ("the step failed", 500, "engine_error"),
        (EngineDeadError("it was killed"), 503, "engine_dead"),
        (KeyError("a fault of ours"), 500, "internal_error"),
    ],
)
def test_an_engine_that_fails_in_the_middle(llm, loop, end, status, code):
    async def ask(stream):
        app = make_app(FailingLLM(llm, end), ServerConfig(model_names=("m",)))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/completions", json={"prompt": PROMPT, "stream": stream})

    whole = loop.run(ask(False))
    assert (whole.status_code, whole.json()["error"]["code"]) == (status, code)
    assert "fault" not in whole.text, "what went wrong inside is in the log only"
    streamed = loop.run(ask(True))
    *tokens, error, done = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line]
    assert streamed.status_code == 200
    assert len(tokens) == 2
    assert json.loads(error)["error"]["code"] == code
    assert done == "[DONE]"


def test_a_request_that_takes_too_long(llm, loop):
    class Slow(FailingLLM):
        async def generate(self, prompt, params, request_id, *, priority):
            await asyncio.Event().wait()
            yield

    async def ask():
        app = make_app(Slow(llm, None), ServerConfig(model_names=("m",), request_timeout=0.01))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/completions", json={"prompt": PROMPT})

    reply = loop.run(ask())
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
