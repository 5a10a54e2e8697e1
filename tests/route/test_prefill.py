"""Requests in two halves: what goes to the backend that computes the prompt, and what to the one that answers."""

import dataclasses
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.server import eventually

from tritonllm.route.config import BackendConfig, RouterConfig
from tritonllm.route.prefill import first_half, second_half

PLACE = {"do_remote_prefill": True, "remote_host": "10.0.0.5", "remote_port": 9000}
BODY = {"model": "m", "prompt": "Hi", "max_tokens": 5, "seed": 3, "n": 2, "min_tokens": 4, "stream_options": None}


@pytest.fixture
def pair(backends, routing):
    """A prefill backend, one that answers, and a router in front of both."""
    prefill, decode = backends(2)
    prefill.more = {"kv_transfer_params": PLACE}
    listed = [BackendConfig(url=prefill.url, name="a", role="prefill"), BackendConfig(url=decode.url, name="b")]
    return prefill, decode, routing(listed, prefill_min_tokens=0)


def bodies(backend):
    return [json.loads(seen["body"]) for seen in backend.seen]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_prompt_goes_to_one_and_the_request_to_the_other(pair, path):
    prefill, decode, router = pair
    answer = router.client.post(path, json=BODY, headers={"x-request-id": "mine", "authorization": "Bearer key"})
    assert answer.json()["from"] == "b"
    first = {"model": "m", "prompt": "Hi", "max_tokens": 1, "seed": 3}
    assert bodies(prefill) == [{**first, "kv_transfer_params": {"do_remote_decode": True}}]
    assert bodies(decode) == [{**BODY, "kv_transfer_params": PLACE}]
    for seen in (*prefill.seen, *decode.seen):
        assert (seen["headers"]["x-request-id"], seen["headers"]["authorization"]) == ("mine", "Bearer key")
    assert router.metric("requests_total", backend="a", status="200") == 1


def test_a_stream_comes_from_the_second(pair):
    prefill, decode, router = pair
    answer = router.client.post("/v1/completions", json={**BODY, "stream": True})
    assert answer.headers["x-from"] == "b" and answer.text.endswith("data: [DONE]\n\n")
    assert "stream" not in bodies(prefill)[0] and bodies(decode)[0]["kv_transfer_params"] == PLACE


@pytest.mark.parametrize("how", ["500", "503", "400", "headers", "cut", "stopped", "nowhere"])
def test_without_prefill_the_request_goes_as_it_came(pair, how):
    prefill, decode, router = pair
    if how == "stopped":
        prefill.stop()
    elif how == "nowhere":
        prefill.more = {"kv_transfer_params": None}
    else:
        prefill.answer = how
    body = b'{"model" : "m",\n "prompt":"\\u00e9", "odd": [1e400]}'
    answer = router.client.post("/v1/completions", content=body)
    assert answer.status_code == 200 and answer.json()["from"] == "b"
    assert [seen["body"] for seen in decode.seen] == [body]
    result = "no_place" if how == "nowhere" else "failed"
    assert router.metric("prefills_total", result=result) == router.metric("prefills_total") == 1


def test_a_prefill_backend_that_names_no_place_is_told_once_until_the_configuration_is_read_again(pair, caplog):
    prefill, decode, router = pair
    prefill.more = {}
    told = "the prefill backend a answers without kv_transfer_params, so prompts are computed twice: it needs a kv"

    def ask():
        assert router.client.post("/v1/completions", json=BODY).json()["from"] == "b"
        return [record.levelname for record in caplog.records if record.getMessage().startswith(told)]

    assert [ask(), ask()] == [["WARNING"]] * 2
    router.run(router.router.apply(dataclasses.replace(router.config)))
    assert [ask(), ask()] == [["WARNING"] * 2] * 2
    prefill.more = {"kv_transfer_params": PLACE}
    assert len(ask()) == 2 and bodies(decode)[-1]["kv_transfer_params"] == PLACE
    assert router.metric("prefills_total", result="no_place") == 4
    assert router.metric("prefills_total", result="used") == 1


def test_one_that_hangs_until_probes_find_it_dead(pair):
    prefill, decode, router = pair
    prefill.answer, prefill.health = "hang", 500
    assert router.client.post("/v1/completions", json=BODY).json()["from"] == "b"
    assert bodies(decode) == [BODY]


