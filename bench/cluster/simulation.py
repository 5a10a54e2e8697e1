"""Chats, routers and replicas together: what happens next, in the order of time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from bench.cluster.cache import Tier
from bench.cluster.measures import Measures, Objective
from bench.cluster.replica import Replica
from bench.cluster.request import Request, blocks_of
from bench.cluster.routing import DEFAULTS, Names, Router, Routing
from bench.cluster.step_times import BLOCK, StepTimes
from bench.cluster.traffic import Chats
from tritonllm.route.budget import RetryBudget

REMEMBERED = 120.0  # seconds before the beginning whose turns the caches hold, as far as they have room


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Args:
        gpus: replicas, one on each GPU.
        prefill: replicas that only compute prompts; the others then only decode. 0: each does both.
        link_bytes_per_second: of each GPU to the others.
        host_tokens: of the cache's tier in the host's memory, for each GPU.
        shared_tokens: of a store that all replicas read and write over their links, in place of the host's.
        lost: replicas that fail together, at ``lost_at`` seconds.
        blocks: of each replica; by default what an H200 has room for.

    Raises:
        ValueError: sizes that do not go together.
    """

    gpus: int
    routing: Routing = field(default_factory=Routing)
    prefill: int = 0
    link_bytes_per_second: float = 50e9
    host_tokens: int = 0
    shared_tokens: int = 0
    lost: int = 0
    lost_at: float = 0.0
    blocks: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= 10_000:
            raise ValueError(f"gpus must be from 1 to 10000, got {self.gpus}")
        if not 0 <= self.prefill < self.gpus:
            raise ValueError(f"prefill must leave a GPU that decodes, got {self.prefill} of {self.gpus}")
        if not 0 <= self.lost < (self.prefill or self.gpus):
            raise ValueError(f"lost must leave a replica that takes requests, got {self.lost}")
        if self.prefill and self.lost:
            raise ValueError("lost replicas are simulated without separate prefill only")
        if self.host_tokens and self.shared_tokens:
            raise ValueError("give host_tokens or shared_tokens, not both")


