"""Which replica of a deployment of Ray Serve gets a request: the one whose cache has its prompt's beginning, as
``tritonllm route`` has it (:mod:`tritonllm.http.hashing`), within Serve's own limits on what a replica may do at once.

Serve's router asks for an order of the replicas, asks the first of them whether it has room, and goes on to the next if
it has not. A request's first arguments are an :class:`~tritonllm.http.ask.Ask` and the names of replicas that have
failed it.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from tritonllm.http.hashing import placed, weights_of


class Loads:
    """Tokens in flight of each replica, as one router knows them.

    Args:
        epsilon, min_load: as of :func:`~tritonllm.http.hashing.placed`.
    """

    def __init__(self, epsilon: float, min_load: int) -> None:
        self._epsilon, self._min_load = epsilon, min_load
        self._tokens: dict[str, int] = {}
        self._counted: dict[tuple[str, str], int] = {}  # by replica and request
        self._turn = 0

    def of(self, name: str) -> int:
        return self._tokens.get(name, 0)

    def order(self, key: bytes, names: Sequence[str], tried: Collection[str] = ()) -> list[str]:
        """The replicas, the best first: by the key, or without one by what they have to do. Those that have failed the
        request come last.

        Args:
            key: what places the request; may be empty.
            names: the names of the replicas; at least one.
            tried: the names of those that have failed the request.
        """
        good = [name for name in names if name not in tried] or list(names)
        self._turn += 1
        turn = self._turn % len(good)
        by_load = sorted([*good[turn:], *good[:turn]], key=self.of)  # those that are equal take turns
        if key:
            hashed = [name.encode() for name in good]
            first = good[placed(key, hashed, [self.of(name) for name in good], self._epsilon, self._min_load)]
            weights = dict(zip(good, weights_of(key, hashed), strict=True))
            by_load = sorted(good, key=lambda name: (name == first, weights[name]), reverse=True)
        return [*by_load, *(name for name in names if name not in good)]

    def begin(self, name: str, request_id: str, tokens: int) -> None:
        """The replica has the request, or will have it."""
        self.end(name, request_id)
        self._counted[name, request_id] = tokens
        self._tokens[name] = self.of(name) + tokens

    def end(self, name: str, request_id: str) -> None:
        """Note that a replica does not hold a request, or not any more. May be called again."""
        tokens = self._counted.pop((name, request_id), 0)
        if tokens:
            self._tokens[name] -= tokens
            if not self._tokens[name]:
                del self._tokens[name]


class PrefixRouter(RequestRouter):
    """Serve makes one for each process that sends requests to the deployment; each counts its own."""

    # Serve's tenth of a second is soon over on a busy machine, and the request would go where its prompt is unknown.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin with ``balance_epsilon`` and ``balance_min_tokens``, as Ray Serve hands them on."""
        self._loads = Loads(kwargs["balance_epsilon"], kwargs["balance_min_tokens"])
        self._expected: dict[asyncio.Future[Any], str] = {}  # of requests that no replica has yet

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each replica is a rank of its own."""
        replicas = {_name(replica.replica_id): replica for replica in candidate_replicas}
        if pending_request is None or len(pending_request.args) < 2 or not replicas:
            return [candidate_replicas]
        ask, tried = pending_request.args[:2]
        order = self._loads.order(ask.key, sorted(replicas), tried)
        self._expect(order[0], pending_request)
        return [[replicas[name]] for name in order]

    def _expect(self, name: str, pending: PendingRequest) -> None:
        """Count it from now on: many requests may be placed before the first of them has reached its replica."""
        before = self._expected.get(pending.future)
        if before is None:
            pending.future.add_done_callback(lambda future: self._settle(pending, future))
        else:
            self._loads.end(before, pending.metadata.internal_request_id)
        self._expected[pending.future] = name
        self._loads.begin(name, pending.metadata.internal_request_id, pending.args[0].tokens)

    def _settle(self, pending: PendingRequest, future: asyncio.Future[Any]) -> None:
        """A replica has been found, perhaps another one, or the client has left before."""
        request_id = pending.metadata.internal_request_id
        self._loads.end(self._expected.pop(future), request_id)
        if not future.cancelled() and future.exception() is None:
            self._loads.begin(_name(future.result().replica_id), request_id, pending.args[0].tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._loads.end(_name(replica_id), internal_request_id)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)
