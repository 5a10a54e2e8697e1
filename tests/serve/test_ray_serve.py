"""The server on Ray Serve: replicas that scale, are found by prefix, die, come back and drain; on the CPU."""

import asyncio
import json
import os
import re
import signal
import threading
from collections import Counter

import httpx
import openai
import pytest
from support.ray_cluster import actors, two_nodes
from support.server import MODEL, ROOT, eventually
from support.streams import all_gone, leave
from support.waiting import PATIENCE

from tritonllm import SamplingParams
from tritonllm.demo import model_path
from tritonllm.serve.ray.ray_serve import ENGINES, build_app

pytestmark = pytest.mark.long

pytest.importorskip("ray.serve")
APP = "llm"
KEY = "a-key"
ARGS = {
    "model": str(model_path()),
    "device": "cpu",
    "served_model_name": MODEL,
    "api_key": KEY,
    "health_check_period_s": "1",  # text, as from a command line
}
SCALED = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0.5}
STREAMS, TOKENS = 200, 24


class Deployed:
    """Args:
    port: of Serve's proxy.
    """

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        self.headers = {"Authorization": f"Bearer {KEY}"}
        self.client = httpx.Client(base_url=self.url, headers=self.headers, timeout=PATIENCE)

    def run(self, **changes):
        from ray import serve

        serve.run(build_app({**ARGS, **changes}), name=APP)

    def states(self):
        """How many engines are in which state."""
        from ray import serve

        return serve.status().applications[APP].deployments[ENGINES].replica_states

    def replicas(self):
        """Names of the engines that take requests."""
        found = self.states()
        names = set(re.findall(r'replica="(\w+)"', self.client.get("/metrics").text))
        return names if found == {"RUNNING": len(names)} else set()

    def metric(self, pattern):
        text = self.client.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))

    def ask(self, prompt, headers=None, **options):
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, **options}
        return self.client.post("/v1/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def deployed(free_port):
    """With one engine at first; a test brings the second."""
    from ray import serve

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.3")
        patch.delenv("TRITONLLM_API_KEY", raising=False)
        with two_nodes(cpus=2):
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": free_port})
            found = Deployed(free_port)
            try:
                found.run(autoscaling_config=SCALED)
                yield found
            finally:
                found.client.close()
                serve.shutdown()


def lives(process):
    return not all_gone([process])


def events_of(lines):
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def text_of(events):
    return "".join(json.loads(event)["choices"][0]["text"] for event in events if "error" not in event[:10])


def test_openai_clients(deployed, llm):
    client = openai.OpenAI(base_url=f"{deployed.url}/v1", api_key=KEY, max_retries=0)
    params = SamplingParams(max_tokens=12, temperature=0)
    (expected,) = llm.generate("There was a fox", params, use_tqdm=False)
    answer = client.completions.create(model=MODEL, prompt="There was a fox", max_tokens=12, temperature=0)
    assert answer.choices[0].text == expected.outputs[0].text
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    (expected,) = llm.chat(messages, params, use_tqdm=False)
    chunks = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0, stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == expected.outputs[0].text and len(texts) > 2
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.completions.create(model=MODEL, prompt="a", top_p=7)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="other").models.list()


