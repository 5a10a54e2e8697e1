"""Two real servers of the demonstration model behind a router: what clients get is what the offline engine computes."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.routed_streams import Streams, count_whole
from support.router import RouterProcess
from support.server import MODEL, RunningServer, eventually
from support.streams import leave

from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path

PROMPTS = [
    f"{name} was a fox who" for name in ("Anna", "Bert", "Carl", "Dora", "Emil", "Fay", "Gus", "Hal", "Ida", "Jan")
]
TOKENS = 120  # of a stream: it must not end before the test, on a busy machine, has seen that it has begun


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
def tokens(expected):
    return {prompt: ids for prompt, (ids, _) in expected.items()}


@pytest.fixture(scope="module")
def router(servers):
    options = [
        "--health-interval",
        "0.5",
        "--health-timeout",
        "300",
        "--sticky-chars",
        "64",
        "--balance-min-tokens",
        "0",
    ]
    for server in servers:
        options += ["--backend", server.url]
    with RouterProcess(*options, "--between-bytes-timeout", "300") as running:
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
        with pytest.raises(openai.NotFoundError, match="is not served here"):
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


def test_a_stopped_server_goes_on(router, servers, tokens):
    """For less than the limit between bytes: every stream is whole."""
    streams = Streams(router.client, PROMPTS, TOKENS)
    eventually(lambda: streams.begun >= 3)
    for process in (servers[0].process.pid, servers[0].engine().pid):
        os.kill(process, signal.SIGSTOP)
    eventually(lambda: streams.begun >= 5 or len(streams.ends) >= 3)
    for process in (servers[0].engine().pid, servers[0].process.pid):
        os.kill(process, signal.SIGCONT)
    assert count_whole(streams.end(), tokens) == len(PROMPTS)


def test_a_client_that_leaves_frees_the_engine(router, servers):
    body = greedy(prompt="x", ignore_eos=True) | {"max_tokens": 2000}
    leave(router.url, body, lambda: any(server.metric("vllm:num_requests_running") for server in servers))
    for server in servers:
        eventually(server.is_idle)
    assert all(backend["in_flight"] == 0 for backend in statuses(router))


@pytest.mark.long
def test_a_server_is_killed_under_100_streams(router, servers, tokens):
    """The last test of this file: afterwards there is one server."""
    streams = Streams(router.client, PROMPTS * 10, TOKENS)
    eventually(lambda: streams.begun >= 30)
    os.kill(servers[1].process.pid, signal.SIGKILL)
    ends = streams.end()
    whole = count_whole(ends, tokens)
    assert len(ends) == 100 and 30 <= whole < 100
    eventually(lambda: [backend["alive"] for backend in statuses(router)] == [True, False])
    assert count_whole(Streams(router.client, PROMPTS, TOKENS).end(), tokens) == len(PROMPTS)
