"""Another configuration while requests run: nobody notices, and a bad one changes nothing."""

import asyncio
import dataclasses
import json
import threading

import pytest
from support.server import eventually
from support.waiting import PATIENCE

from tritonllm.route import reload
from tritonllm.route.config import BackendConfig, RouterConfig
from tritonllm.route.reload import ConfigFile

COMPLETE = "/v1/completions"
OPTIONS = "health_interval = 0.1\nbackoff_seconds = 0.05\nmax_backoff_seconds = 0.2\n"


def config_text(backends, more=""):
    tables = "".join(f'[[backends]]\nurl = "{b.url}"\nname = "{b.name}"\n' for b in backends)
    return f"{OPTIONS}{more}\n{tables}"


def ask(router, prompt="Hi"):
    return router.client.post(COMPLETE, json={"model": "m", "prompt": prompt})


class Streams:
    """Streams that threads read to their ends."""

    def __init__(self, router, count, **body):
        self.results: list[str] = []
        asked = {"model": "m", "stream": True, **body}
        self._threads = [
            threading.Thread(target=self._read, args=(router.client, {**asked, "prompt": f"{i}"})) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, client, body):
        with client.stream("POST", COMPLETE, json=body) as answer:
            texts = [line[6:] for line in answer.iter_lines() if line]
        expected = [
            json.dumps({"choices": [{"index": 0, "text": f"{body['prompt']}:{i}"}]}) for i in range(len(texts) - 1)
        ]
        self.results.append(
            "whole" if texts == [*expected, "[DONE]"] and len(texts) == body["max_tokens"] + 1 else str(texts)
        )

    def end(self):
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a stream hangs"
        return self.results


@pytest.fixture
def reloading(backends, routing, tmp_path):
    """A router that reads a file again; ``write(text)`` replaces it, as editors and Kubernetes do."""
    made = backends(3)
    path = tmp_path / "router.toml"

    def write(text):
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)

    write(config_text(made[:2]))
    router = routing(made[:2])
    file = ConfigFile(path, {}, router.router.apply, router.router.metrics.reloaded)

    async def begin():
        return asyncio.ensure_future(file.watch())

    watching = router.run(begin())
    yield router, made, write, file
    watching.get_loop().call_soon_threadsafe(watching.cancel)


def test_a_backend_comes_and_one_goes_without_dropping_a_stream(reloading):
    router, (a, b, c), write, _ = reloading
    for backend in (a, b, c):
        backend.delay = 0.02
    streams = Streams(router, 20, max_tokens=100)
    eventually(lambda: a.running + b.running == 20)
    before = a.running
    assert before
    write(config_text([b, c]))
    eventually(lambda: set(router.status()) == {"a", "b", "c"} and router.status()["a"]["draining"])
    assert a.running == before, "it should be drained, not cut off"
    c.delay = 0
    seen = len(a.seen)
    names = {ask(router, f"{i}").json()["from"] for i in range(30)}
    assert names == {"b", "c"} and len(a.seen) == seen
    assert streams.end() == ["whole"] * 20
    eventually(lambda: set(router.status()) == {"b", "c"})


def test_reload_again_and_again_under_load(reloading):
    router, made, write, file = reloading
    for backend in made:
        backend.delay = 0.01
    streams = Streams(router, 20, max_tokens=60)
    for i in range(12):
        left = [backend for j, backend in enumerate(made) if j != i % 3]
        write(config_text(left, f"max_retries = {i}"))
        file_is_read = router.metric("reloads_total", result="done") + 1
        router.run(asked(file))
        eventually(lambda least=file_is_read: router.metric("reloads_total", result="done") >= least)
        assert ask(router, f"{i}").status_code == 200
    assert streams.end() == ["whole"] * 20
    eventually(lambda: len(router.status()) == 2)


async def asked(file):
    file.reload()


@pytest.mark.parametrize(
    ("text", "why"),
    [("policy =", "is not TOML"), ("colour = 1", "unknown key 'colour'"), ("", "no backend"), (None, "No such file")],
)
def test_a_bad_file_is_refused(reloading, tmp_path, caplog, text, why):
    router, _, write, file = reloading
    before = router.router.config
    if text is None:
        (tmp_path / "router.toml").unlink()
    else:
        write(text)
    router.run(asked(file))
    eventually(lambda: router.metric("reloads_total", result="refused") >= 1)
    assert router.router.config is before and "Errno" not in caplog.text
    assert why in caplog.text and "the old one stays" in caplog.text
    assert ask(router).status_code == 200


