"""Which replica gets a request: the rules of ``tritonllm route``, fast enough for a thousand replicas.

``prefix`` gives the replica that :func:`tritonllm.http.hashing.placed` gives, and ``least-tokens`` and ``round-robin``
those of :class:`tritonllm.route.pool.Pool`; tests compare them. They stand here once more because ``placed`` looks at
all names for each request in Python: here the names' hashes are computed together (XXH64, as Collet's
specification says), and the load of a replica is a number in an array.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import xxhash

from bench.cluster.request import Request
from tritonllm.http.ask import ANSWER_TOKENS, BYTES_PER_TOKEN
from tritonllm.route.config import BackendConfig, RouterConfig

POLICIES = ("random", "round-robin", "least-tokens", "prefix", "session")
DEFAULTS = RouterConfig(backends=(BackendConfig(url="http://replica"),))
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
_REQUEST = 1 << 24  # a load is tokens x this + requests: those with equal tokens differ by requests


def name_of(number: int) -> str:
    """A replica's, always of 8 bytes."""
    return f"gpu-{number:04d}"


class Names:
    """All replicas' names, and in which order a key prefers them.

    Args:
        count: of replicas; at most 10,000.
    """

    def __init__(self, count: int) -> None:
        self.all = [name_of(number) for number in range(count)]
        lanes = np.frombuffer("".join(self.all).encode(), dtype="<u8").astype(np.uint64)
        self._lanes = self._rotated(lanes * _P2, 31) * _P1

    @staticmethod
    def _rotated(values: np.ndarray, bits: int) -> np.ndarray:
        return cast(np.ndarray, (values << np.uint64(bits)) | (values >> np.uint64(64 - bits)))

    def weights(self, key: bytes) -> np.ndarray:
        """XXH64 of each name, seeded with that of the key."""
        with np.errstate(over="ignore"):
            begin = np.uint64(xxhash.xxh64_intdigest(key)) + _P5 + np.uint64(8)
            mixed = self._rotated(begin ^ self._lanes, 27) * _P1 + _P4
            mixed = (mixed ^ (mixed >> np.uint64(33))) * _P2
            mixed = (mixed ^ (mixed >> np.uint64(29))) * _P3
            return cast(np.ndarray, mixed ^ (mixed >> np.uint64(32)))


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Args:
        policy: of :data:`POLICIES`. ``session``: ``prefix`` with a session header, so each chat has a key of its own;
            without one the key is the first ``sticky_chars`` characters of the prompt.
        routers: processes; each request comes to any of them, and each counts the loads of its own requests.
        epsilon, min_load: of consistent hashing with bounded loads.

    Raises:
        ValueError: an unknown policy, or no router.
    """

    policy: str = "prefix"
    routers: int = 1
    epsilon: float = DEFAULTS.balance_epsilon
    min_load: int = DEFAULTS.balance_min_tokens

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        if self.routers < 1:
            raise ValueError(f"routers must be at least 1, got {self.routers}")

    def key(self, request: Request) -> bytes:
        """What places a request; chats with the same long system prompt share it unless they have a header."""
        whole = request.system_tokens * BYTES_PER_TOKEN >= DEFAULTS.sticky_chars
        if whole and self.policy != "session":
            return b"system %d" % request.system
        return b"session %d" % request.session


class Router:
    """One process.

    Args:
        routing: its options.
        names: of the replicas that it knows.
        seed: of random choices.
        turn: where it is in the replicas' turns.
    """

    def __init__(self, routing: Routing, names: Names, seed: list[int], turn: int = 0) -> None:
        self.routing, self._names = routing, names
        self._draw = np.random.default_rng(seed)
        self._loads = np.zeros(len(names.all), dtype=np.int64)
        self._alive = np.arange(len(names.all))
        self._removed: set[int] = set()
        self._total = 0  # tokens of those alive
        self._turn = turn
        self._first: dict[bytes, int] = {}  # which replica a key prefers
        self._order: dict[bytes, np.ndarray] = {}

    def estimate(self, request: Request) -> int:
        """Tokens in flight that a request counts as; the router does not know how long the answer will be."""
        return request.prompt + ANSWER_TOKENS

    def remove(self, number: int) -> None:
        """A replica can no longer be used."""
        self._removed.add(number)
        self._alive = self._alive[self._alive != number]
        self._total = int((self._loads[self._alive] // _REQUEST).sum())
        self._first.clear()
        self._order.clear()

    def add(self, number: int, tokens: int) -> None:
        self._loads[number] += tokens * _REQUEST + 1
        self._total += tokens

    def take(self, number: int, tokens: int) -> None:
        self._loads[number] -= tokens * _REQUEST + 1
        if number not in self._removed:
            self._total -= tokens

    def choose(self, request: Request) -> int:
        """The replica for a request."""
        policy, alive = self.routing.policy, self._alive
        if policy == "random":
            return int(alive[self._draw.integers(len(alive))])
        self._turn += 1
        turn = self._turn % len(alive)
        if policy == "round-robin":
            return int(alive[turn])
        if policy == "least-tokens":
            loads = self._loads[alive]
            late, early = turn + int(loads[turn:].argmin()), int(loads[:turn].argmin()) if turn else 0
            return int(alive[early if loads[early] < loads[late] else late])
        return self._placed(self.routing.key(request))

    def _placed(self, key: bytes) -> int:
        most = max((1 + self.routing.epsilon) * self._total / len(self._alive), self.routing.min_load)
        first = self._first.get(key)
        if first is None:
            first = self._first[key] = int(self._alive[self._names.weights(key)[self._alive].argmax()])
        if self._loads[first] // _REQUEST <= most:
            return first
        order = self._order.get(key)
        if order is None:
            order = self._alive[np.argsort(self._names.weights(key)[self._alive])[::-1]]
            if key.startswith(b"system"):  # asked for again and again
                self._order[key] = order
        return int(order[(self._loads[order] // _REQUEST <= most).argmax()])