class Simulation:
    """Args:
    cluster: what there is.
    chats: what comes.
    times: of the replicas' steps.
    warm_up, seconds: nothing is counted in the first ones; then traffic comes for ``seconds``. What runs at the end
        is finished.
    seed: of random choices.
    objective: what clients want.
    """

    def __init__(
        self,
        cluster: Cluster,
        chats: Chats,
        times: StepTimes,
        *,
        warm_up: float = 10.0,
        seconds: float = 30.0,
        seed: int = 0,
        objective: Objective | None = None,
    ) -> None:
        self.cluster, self.times = cluster, times
        self._end = warm_up + seconds
        self._chats = chats
        ends = range(cluster.prefill, cluster.gpus)  # replicas at which requests end
        self.measures = Measures(warm_up, self._end, ends, objective or Objective(), times.server_seconds)
        shared = Tier(cluster.shared_tokens, cluster.link_bytes_per_second) if cluster.shared_tokens else None
        self.replicas = [self._replica(number, shared) for number in range(cluster.gpus)]
        names = Names(cluster.prefill or cluster.gpus)
        # Routers that have run for long are anywhere in their turns; those that start together would go in step.
        turns = np.random.default_rng([seed, 3]).integers(cluster.gpus, size=cluster.routing.routers).tolist()
        self._routers = [Router(cluster.routing, names, [seed, 1, i], turn) for i, turn in enumerate(turns)]
        self._budgets = [RetryBudget(DEFAULTS.retry_ratio, DEFAULTS.retry_reserve) for _ in self._routers]
        self._draw = np.random.default_rng([seed, 2])
        self._next = count()
        self._events: list[tuple[float, int, Any]] = []
        self._dead: set[int] = set()

    def _replica(self, number: int, shared: Tier | None) -> Replica:
        cluster, tier, role = self.cluster, shared, "both"
        if cluster.host_tokens:
            tier = Tier(cluster.host_tokens, self.times.host_bytes_per_second)
        if cluster.prefill:
            role = "prefill" if number < cluster.prefill else "decode"
        return Replica(number, self.times, self._computed, self._ended, role, tier, cluster.blocks)

    def _at(self, time: float, what: Any) -> None:
        heappush(self._events, (time, next(self._next), what))

    def run(self) -> dict[str, Any]:
        """Simulate, and return the row of the report."""
        for session, turn, time in self._begun():
            self._at(time, partial(self._arrive, session, turn))
        if self.cluster.lost:
            self._at(self.cluster.lost_at, self._lose)
        while self._events:
            now, _, what = heappop(self._events)
            what(now)
        return self.measures.summary(self.cluster.gpus)

    # --- sessions

    def _begun(self) -> Iterator[tuple[int, int, float]]:
        """Each session's next turn at the beginning, or its first one later; caches get the turns before."""
        c = self._chats
        session_of = np.repeat(np.arange(len(c.begin) - 1), np.diff(c.begin))
        came = c.at < 0
        same = np.concatenate([[False], session_of[1:] == session_of[:-1]])  # as the turn before
        after_none = ~same | np.concatenate([[True], came[:-1]])
        before_none = np.concatenate([~same[1:] | ~came[1:], [True]])
        last = np.flatnonzero(came & before_none & (c.at > -REMEMBERED))
        for turn in last[np.argsort(c.at[last], kind="stable")].tolist():
            self._remember(int(session_of[turn]), turn)
        for turn in np.flatnonzero(~came & after_none & (c.at < self._end)).tolist():
            yield int(session_of[turn]), turn, float(c.at[turn])

    def _request(self, session: int, turn: int, now: float) -> Request:
        c = self._chats
        system, history = int(c.system[session]), int(c.history[turn])
        own = history + int(c.question[turn])
        return Request(session, turn, system, int(c.system_tokens[system]), own, history, int(c.answer[turn]), now)

    def _remember(self, session: int, turn: int) -> None:
        request = self._request(session, turn, 0.0)
        replica = self.replicas[self._routers[0].choose(request)]
        held = replica.holds(request)
        replica.cache.fill(session, held, request.system, request.system_tokens)
        if replica.tier is not None:
            replica.tier.put(session, held)

    def _follow(self, request: Request, now: float) -> None:
        """The session's next turn, after a time to read and think."""
        turn = request.turn + 1
        if turn < self._chats.begin[request.session + 1]:
            time = now + float(self._chats.think[turn])
            if time < self._end:
                self._at(time, partial(self._arrive, request.session, turn))

    # --- requests

    def _arrive(self, session: int, turn: int, now: float) -> None:
        request = self._request(session, turn, now)
        self.measures.arrived += 1
        if blocks_of(request.own + request.output) + request.system_blocks > self.replicas[0].cache.blocks:
            self._fail(request)
            return
        self._route(request, now)

    def _route(self, request: Request, now: float) -> None:
        number = int(self._draw.integers(len(self._routers))) if len(self._routers) > 1 else 0
        router = self._routers[number]
        self._budgets[number].add_request()
        chosen, tokens = router.choose(request), router.estimate(request)
        router.add(chosen, tokens)
        request.placed, request.home = (number, chosen, tokens), chosen
        replica = self.replicas[chosen]
        if chosen in self._dead:  # nobody knows yet; the connection is not made in time
            self._at(now + DEFAULTS.connect_timeout, partial(self._again, request))
        elif replica.tier is not None:
            self._load(request, replica, now)
        else:
            self._reach(request, chosen, now)

    def _load(self, request: Request, replica: Replica, now: float) -> None:
        """Bring what the tier has beyond the GPU's cache, then reach the replica."""
        tier = replica.tier
        assert tier is not None
        here = replica.cache.held(request) if replica.cache.knows(request) else 0
        tokens = tier.held(request) - here
        if tokens < BLOCK:
            self._reach(request, replica.number, now)
            return
        if not replica.cache.knows(request):
            tokens += request.system_tokens
        begin = max(now, replica.link_free)
        replica.link_free = begin + tokens * self.times.kv_bytes / tier.bytes_per_second
        request.loaded = tier.held(request)
        self.measures.copy(now, tokens * self.times.kv_bytes)
        self._at(replica.link_free, partial(self._reach, request, replica.number))

    def _reach(self, request: Request, number: int, now: float) -> None:
        """The request is in the replica's queue."""
        if number in self._dead:
            self._again(request, now)
            return
        replica = self.replicas[number]
        replica.coming -= replica.role == "decode"
        request.home = number
        replica.enqueue(request)
        if replica.phase is None:
            self._plan(replica, now)
        elif replica.phase.cut(now):
            replica.version += 1
            self._at(replica.phase.end, partial(self._phase_ends, replica, replica.version))

    def _plan(self, replica: Replica, now: float) -> None:
        replica.plan(now)
        if replica.phase is not None:
            self._at(replica.phase.end, partial(self._phase_ends, replica, replica.version))

    def _phase_ends(self, replica: Replica, version: int, now: float) -> None:
        if version == replica.version:
            self.measures.phase(replica.finish())
            self._plan(replica, now)

    def _computed(self, request: Request, now: float) -> None:
        if not self.cluster.prefill:
            request.first = now
            self.measures.first_token(now)
            return
        self._leave(request)
        source = self.replicas[request.home]
        decoding = self.replicas[self.cluster.prefill :]
        least = min(decoding, key=lambda replica: (len(replica) + replica.coming, replica.number))
        copied = request.prompt * self.times.kv_bytes / self.cluster.link_bytes_per_second
        self.measures.copy(now, request.prompt * self.times.kv_bytes)
        begin = max(now, source.link_free, least.link_free)  # both links are taken for as long as it is copied
        source.link_free = least.link_free = begin + copied
        least.coming += 1
        self._at(begin + copied, partial(self._reach, request, least.number))

    def _ended(self, request: Request, now: float) -> None:
        self._leave(request)
        self.measures.end_of(request, now)
        self._follow(request, now)

    def _leave(self, request: Request) -> None:
        if request.placed is not None:
            number, chosen, tokens = request.placed
            self._routers[number].take(chosen, tokens)
            request.placed = None

    # --- failures

    def _lose(self, now: float) -> None:
        """Replicas fail: streams break off, and those who got nothing wait until the loss is found out."""
        known = now + DEFAULTS.unhealthy_threshold * DEFAULTS.health_interval
        for number in range(self.cluster.lost):
            self._dead.add(number)
            silent, streaming = self.replicas[number].lose_all()
            for request in streaming:
                self._leave(request)
                self._fail(request)
            for request in silent:
                self._at(known, partial(self._again, request))
        self._at(known, self._find_out)

    def _find_out(self, now: float) -> None:
        """The routers' probes have failed often enough."""
        for router in self._routers:
            for number in range(self.cluster.lost):
                router.remove(number)

    def _again(self, request: Request, now: float) -> None:
        """Another replica, as far as there may be retries."""
        number = request.placed[0] if request.placed is not None else 0
        self._leave(request)
        request.tries += 1
        if request.tries > DEFAULTS.max_retries or not self._budgets[number].take():
            self._fail(request)
            return
        self.measures.retried += 1
        request.cached = request.loaded = request.left = request.at = 0
        self._route(request, now)

    def _fail(self, request: Request) -> None:
        self.measures.failure(request)
