"""The limits, with a body and a handler that take as long as the test wants."""

import asyncio

import pytest

from tritonllm.http import guard as http_guard
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.api.guard import Guard


def config(**more):
    return ServerConfig(model_names=("m",), **more)


class Exchange:
    """One request and what is answered."""

    def __init__(self, path="/v1/completions", headers=(), bodies=(b"{}",), hold=None):
        given = [(b"content-type", b"application/json"), *headers]
        self.scope = {"type": "http", "method": "POST", "path": path, "headers": given}
        self.coming = [{"type": "http.request", "body": body, "more_body": True} for body in bodies]
        if hold is None:
            self.coming[-1]["more_body"] = False
        self.answer = {}

    async def receive(self):
        if self.coming:
            return self.coming.pop(0)
        return await asyncio.Event().wait()

    async def send(self, message):
        self.answer.update(message)


async def handler(scope, receive, send):
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def status(app, exchange):
    await app(exchange.scope, exchange.receive, exchange.send)
    return exchange.answer["status"]


def test_a_body_in_pieces_arrives_whole():
    exchange = Exchange(bodies=(b"a", b"b", b"c"))
    assert asyncio.run(status(Guard(handler, config()), exchange)) == 200
    assert exchange.answer["body"] == b"abc"


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (Exchange(bodies=(b"12345", b"678901")), 413),
        (Exchange(headers=[(b"content-length", b"11")]), 413),
        (Exchange(headers=[(b"content-length", b"-1")]), 413),
        (Exchange(bodies=(b"1234567890",)), 200),
    ],
)
def test_the_limit_of_a_body(exchange, expected):
    assert asyncio.run(status(Guard(handler, config(max_body_bytes=10)), exchange)) == expected


def test_a_body_that_never_ends(monkeypatch):
    monkeypatch.setattr(http_guard, "BODY_SECONDS", 0.01)
    assert asyncio.run(status(Guard(handler, config()), Exchange(hold=True))) == 408


def test_more_than_can_be_answered_at_once():
    async def crowd():
        release = asyncio.Event()

        async def slow(scope, receive, send):
            await release.wait()
            await handler(scope, receive, send)

        app = Guard(slow, config(max_concurrency=2))
        running = [asyncio.create_task(status(app, Exchange())) for _ in range(2)]
        await asyncio.sleep(0)
        refused = Exchange()
        assert await status(app, refused) == 429
        assert (b"retry-after", b"1") in refused.answer["headers"]
        probe = asyncio.create_task(status(app, Exchange("/health")))
        release.set()
        assert await asyncio.gather(*running, probe) == [200, 200, 200]
        assert await status(app, Exchange()) == 200, "places are given back"

    asyncio.run(crowd())


def test_the_first_of_a_crowd_is_far_while_the_last_waits():
    begun, through = [], []

    async def steps(scope, receive, send):
        begun.append(scope["number"])
        for _ in range(3):  # as a request has on its way to the engine
            await asyncio.sleep(0)
        through.append((scope["number"], len(begun)))
        await handler(scope, receive, send)

    async def crowd():
        app, exchanges = Guard(steps, config(max_concurrency=1000)), [Exchange() for _ in range(500)]
        for number, exchange in enumerate(exchanges):
            exchange.scope["number"] = number
        tasks = [asyncio.create_task(status(app, exchange)) for exchange in exchanges]
        await asyncio.sleep(0)
        left = [7, 8, 100, 499]  # clients that go away, before and while they wait
        for number in left:
            tasks[number].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        gone = {number for number, one in enumerate(done) if isinstance(one, asyncio.CancelledError)}
        assert gone == set(left)
        assert [one for number, one in enumerate(done) if number not in gone] == [200] * 496
        later = Exchange()
        later.scope["number"] = 500
        assert await status(app, later) == 200, "turns go on"

    asyncio.run(crowd())
    assert begun == sorted(begun), "in the order in which they came"
    assert max(others - number for number, others in through) <= 8 * 6, "few begin while one is on its way"


def test_one_of_several_keys():
    app = Guard(handler, config(api_keys=("first", "second")))

    def ask(*headers, path="/v1/models"):
        return asyncio.run(status(app, Exchange(path, headers=headers)))

    assert ask((b"authorization", b"Bearer first")) == ask((b"authorization", b"bearer second")) == 200
    assert ask() == ask((b"authorization", b"Bearer third")) == ask((b"authorization", b"Bearer ")) == 401
    assert ask(path="/health") == 200


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 70000}, "--port"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"max_body_bytes": 0}, "--max-body-bytes"),
        ({"max_header_bytes": 0}, "--max-header-bytes"),
        ({"max_header_count": 0}, "--max-header-count"),
        ({"header_timeout": 0}, "--header-timeout"),
        ({"drain_seconds": -1}, "--drain-seconds"),
        ({"drain_seconds": float("nan")}, "--drain-seconds"),
        ({"request_timeout": 0}, "--request-timeout"),
        ({"ssl_certfile": "x"}, "--ssl-keyfile"),
        ({"model_names": ()}, "--served-model-name"),
        ({"allowed_origins": ("https://a.example/",)}, "--allowed-origins must be .* without a path"),
        ({"allowed_origins": ("chat.example",)}, "--allowed-origins"),
    ],
)
def test_a_bad_option_is_named(values, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**{"model_names": ("m",), **values})
