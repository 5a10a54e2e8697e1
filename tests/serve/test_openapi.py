"""Requests that are made from the server's own description: none of them may be answered with a fault of the server."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from support.examples import examples
from support.server import MODEL, eventually, running_server
from support.waiting import PATIENCE

ASK = [{"role": "user", "content": "Hi"}]
# Bodies that are answered. Most that are made are refused at once, so each of their fields is also put in here alone.
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 2},
    "/generate": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"model": MODEL, "messages": ASK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": ASK},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
}


# Without shrinking: each of its attempts is a dozen requests.
SETTINGS = settings(
    max_examples=examples(30),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@pytest.fixture(scope="module")
def small():
    """One whose answers are short, whatever is asked for."""
    with running_server("--max-model-len", "32", "--max-num-seqs", "64") as running:
        yield running


@pytest.fixture(scope="module")
def operations(small):
    described = schemathesis.openapi.from_url(f"{small.url}/openapi.json")
    return {operation.ok().path: operation.ok() for operation in described.get_all_operations()}


def test_every_path_is_described(operations):
    assert operations.keys() >= BODIES.keys()
    assert operations.keys() >= {"/health", "/ready", "/version", "/metrics", "/v1/models"}


@pytest.mark.parametrize("path", sorted(BODIES))
def test_no_request_is_the_servers_fault(small, operations, path):
    statuses = set()

    @SETTINGS
    @given(case=operations[path].as_strategy())
    def ask(case):
        made = dict(case.body) if isinstance(case.body, dict) else {}
        made.pop("model", None)
        for body in (case.body, *({**BODIES[path], name: value} for name, value in made.items())):
            case.body = body
            response = case.call(timeout=PATIENCE)
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text

    ask()
    assert {200, 400} <= statuses
    eventually(small.is_idle)
    assert small.client.get("/health").status_code == 200
