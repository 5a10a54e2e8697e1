import contextlib

import pytest
from support.fake_backend import FakeBackend, ThreadServer
from support.router import make_client
from support.waiting import PATIENCE, eventually

from tritonllm.route.app import Router
from tritonllm.route.config import BackendConfig, RouterConfig

# What happens again and again is quick, so that a test sees it; limits are for what never comes.
QUICK = {
    "health_interval": 0.1,
    "health_timeout": PATIENCE,
    "backoff_seconds": 0.05,
    "max_backoff_seconds": 0.2,
    "connect_timeout": PATIENCE,
    "drain_seconds": PATIENCE,
}


class RunningRouter:
    """A router in a thread.

    Attributes:
        client: of its address.
        router: itself; what is called on it from a test runs in the thread (:meth:`run`).
    """

    def __init__(self, backends, **options):
        listed = tuple(b if isinstance(b, BackendConfig) else BackendConfig(url=b.url, name=b.name) for b in backends)
        self.config = RouterConfig(backends=listed, **{**QUICK, **options})
        self.router = Router(self.config)
        self._server = ThreadServer(self.router, lifespan="on")
        self.url, self.port, self.run = self._server.url, self._server.port, self._server.run
        self.client = make_client(self.url)

    def status(self):
        return {backend["name"]: backend for backend in self.client.get("/status").json()["backends"]}

    def metric(self, name, **labels):
        """The sum over all labels that are not given."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            is_it = line.startswith((f"tritonllm:route_{name}{{", f"tritonllm:route_{name} "))
            if is_it and all(f'{label}="{value}"' in line for label, value in labels.items()):
                total += float(line.split()[-1])
        return total

    def is_idle(self):
        found = self.client.get("/status").json()
        return all(backend["in_flight"] == backend["tokens_in_flight"] == 0 for backend in found["backends"])

    def close(self):
        self.client.close()
        self._server.close()


@pytest.fixture
def backends():
    """``backends(2)`` starts two, named a and b."""
    started = []

    def start(count=1, **options):
        made = [FakeBackend(name, **options) for name in "abcdefgh"[:count]]
        started.extend(made)
        return made

    yield start
    for backend in started:
        backend.stop(wait=False)
    for backend in started:
        backend.stop()


@pytest.fixture
def routing():
    """``routing(backends, **options)`` starts a router, which must be idle at the end."""
    with contextlib.ExitStack() as stack:

        def start(backends, **options):
            running = RunningRouter(backends, **options)
            stack.callback(running.close)
            stack.callback(eventually, running.is_idle)
            return running

        yield start