def test_what_is_open_and_what_is_closed(deployed):
    with httpx.Client(base_url=deployed.url) as stranger:
        statuses = {path: stranger.get(path).status_code for path in ("/health", "/ready", "/version", "/metrics")}
    assert set(statuses.values()) == {200}
    for path in ("/sleep", "/", "/activity", "/docs", "/v1/../sleep"):
        assert deployed.client.post(path).status_code in (400, 404), path
    answer = deployed.client.post("/v1/completions", content=b"{" + b" " * (16 << 20) + b"}")
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    answer = deployed.client.get("/v1/models", headers={"x-request-id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_load_brings_a_second_replica(deployed):
    assert len(deployed.replicas()) == 1
    done = threading.Event()

    def load(number):
        with httpx.Client(base_url=deployed.url, headers=deployed.headers, timeout=PATIENCE) as client:
            while not done.is_set():
                body = {"model": MODEL, "prompt": f"{number} and", "max_tokens": 100, "ignore_eos": True}
                assert client.post("/v1/completions", json=body).status_code == 200

    threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: sum(deployed.states().values()) == 2)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    eventually(lambda: len(deployed.replicas()) == 2)


def test_what_begins_alike_meets_again(deployed):
    eventually(lambda: len(deployed.replicas()) == 2)
    by_prompt, by_session = {}, {}
    for turn in range(3):
        for i in range(16):
            answer = deployed.ask(f"{i} foxes", max_tokens=1)
            assert by_prompt.setdefault(i, answer.headers["x-replica"]) == answer.headers["x-replica"]
            answer = deployed.ask(f"turn {turn}", headers={"x-session-id": f"session-{i}"}, max_tokens=1)
            assert by_session.setdefault(i, answer.headers["x-replica"]) == answer.headers["x-replica"]
    assert set(by_prompt.values()) == set(by_session.values()) == deployed.replicas()


def test_a_client_that_leaves_ends_its_request(deployed):
    aborted = r'vllm:request_success_total{.*finished_reason="abort".*}'
    body = {"model": MODEL, "prompt": "foxes", "max_tokens": 1900, "ignore_eos": True}
    before = deployed.metric(aborted)
    with deployed.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    eventually(lambda: deployed.metric(aborted) == before + 1)
    runs = r"vllm:num_requests_running{.*}"
    eventually(lambda: deployed.metric(runs) == 0)
    leave(deployed.url, body, lambda: deployed.metric(runs) > 0, headers=deployed.headers)
    eventually(lambda: deployed.metric(aborted) == before + 2)


async def stream(client, prompt, begun, tokens):
    """How it ended, its text, and how many errors there were. ``begun`` gets the replica that has begun to answer."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    lines = []
    async with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as answer:
        if answer.status_code != 200:
            return "refused", await answer.aread(), 1
        async for line in answer.aiter_lines():
            begun[prompt] = answer.headers["x-replica"]
            lines.append(line)
    *events, last = events_of(lines)
    errors = [event for event in [*events, last] if '"error"' in event]
    if errors:
        assert events.count("[DONE]") == 0 or last == "[DONE]"
        return "broken", text_of(event for event in events if event not in errors), len(errors)
    assert last == "[DONE]"
    return "done", text_of(events), 0


async def streams_with(deployed, prompts, deed, late=(), replicas=1, tokens=TOKENS):
    """Results of streams; the deed is done when half of the prompts have begun, at so many replicas, and the late ones
    come meanwhile."""
    begun = {}
    options = {"timeout": PATIENCE, "limits": httpx.Limits(max_connections=None)}
    async with httpx.AsyncClient(base_url=deployed.url, headers=deployed.headers, **options) as client:
        tasks = [asyncio.create_task(stream(client, prompt, begun, tokens)) for prompt in prompts]
        while len(begun) < len(prompts) // 2 or len(set(begun.values())) < replicas:
            await asyncio.sleep(0.01)
        doing = asyncio.create_task(asyncio.to_thread(deed))
        for prompt in late:
            await asyncio.sleep(0.5)
            tasks.append(asyncio.create_task(stream(client, prompt, begun, tokens)))
        await doing
        return await asyncio.gather(*tasks)


@pytest.mark.parametrize(("what", "count", "tokens"), [("replica", STREAMS, TOKENS), ("engine", 24, 400)])
def test_what_dies_comes_back_and_each_stream_ends(deployed, llm, what, count, tokens):
    eventually(lambda: len(deployed.replicas()) == 2)
    before = deployed.replicas()
    prompts = [f"{number} + {number} =" for number in range(count)]

    def kill():
        victim = actors(f"ServeReplica:{APP}:{ENGINES}")[0]
        if what == "engine":
            victim = max(victim.children(), key=lambda child: child.memory_info().rss)
        os.kill(victim.pid, signal.SIGKILL)

    results = asyncio.run(streams_with(deployed, prompts, kill, replicas=2, tokens=tokens))
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    expected = llm.generate(prompts, params, use_tqdm=False)
    for (how, text, errors), output in zip(results, expected, strict=True):
        whole = output.outputs[0].text
        assert (errors == 0 and text == whole) if how == "done" else (errors == 1 and how == "broken"), (how, text)
        assert how == "done" or whole.startswith(text)
    ends = Counter(how for how, _, _ in results)
    assert ends["done"] and ends["broken"], "some were on the replica that died, and some were not"
    eventually(lambda: len(deployed.replicas() - before) == 1 and len(deployed.replicas()) == 2)
    answers = [deployed.ask(f"{number} again", max_tokens=1) for number in range(24)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-replica"] for answer in answers} == deployed.replicas()


def test_a_replica_that_ends_finishes_its_streams(deployed, llm):
    """Both when the application is deployed again, which no request notices, and the last one when it is deleted."""
    from ray import serve

    eventually(lambda: len(deployed.replicas()) == 2)
    before = deployed.replicas()
    processes = [child for replica in actors(f"ServeReplica:{APP}") for child in [replica, *replica.children()]]
    prompts, late = [f"{number} foxes" for number in range(16)], [f"{number} late foxes" for number in range(8)]
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    outputs = llm.generate([*prompts, *late], params, use_tqdm=False)
    expected = [("done", output.outputs[0].text, 0) for output in outputs]
    again = asyncio.run(streams_with(deployed, prompts, lambda: deployed.run(num_replicas=1), late))
    assert again == expected
    assert len(deployed.replicas()) == 1 and not deployed.replicas() & before
    assert asyncio.run(streams_with(deployed, prompts, lambda: serve.delete(APP))) == expected[: len(prompts)]
    eventually(lambda: not actors(f"ServeReplica:{APP}") and not any(map(lives, processes)))
    assert deployed.ask("more").status_code == 404
