"""A server that computes prompts and one that goes on with them: what requests and answers say of blocks."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.router import RouterProcess
from support.server import MODEL, RunningServer
from support.waiting import PATIENCE, eventually

from tritonllm.config.engine import EngineConfig
from tritonllm.demo import model_path
from tritonllm.offline.engines import Engines
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.engines.engine_client import EngineProcess
from tritonllm.serve.processes.run import serve

PROMPT = "Once upon a time, there was a little dog. He liked to play in the park with his friend. " * 2
BODY = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 8}
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}


@pytest.fixture(scope="module")
def pair():
    """One that computes prompts, and one that goes on with them."""
    waits = {"peers": ["127.0.0.1"], "timeout": PATIENCE, "wait": PATIENCE}

    def start(role):
        transfer = {"kv_connector": "Peer", "kv_role": role, "kv_connector_extra_config": waits}
        return RunningServer("--kv-offloading-size", "0.05", "--kv-transfer-config", json.dumps(transfer))

    with ThreadPoolExecutor() as threads:
        servers = list(threads.map(start, ["kv_producer", "kv_consumer"]))
    yield servers
    for server in servers:
        server.close()


def post(server, path, body, **more):
    answer = server.client.post(path, json={**body, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer):
    (choice,) = answer["choices"]
    return choice.get("text") or choice["message"]["content"]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_a_server_without_a_connector_says_so_and_answers(server, path, body):
    answer = post(server, path, body, kv_transfer_params=PREFILL)
    assert answer["kv_transfer_params"] is None
    named = post(server, path, body, kv_transfer_params={"remote_host": "127.0.0.1", "remote_port": 1})
    plain = post(server, path, body)
    assert text_of(answer) == text_of(named) == text_of(plain) and "kv_transfer_params" not in plain


def test_what_is_refused(server):
    bad = server.client.post("/v1/completions", json={**BODY, "kv_transfer_params": "x"})
    search = server.client.post("/v1/completions", json={**BODY, "kv_transfer_params": {}, "use_beam_search": True})
    assert (bad.status_code, search.status_code) == (400, 400)
    assert "kv_transfer_params" in bad.text and "do not go together" in search.text


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"do_remote_prefil": True}, "'do_remote_prefil' is unknown; there are do_remote_prefill, do_remote_decode"),
        ({"do_remote_prefill": True, "remote_host": "a"}, "needs remote_host and remote_port"),
        ({"remote_host": "a", "remote_port": "9000"}, "remote_port must be an integer from 1 to 65535, got '9000'"),
    ],
)
def test_what_is_misspelt_or_incomplete_is_refused(server, path, body, params, message):
    for more in ({}, {"stream": True}):
        answer = server.client.post(path, json={**body, **more, "kv_transfer_params": params})
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def is_cached(answer):
    """All but the last tokens of the prompt, which are computed in any case."""
    usage = answer["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_from_a_prefill_server_to_a_decode_server(server, pair, path, body):
    prefill, decode = pair
    first = post(prefill, path, body, max_tokens=1, kv_transfer_params=PREFILL)
    params = first["kv_transfer_params"]
    assert params["remote_host"] == "127.0.0.1" and params["remote_port"] > 0
    answer = post(decode, path, body, kv_transfer_params=params)
    assert text_of(answer) == text_of(post(server, path, body)) and is_cached(answer)
    assert decode.metric("tritonllm:kv_transfer_fetched_blocks_total") > 0
    assert decode.metric("tritonllm:kv_transfer_missed_blocks_total") == 0
    eventually(lambda: prefill.metric("tritonllm:kv_transfer_saved_blocks_total") > 0)  # nobody asks it anything more
    assert decode.metric("tritonllm:kv_transfer_saved_blocks_total") == 0  # a consumer


def chunks_of(server, path, body, **more):
    with server.client.stream("POST", path, json={**body, "stream": True, **more}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_the_end_of_a_stream_says_where_blocks_are(server, pair, path, body):
    prefill, decode = pair
    other = json.loads(json.dumps(body).replace("Once upon a time", "Late in the evening"))
    usage = {"stream_options": {"include_usage": True}}
    whole = post(prefill, path, other, max_tokens=1, kv_transfer_params=PREFILL)["kv_transfer_params"]
    *begin, last, counts = chunks_of(prefill, path, other, n=2, max_tokens=3, kv_transfer_params=PREFILL, **usage)
    assert last["choices"][0]["finish_reason"] == "length" and counts["choices"] == []
    assert last["kv_transfer_params"] == counts["kv_transfer_params"] == whole
    assert whole["remote_port"] > 0 and not any("kv_transfer_params" in chunk for chunk in begin)
    answer = post(decode, path, other, kv_transfer_params=last["kv_transfer_params"])
    assert text_of(answer) == text_of(post(server, path, other)) and is_cached(answer)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_a_stream_says_that_there_is_nothing_only_if_it_was_asked(server, path, body):
    *begin, last = chunks_of(server, path, body, kv_transfer_params=PREFILL)
    assert last["kv_transfer_params"] is None and not any("kv_transfer_params" in chunk for chunk in begin)
    assert not any("kv_transfer_params" in chunk for chunk in chunks_of(server, path, body))


def test_several_prompts_in_one_stream_say_it_once(pair):
    prefill, _ = pair
    prompts = [PROMPT, "Late in the morning a cat sat near the window. " * 3]
    chunks = chunks_of(prefill, "/v1/completions", {**BODY, "prompt": prompts}, kv_transfer_params=PREFILL)
    assert [chunk["kv_transfer_params"]["remote_host"] for chunk in chunks[-1:]] == ["127.0.0.1"]
    assert sum("kv_transfer_params" in chunk for chunk in chunks) == 1


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_the_router_sends_requests_through_both(server, pair, tmp_path, path, body):
    prefill, decode = pair
    config = tmp_path / "router.toml"
    backends = f'[[backends]]\nurl = "{prefill.url}"\nrole = "prefill"\n[[backends]]\nurl = "{decode.url}"\n'
    config.write_text(f"prefill_min_tokens = 0\n{backends}")
    fresh = json.loads(json.dumps(body).replace("Once upon a time", "One day in the summer"))
    with RouterProcess("--config", str(config)) as router:
        answer = post(router, path, fresh)
    assert text_of(answer) == text_of(post(server, path, fresh)) and is_cached(answer)
    assert "kv_transfer_params" in answer


@pytest.mark.parametrize(
    "start",
    [
        lambda config: serve(config, ServerConfig(model_names=("m",), port=0), max_queue=0),
        lambda config: serve(config, ServerConfig(model_names=("m",), port=0, api_server_count=2), max_queue=0),
        AsyncLLM,
        Engines,
    ],
    ids=["serve", "serve_several", "AsyncLLM", "Engines"],
)
def test_wrong_settings_are_refused_before_a_process_is_started(start, monkeypatch):
    monkeypatch.setattr(EngineProcess, "__init__", lambda *args, **more: pytest.fail("an engine's process was started"))
    transfer = {"kv_connector": "FileStore", "kv_connector_extra_config": {"folder": "x"}}
    config = EngineConfig.from_kwargs(model=str(model_path()), kv_offloading_size=0.05, kv_transfer_config=transfer)
    with pytest.raises(ValueError, match="'folder' is none of FileStore's; there are path"):
        start(config)
