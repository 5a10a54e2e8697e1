"""A router and two real servers, each on a host of its own: a network that splits, slows down and comes back, and a
host that is lost and replaced. Nobody repairs anything but the network and the host."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.namespaces import network
from support.routed_streams import Streams, count_whole
from support.router import RouterProcess
from support.server import MODEL, RunningServer, eventually
from support.waiting import PATIENCE

pytestmark = pytest.mark.long

PROMPTS = [f"{name} was a fox who" for name in ("Anna", "Bert", "Carl", "Dora", "Emil", "Fay", "Gus", "Hal")]
TOKENS = 800  # of a stream: on a busy machine those of one server may begin seconds before those of the other
PORT = "8000"
OPTIONS = [
    *("--health-interval", "0.5", "--health-timeout", "4", "--connect-timeout", "2", "--host-timeout", "6"),
    *("--sticky-chars", "64", "--balance-min-tokens", "0"),
]


@pytest.fixture(scope="module")
def hosts():
    """The router's, and those of two servers."""
    with network(3) as made:
        yield made


@pytest.fixture(autouse=True)
def at_the_router(hosts):
    """Clients are on its host."""
    with hosts.hosts[0].inside():
        yield


def start_server(host):
    with host.inside():
        return RunningServer("--host", host.address, "--port", PORT, "--max-num-seqs", "64")


@pytest.fixture(scope="module")
def servers(hosts):
    """The last test of the file replaces the second one."""
    with ThreadPoolExecutor() as threads:
        made = list(threads.map(start_server, hosts.hosts[1:]))
    yield made
    for server in made:
        server.close()


def start_router(servers, *options):
    backends = [word for server in servers for word in ("--backend", server.url)]
    return RouterProcess(*OPTIONS, *options, *backends)


@pytest.fixture(scope="module")
def router(hosts, servers):
    with hosts.hosts[0].inside(), start_router(servers) as running:
        yield running


@pytest.fixture(scope="module")
def expected(hosts, router):
    """The tokens of each prompt when nothing happens."""
    with hosts.hosts[0].inside():
        ends = Streams(router.client, PROMPTS, TOKENS).end()
    assert all(len(end.tokens) == TOKENS and end.done == 1 for end in ends)
    return {end.prompt: end.tokens for end in ends}


def backends_of(router):
    return router.client.get("/status").json()["backends"]


def answers_of(router, server):
    """How many this server has given through the router."""
    lines = router.client.get("/metrics").text.splitlines()
    wanted = ("tritonllm:route_requests_total", f'backend="{server.url}"', 'status="200"')
    return sum(float(line.split()[-1]) for line in lines if all(part in line for part in wanted))


def is_used_again(router, server):
    """It is found to live, and answers again; nobody notices from the answers."""
    before = answers_of(router, server)

    def answers():
        ends = Streams(router.client, PROMPTS, 4).end()
        assert all(end.done == 1 and not end.errors for end in ends)
        return answers_of(router, server) > before

    eventually(answers)


def running_streams(router, copies=2):
    """Streams at both servers, of which each has begun."""
    prompts = PROMPTS * copies
    streams = Streams(router.client, prompts, TOKENS)
    eventually(lambda: streams.begun == len(prompts))
    assert all(backend["in_flight"] for backend in backends_of(router)), "the prompts should be those of both servers"
    return streams


def test_a_short_split_and_a_slow_link_change_nothing(hosts, router, servers, expected):
    front, _, second = hosts.hosts
    streams = running_streams(router)
    hosts.cut(second)
    time.sleep(0.3)
    hosts.mend(second)
    hosts.slow_down(front, kilobits=3000)
    ends = streams.end()
    hosts.speed_up(front)
    assert count_whole(ends, expected) == len(ends)


@pytest.mark.smoke
def test_a_split_under_streams(hosts, router, servers, expected):
    """What runs beyond it ends with one error each, sooner than an answer that stands still; nothing else fails."""
    second = hosts.hosts[2]
    streams = running_streams(router)
    hosts.cut(second)
    new = Streams(router.client, PROMPTS, TOKENS).end()
    assert count_whole(new, expected) == len(PROMPTS)
    ends = streams.end()
    assert 0 < count_whole(ends, expected) < len(ends)
    errors = [error for end in ends for error in end.errors]
    assert {error["code"] for error in errors} == {"backend_failed"}
    assert all(error["message"].startswith("a backend broke off its answer: ") for error in errors)
    assert not any(second.address in error["message"] for error in errors), "clients are told no address"
    hosts.mend(second)
    is_used_again(router, servers[1])
    eventually(servers[1].is_idle)  # the engine learns that nobody reads its streams any more


def test_a_host_is_lost_and_replaced(hosts, router, servers, expected):
    """Its connections are silent, and a whole answer that it owes fails, also where nobody else could be asked."""
    second = hosts.hosts[2]
    with start_router(servers[1:]) as alone:
        answers = []

        def ask():
            body = {"model": MODEL, "prompt": "There was a fox", "max_tokens": 1500, "ignore_eos": True}
            answers.append(alone.client.post("/v1/completions", json=body))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: servers[1].metric("vllm:num_requests_running") == 1)
        streams = running_streams(router)
        hosts.cut(second)
        servers[1].close()
        assert 0 < count_whole(streams.end(), expected) < 2 * len(PROMPTS)
        asking.join(PATIENCE)
        (answer,) = answers
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "backend_failed")
        refused = alone.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert refused.json()["error"]["code"] in ("no_backend", "backend_failed")
        servers[1] = start_server(second)
        hosts.mend(second)
        for one in (router, alone):
            eventually(lambda one=one: all(backend["usable"] for backend in backends_of(one)))
            is_used_again(one, servers[1])
    assert count_whole(Streams(router.client, PROMPTS, TOKENS).end(), expected) == len(PROMPTS)