def test_a_circuit_that_is_open_costs_no_time(backends, routing):
    prefill, decode = backends(2)
    prefill.answer = "500"
    listed = [BackendConfig(url=prefill.url, name="a", role="prefill"), BackendConfig(url=decode.url, name="b")]
    router = routing(listed, prefill_min_tokens=0, failure_threshold=2, backoff_seconds=60, max_backoff_seconds=60)
    for _ in range(5):
        assert router.client.post("/v1/completions", json=BODY).json()["from"] == "b"
    assert len(prefill.seen) == 2


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/embeddings", {}),
        ("/v1/completions", {"kv_transfer_params": {"remote_host": "x"}}),
        ("/v1/completions", {"use_beam_search": True}),
    ],
)
def test_what_is_not_split(pair, path, more):
    prefill, decode, router = pair
    assert router.client.post(path, json={**BODY, **more}).json()["from"] == "b"
    assert not prefill.seen and bodies(decode) == [{**BODY, **more}] and router.metric("prefills_total") == 0


@pytest.mark.parametrize(
    ("path", "short", "long"),
    [
        ("/v1/completions", {"prompt": "x" * 77}, {"prompt": "x" * 78}),  # and two quotes: a quarter of 80 bytes
        ("/v1/completions", {"prompt": [7] * 19}, {"prompt": [7] * 20}),
        ("/v1/completions", {"prompt": [[7] * 10, [7] * 9]}, {"prompt": [[7] * 10] * 2}),
        ("/v1/chat/completions", {"messages": [{"content": "x" * 60}]}, {"messages": [{"content": "x" * 70}]}),
    ],
)
def test_short_prompts_are_not_split(backends, routing, path, short, long, caplog):
    caplog.set_level(logging.INFO)
    prefill, decode = backends(2)
    prefill.more = {"kv_transfer_params": PLACE}
    listed = [BackendConfig(url=prefill.url, name="a", role="prefill"), BackendConfig(url=decode.url, name="b")]
    router = routing(listed, prefill_min_tokens=20)
    for body in (short, long):
        assert router.client.post(path, json={"model": "m", **body}).json()["from"] == "b"
    (first,) = bodies(prefill)
    assert first.items() >= long.items()
    assert bodies(decode) == [{"model": "m", **short}, {"model": "m", **long, "kv_transfer_params": PLACE}]
    router.client.post(path, json={"model": "m", **short})
    said = "prompts of fewer than 20 tokens (prefill_min_tokens) are not split: they go to a decode backend whole"
    assert [record.getMessage() for record in caplog.records].count(said) == 1


def test_no_client_is_answered_by_a_prefill_backend(pair):
    prefill, decode, router = pair
    decode.health = 500
    eventually(lambda: not router.status()["b"]["usable"])
    assert router.client.get("/health").status_code == 503
    answer = router.client.post("/v1/embeddings", json=BODY)
    assert answer.status_code == 503 and "b (down)" in answer.text and not prefill.seen


def test_configurations():
    with pytest.raises(ValueError, match="role must be 'prefill' or left out, got 'decode'"):
        BackendConfig(url="http://a:1", role="decode")
    with pytest.raises(ValueError, match="prefill_min_tokens must be at least 0, got -1"):
        RouterConfig(backends=(BackendConfig(url="http://a:1"),), prefill_min_tokens=-1)
    with pytest.raises(ValueError, match="all backends have the role 'prefill'"):
        RouterConfig(backends=(BackendConfig(url="http://a:1", role="prefill"),))


names = st.text(max_size=5) | st.sampled_from(["n", "stream", "echo", "max_tokens", "prompt"])
values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3), st.lists, max_leaves=4)


@given(st.dictionaries(names, values, max_size=8))
def test_the_halves_have_what_the_whole_has(fields):
    body = json.dumps(fields).encode()
    first = json.loads(first_half(body))
    assert first.pop("max_tokens") == 1 and first.pop("kv_transfer_params") == {"do_remote_decode": True}
    assert all(first[name] == fields[name] for name in first) and fields.get("prompt") == first.get("prompt")
    answer = json.dumps({"choices": [], "kv_transfer_params": PLACE}).encode()
    assert json.loads(second_half(body, answer)) == {**fields, "kv_transfer_params": PLACE}


@given(st.binary(max_size=30) | st.sampled_from([b"[1]", b"3", b"null", b'{"kv_transfer_params": 3}']))
def test_what_is_no_object_is_not_split(data):
    answer = second_half(b"{}", data)
    assert answer is None
    if not data.strip().startswith(b"{"):
        assert first_half(data) is None