def test_a_file_that_cannot_be_applied_does_not_end_the_watch(reloading, caplog, monkeypatch):
    router, made, write, file = reloading
    with monkeypatch.context() as patch:
        patch.setattr(file, "_apply", lambda config: 1 / 0)
        write(config_text(made[:1]))
        router.run(asked(file))
        eventually(lambda: router.metric("reloads_total", result="refused") >= 1)
    assert "in part only" in caplog.text
    write(config_text(made[1:]))
    router.run(asked(file))
    eventually(lambda: set(router.status()) == {backend.name for backend in made[1:]})


def test_a_file_that_is_gone_is_said_once(reloading, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(reload, "LOOK_SECONDS", 0.05)
    router, made, write, _ = reloading
    (tmp_path / "router.toml").unlink()
    eventually(lambda: router.metric("reloads_total", result="refused") == 1)
    assert f"refused, the old one stays: {tmp_path / 'router.toml'}: No such file or directory" in caplog.text
    assert ask(router).status_code == 200
    write(config_text(made[:2]))
    eventually(lambda: router.metric("reloads_total", result="done") == 1)
    assert router.metric("reloads_total", result="refused") == 1


LEFT, RIGHT = BackendConfig(url="http://a", name="left"), BackendConfig(url="http://b", name="right")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "nothing changed"),
        ({"policy": "round-robin"}, "changed: policy (prefix -> round-robin)"),
        ({"api_keys": ("secret",)}, "changed: api_keys"),
        ({"port": 1}, "nothing changed"),  # said apart
        ({"backends": (RIGHT,)}, "backends added: right; draining: left"),
        ({"backends": (LEFT, RIGHT), "max_retries": 1}, "backends added: right; changed: max_retries (2 -> 1)"),
        (
            {"backends": (BackendConfig(url="http://c", name="left", api_key="secret"),)},
            "changed: left (url, api_key)",
        ),
    ],
)
def test_what_changed_is_said_in_words(options, said):
    old = RouterConfig(backends=(LEFT,))
    assert reload.changes(old, dataclasses.replace(old, **options)) == said


def test_all_backends_can_be_replaced_at_once(reloading):
    """The new ones are asked before the old ones leave: no request finds none."""
    router, (a, b, c), write, file = reloading
    statuses, stop = [], threading.Event()

    def keep_asking():
        while not stop.is_set():
            statuses.append(ask(router, str(len(statuses))).status_code)

    asker = threading.Thread(target=keep_asking)
    asker.start()
    for left in ([c], [a, b], [c]):
        write(config_text(left))
        router.run(asked(file))
        eventually(lambda names={backend.name for backend in left}: set(router.status()) == names)
    stop.set()
    asker.join()
    assert set(statuses) == {200}


def test_state_stays_with_name_and_url(backends, routing):
    a, b = backends(2)
    router = routing([a, b])
    old = dict(router.router.pool.backends)
    listed = (BackendConfig(url=a.url, name="a"), BackendConfig(url=b.url + "/", name="other"))
    router.run(router.router.apply(RouterConfig(backends=listed, policy="round-robin", health_interval=0.1)))
    now = router.router.pool.backends
    assert now["a"] is old["a"] and now["other"] is not old["b"]
    eventually(lambda: {ask(router).json()["from"] for _ in range(4)} == {"a", "b"})


def test_models_that_are_listed_win_until_they_are_not(backends, routing):
    (a,) = backends()
    router = routing([BackendConfig(url=a.url, name="a", models=("x",))])
    assert [model["id"] for model in router.client.get("/v1/models").json()["data"]] == ["x"]
    router.run(router.router.apply(RouterConfig(backends=(BackendConfig(url=a.url, name="a"),), health_interval=0.1)))
    eventually(lambda: [model["id"] for model in router.client.get("/v1/models").json()["data"]] == ["m"])


def test_what_needs_a_restart_is_said(backends, routing, caplog):
    (a,) = backends()
    router = routing([a])
    router.run(router.router.apply(RouterConfig(backends=router.config.backends, port=1234)))
    assert "port changes only when the router starts again" in caplog.text
