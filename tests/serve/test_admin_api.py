"""Sleep, wake-up, other weights and an empty prefix cache, over HTTP and through AsyncLLM."""

import asyncio
from shutil import copytree

import httpx
import pytest
from safetensors.torch import load_file, save_file
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.imported_processes import imported_processes
from support.server import MODEL, eventually, running_server
from support.streams import Stream
from support.waiting import PATIENCE

import tritonllm
from tritonllm import LLM, AsyncEngineArgs, AsyncLLM
from tritonllm.demo import model_path
from tritonllm.engine.data.asleep import AsleepError
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.engine_client import EngineDeadError

BODY = {"model": MODEL, "prompt": "There was a fox named", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
PROMPT = list(range(5, 25))
ENGINE = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def admin():
    options = "--server-dev-mode", "--enable-sleep-mode", "--api-server-count", "2", "--root-path", "/llm"
    with running_server(*options, "--enable-tokenizer-info-endpoint") as running:
        yield running


def ask(server, **more):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:  # a new connection: either process answers
        return client.post("/v1/completions", json={**BODY, **more})


def text(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def post(server, path, **kwargs):
    return server.client.post(path, **kwargs)


def sleeping(server):
    return server.client.get("/is_sleeping").json() == {"is_sleeping": True}


def test_paths_below_a_root_that_may_be_taken_away(admin):
    get = admin.client.get
    assert get("/llm/v1/models").json() == get("/v1/models").json()
    assert get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert [get(path).status_code for path in ("/llm/health", "/llmhealth", "/other/health")] == [200, 404, 404]


def test_what_the_server_is(admin):
    told = admin.client.get("/server_info", params={"config_format": "json"}).json()
    assert told["version"] == tritonllm.__version__ and told["vllm_config"]["model"]["model"] == str(model_path())
    blocks, length = told["num_blocks"], told["max_model_len"]
    assert told["max_concurrency"] == round(blocks / -(-length // 16), 2) >= 1
    assert f"model={str(model_path())!r}" in admin.client.get("/server_info").json()["vllm_config"]
    tokenizer = admin.client.get("/tokenizer_info").json()
    assert "Fast" in tokenizer["tokenizer_class"] or "Tokenizer" in tokenizer["tokenizer_class"]
    assert "{%" in tokenizer["chat_template"] and "eos_token" in tokenizer


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up(admin, level):
    expected = text(ask(admin))
    reply = post(admin, f"/sleep?level={level}")
    assert (reply.status_code, reply.json()) == (200, {"is_sleeping": True})
    eventually(lambda: all(sleeping(admin) for _ in range(8)))  # both processes have heard of it
    reply = ask(admin)
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "asleep"
    assert reply.headers["Retry-After"]
    assert admin.client.get("/ready").status_code == 503 and admin.client.get("/health").status_code == 200
    assert post(admin, "/wake_up?tags=weights").json() == {"is_sleeping": True}
    if level == 2:
        assert post(admin, "/collective_rpc", json={"method": "reload_weights"}).json() == {"results": [None]}
    assert post(admin, "/wake_up?tags=kv_cache").json() == {"is_sleeping": False}
    eventually(lambda: all(admin.client.get("/ready").status_code == 200 for _ in range(8)))
    assert text(ask(admin)) == expected


def test_running_requests_end_first(admin):
    eventually(admin.is_idle)
    streams = [Stream(admin, max_tokens=300) for _ in range(3)]
    assert post(admin, "/sleep").status_code == 200
    assert all(stream.end()[-1] == "[DONE]" for stream in streams)
    assert post(admin, "/wake_up").status_code == 200
    streams = [Stream(admin, max_tokens=2000) for _ in range(3)]
    assert post(admin, "/sleep?mode=abort").status_code == 200
    for stream in streams:
        assert '"finish_reason":"abort"' in stream.end()[-2]
    assert post(admin, "/wake_up").status_code == 200
    eventually(lambda: all(admin.client.get("/ready").status_code == 200 for _ in range(8)))


def test_the_prefix_cache_is_emptied(admin):
    name = "vllm:prefix_cache_hits_total"
    prompt = "Tom and Mia went to the park to play with a ball. " * 4
    ask(admin, prompt=prompt)
    before = admin.metric(name)
    ask(admin, prompt=prompt)
    eventually(lambda: admin.metric(name) > before)
    eventually(admin.is_idle)
    assert post(admin, "/reset_prefix_cache").status_code == 200
    before = admin.metric(name)
    ask(admin, prompt=prompt)
    eventually(admin.is_idle)
    assert admin.metric(name) == before
    stream = Stream(admin)
    assert post(admin, "/reset_prefix_cache").status_code == 409
    stream.end()


def test_other_weights(admin, tmp_path):
    expected = text(ask(admin))
    other = tmp_path / "other"
    copytree(model_path(), other)
    for file in other.glob("*.safetensors"):
        save_file({name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}, file)
    reply = post(admin, "/reload_weights", json={"model": str(tiny_checkpoint())})
    assert reply.status_code == 400 and "another model" in reply.json()["error"]["message"]
    assert text(ask(admin)) == expected
    assert post(admin, "/reload_weights", json={"model": str(other)}).status_code == 200
    assert text(ask(admin)) != expected
    assert post(admin, "/reload_weights").status_code == 200
    assert text(ask(admin)) == expected


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/sleep?level=3", None, 400, "level must be 1"),
        ("/sleep?level=x", None, 400, "level"),
        ("/sleep?mode=hard", None, 400, "mode"),
        ("/wake_up?tags=all", None, 400, "tags must be some of"),
        ("/reload_weights", {"folder": "x"}, 400, "unknown field 'folder'"),
        ("/reload_weights", {"model": "./nowhere"}, 400, "there is no such folder"),
        ("/reset_expert_load", None, 400, "make it with count_expert_load=True"),
        ("/collective_rpc", {"method": "load"}, 400, "method"),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"path": "x"}}, 400, "one argument, model"),
    ],
)
def test_mistakes(admin, path, body, status, message):
    reply = post(admin, path, json=body) if body is not None else post(admin, path)
    assert reply.status_code == status, reply.text
    assert message in reply.json()["error"]["message"]
    assert not sleeping(admin)


