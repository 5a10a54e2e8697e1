"""Two real servers of the demonstration model behind a router: what clients get is what the offline engine computes."""

import asyncio
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from support.router import RouterProcess
from support.server import MODEL, RunningServer, eventually

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path

PROMPTS = [
    f"{name} was a fox who" for name in ("Anna", "Bert", "Carl", "Dora", "Emil", "Fay", "Gus", "Hal", "Ida", "Jan")
]
TOKENS = 24


@pytest.fixture(scope="module")
def servers():
    """The last test of the file kills the second one."""
    with ThreadPoolExecutor() as threads:
        made = list(threads.map(lambda _: RunningServer("--max-num-seqs", "64"), range(2)))
    yield made
    for server in made:
        server.close()


@pytest.fixture(scope="module")
def expected():
    """Greedy tokens of each prompt, and its text, offline."""
    llm = LLM(str(model_path()))
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return {prompt: (list(out.token_ids), out.text) for prompt, out in zip(PROMPTS, outputs, strict=True)}


@pytest.fixture(scope="module")
def router(servers):
    options = ["--health-interval", "0.5", "--health-timeout", "2", "--sticky-chars", "64", "--balance-min-tokens", "0"]
    for server in servers:
        options += ["--backend", server.url]
    with RouterProcess(*options, "--between-bytes-timeout", "5") as running:
        yield running


def statuses(router):
    return router.client.get("/status").json()["backends"]


def greedy(**more):
    return {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, **more}


def test_the_openai_client(router, expected):
    prompt = PROMPTS[0]
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
        assert MODEL in [model.id for model in client.models.list()]
        assert client.models.retrieve("other-name").id == "other-name"
        reply = client.completions.create(prompt=prompt, **greedy(), extra_body={"ignore_eos": True})
        assert reply.choices[0].text == expected[prompt][1]
        chunks = client.completions.create(prompt=prompt, **greedy(), stream=True, extra_body={"ignore_eos": True})
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected[prompt][1]
        messages = [{"role": "user", "content": "What is 47 + 66?"}]
        whole = client.chat.completions.create(messages=messages, **greedy()).choices[0].message.content
        parts = client.chat.completions.create(messages=messages, **greedy(), stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(prompt="x", model="unknown")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(prompt="x", model=MODEL, temperature=-1)


def test_the_asynchronous_client(router, servers, expected):
    async def text(client, prompt, stream):
        reply = await client.completions.create(
            prompt=prompt, **greedy(), stream=stream, extra_body={"ignore_eos": True}
        )
        if not stream:
            return reply.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in reply])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(text(client, p, stream) for p in PROMPTS for stream in (False, True)))

    assert asyncio.run(ask_all()) == [expected[prompt][1] for prompt in PROMPTS for _ in range(2)]
    assert all(server.metric("vllm:request_success_total") > 0 for server in servers)


class Streams:
    """Streamed completions that threads read: ``(token ids, errors, times [DONE] came)`` of each."""

    def __init__(self, router, prompts):
        self.begun = 0
        self.ends = []
        self._threads = [threading.Thread(target=self._read, args=(router.client, prompt)) for prompt in prompts]
        for thread in self._threads:
            thread.start()

    def _read(self, client, prompt):
        body = greedy(prompt=prompt, stream=True, ignore_eos=True, return_token_ids=True)
        tokens, errors, done = [], [], 0
        with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                errors.append(json.loads(answer.read())["error"])
            for line in [] if errors else answer.iter_lines():
                content = line.removeprefix("data: ")
                if content == "[DONE]":
                    done += 1
                elif content and "error" in (event := json.loads(content)):
                    errors.append(event["error"])
                elif content:
                    self.begun += not tokens
                    tokens += event["choices"][0]["token_ids"]
        self.ends.append((prompt, tokens, errors, done))

    def end(self):
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive(), "a stream hangs"
        return self.ends


def count_whole(ends, expected):
    whole = 0
    for prompt, tokens, errors, done in ends:
        ids = expected[prompt][0]
        if errors:
            assert len(errors) == 1 and done == 0
            assert tokens == ids[: len(tokens)], "a token is missing, wrong, or came twice"
        else:
            assert (tokens, done) == (ids, 1)
            whole += 1
    return whole


def test_a_stopped_server_goes_on(router, servers, expected):
    """For less than the limit between bytes: every stream is whole."""
    streams = Streams(router, PROMPTS)
    eventually(lambda: streams.begun >= 3)
    for process in (servers[0].process.pid, servers[0].engine().pid):
        os.kill(process, signal.SIGSTOP)
    eventually(lambda: streams.begun >= 5 or len(streams.ends) >= 3)
    for process in (servers[0].engine().pid, servers[0].process.pid):
        os.kill(process, signal.SIGCONT)
    assert count_whole(streams.end(), expected) == len(PROMPTS)


def test_a_client_that_leaves_frees_the_engine(router, servers):
    with pytest.raises(httpx.ReadTimeout):
        body = greedy(prompt="x", ignore_eos=True) | {"max_tokens": 2000}
        router.client.post("/v1/completions", json=body, timeout=0.3)
    for server in servers:
        eventually(server.is_idle)
    assert all(backend["in_flight"] == 0 for backend in statuses(router))


def test_a_server_is_killed_under_100_streams(router, servers, expected):
    """The last test of this file: afterwards there is one server."""
    streams = Streams(router, PROMPTS * 10)
    eventually(lambda: streams.begun >= 30)
    os.kill(servers[1].process.pid, signal.SIGKILL)
    ends = streams.end()
    whole = count_whole(ends, expected)
    assert len(ends) == 100 and 30 <= whole < 100
    eventually(lambda: [backend["alive"] for backend in statuses(router)] == [True, False])
    assert count_whole(Streams(router, PROMPTS).end(), expected) == len(PROMPTS)