def test_pages_of_browsers_are_refused(admin):
    reply = post(admin, "/sleep", headers={"Origin": "http://elsewhere.example"})
    assert reply.status_code == 403 and not sleeping(admin)


@pytest.mark.long
def test_what_experts_do_is_counted_over_all_engines():
    options = {**ENGINE, "count_expert_load": True, "enable_prefix_caching": False, "data_parallel_size": 2}
    one = tiny_llm(tiny_checkpoint("qwen3_moe"), count_expert_load=True, enable_prefix_caching=False)
    llm = LLM(str(tiny_checkpoint("qwen3_moe")), **options)
    for each in (one, llm):
        each.generate([PROMPT[:n] for n in (4, 9, 13)], greedy(5), use_tqdm=False)
    assert llm.expert_load() == one.expert_load()
    llm.reset_expert_load()
    assert all(set(counts) == {0} for counts in llm.expert_load().layers.values())
    llm.shutdown()


def test_only_behind_the_option(server):
    for path in (
        "/sleep",
        "/wake_up",
        "/reload_weights",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/reset_expert_load",
    ):
        assert post(server, path).status_code == 404


def test_async_llm():
    with asyncio.Runner() as runner:
        args = AsyncEngineArgs(model=str(tiny_checkpoint()), enable_sleep_mode=True, **ENGINE)
        with imported_processes():
            llm = AsyncLLM.from_engine_args(args)
        expected = token_ids(tiny_llm().generate([PROMPT], greedy(), use_tqdm=False))
        try:
            runner.run(_follow(llm, expected))
        finally:
            llm.shutdown()


async def _tokens(llm, request_id, max_tokens=12):
    return token_ids([output async for output in llm.generate(PROMPT, greedy(max_tokens), request_id)][-1:])


async def _follow(llm, expected):
    assert await _tokens(llm, "a") == expected
    running = [asyncio.create_task(_tokens(llm, f"long{n}", 100)) for n in range(3)]
    while llm.stats.num_running + llm.stats.num_waiting < len(running):
        await asyncio.sleep(0.01)
    asleep = asyncio.create_task(llm.sleep())
    await asyncio.sleep(0)
    late = asyncio.create_task(_tokens(llm, "late"))  # sent after the order, while requests run
    with pytest.raises(AsleepError):
        await late
    await asleep
    assert all(len(tokens[0]) == 100 for tokens in await asyncio.gather(*running))
    assert await llm.is_sleeping()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make_app(llm, ServerConfig(model_names=("tiny",)))), base_url="http://x"
    ) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPT})
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "asleep"
    with pytest.raises(ValueError, match="mode must be wait or abort"):
        await llm.sleep(mode="now")
    with pytest.raises(ValueError, match="method must be"):
        await llm.collective_rpc("load")
    await llm.wake_up()
    assert not await llm.is_sleeping() and await _tokens(llm, "b") == expected
    assert await llm.reset_prefix_cache() is True
    running = asyncio.create_task(_tokens(llm, "last", 200))
    while not llm.stats.num_running:
        await asyncio.sleep(0.01)
    waits = asyncio.create_task(llm.sleep())
    await asyncio.sleep(0)
    llm._died("it was killed")  # what a watcher says
    for task in (waits, running):
        with pytest.raises(EngineDeadError, match="it was killed"):
            await task


def test_what_experts_do_is_told_over_http():
    with asyncio.Runner() as runner:
        args = AsyncEngineArgs(model=str(tiny_checkpoint("qwen3_moe")), count_expert_load=True, **ENGINE)
        with imported_processes():
            llm = AsyncLLM.from_engine_args(args)
        try:
            runner.run(_count(llm))
        finally:
            llm.shutdown()


async def _count(llm):
    one = tiny_llm(tiny_checkpoint("qwen3_moe"), count_expert_load=True)
    one.generate([PROMPT], greedy(), use_tqdm=False)
    await _tokens(llm, "a")
    app = make_app(llm, ServerConfig(model_names=("tiny",), server_dev_mode=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        assert (await client.get("/expert_load")).json() == one.expert_load().as_json()
        assert (await client.post("/reset_expert_load")).status_code == 200
        told = (await client.get("/expert_load")).json()
        assert all(set(counts) == {0} for counts in told["layers"].values())
