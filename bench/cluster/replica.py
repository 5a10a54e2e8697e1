"""One engine: continuous batching with prompts in chunks, simulated a phase at a time.

A phase is a number of steps that are alike: the same requests decode, and the same prompt is computed in chunks of the
same size. It ends when a request ends, a prompt is computed, or somebody arrives. How many tokens of prompts a step
takes is the engine's own rule (tritonllm/engine/schedule/prompt_budget.py). A request is admitted when blocks for all
that it will ever hold are free; the engine is bolder, and preempts where that was too bold.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from bench.cluster.cache import BlockCache, Tier
from bench.cluster.request import Request
from bench.cluster.step_times import StepTimes
from tritonllm.engine.schedule.prompt_budget import STEPS, prompt_budget

SEATS, BUDGET = 256, 8192  # SchedulerConfig's max_num_seqs and max_num_batched_tokens
BESIDE = 256


@dataclass(slots=True)
class Phase:
    """``steps`` steps; the first takes ``first`` seconds, each one after it ``more`` longer than the one before."""

    begin: float
    steps: int
    first: float
    more: float
    decodes: int
    parts: list[tuple[Request, int]]  # prompts, and the tokens of each in one step

    def seconds(self, steps: int) -> float:
        return steps * self.first + self.more * steps * (steps - 1) / 2

    @property
    def end(self) -> float:
        return self.begin + self.seconds(self.steps)

    def cut(self, now: float) -> bool:
        """End after the step that runs now; whether that changed anything."""
        passed = now - self.begin
        if self.more > 0:
            half = self.first - self.more / 2
            steps = math.ceil((math.sqrt(half * half + 2 * self.more * passed) - half) / self.more)
        else:
            steps = math.ceil(passed / self.first)
        steps = max(1, steps)
        if steps >= self.steps:
            return False
        self.steps = steps
        return True


class Replica:
    """Args:
        number: its place in the cluster.
        times: of its steps.
        role: ``both``; ``prefill``: requests leave it when their prompt is computed; ``decode``: they come to it then.
        computed: called with a request and the time when its prompt has been computed.
        ended: called with a request and the time of its last token.
        tier: where sessions are found that the GPU no longer has.

    Attributes:
        phase: what runs, ``None`` while idle.
        version: of the phase; an end of an older one that was planned does not count.
        busy: seconds of all phases that have ended.
    """

    def __init__(
        self,
        number: int,
        times: StepTimes,
        computed: Callable[[Request, float], None],
        ended: Callable[[Request, float], None],
        role: str = "both",
        tier: Tier | None = None,
        blocks: int | None = None,
    ) -> None:
        self.number, self.times, self.role, self.tier = number, times, role, tier
        self.cache = BlockCache(times.blocks if blocks is None else blocks, keeps=role != "decode")
        self.phase: Phase | None = None
        self.version = 0
        self.busy = 0.0
        self.coming = 0  # requests whose cache is being copied to it
        self.link_free = 0.0  # when its link has nothing more to copy
        self.waiting: deque[Request] = deque()
        self.prompts: deque[Request] = deque()  # admitted, not computed
        self._queued = 0  # tokens of the prompts that wait
        self._left = 0  # tokens of admitted prompts that are not computed
        self._running: list[tuple[int, int, Request]] = []  # a heap of last steps
        self._fresh: list[Request] = []  # that get their first token in the first step of the phase
        self._context = 0  # tokens that those who run attend to
        self._steps = 0  # so far
        self._computed, self._ended = computed, ended

    def __len__(self) -> int:
        return len(self.waiting) + len(self.prompts) + len(self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    def enqueue(self, request: Request) -> None:
        self.waiting.append(request)
        self._queued += request.prompt if self.role != "decode" else 0

    def holds(self, request: Request) -> int:
        """Tokens that a request has behind its system prompt when it leaves."""
        return request.own + (request.output if self.role != "prefill" else 0)

    def _admit(self, budget: int) -> None:
        while self.waiting and len(self._running) + len(self.prompts) < SEATS:
            request = self.waiting[0]
            if self.role != "decode" and self._left >= budget:
                break
            cached = self.cache.admit(request, self.holds(request))
            if cached is None:
                break
            self.waiting.popleft()
            if self.role == "decode":
                self._join(request, request.output)
                self._fresh.append(request)
                continue
            self._queued -= request.prompt
            request.cached, request.at, request.left = cached, cached, request.prompt - cached
            self._left += request.left
            self.prompts.append(request)

    def _join(self, request: Request, steps: int) -> None:
        """The request decodes from the next step on."""
        heappush(self._running, (self._steps + steps, request.turn, request))
        self._context += request.prompt + 1

    def plan(self, now: float) -> None:
        """Begin the next phase, or be idle."""
        budget = prompt_budget(BUDGET, self._queued + self._left) if self._running else BUDGET
        self._admit(budget)
        self.version += 1
        decodes = len(self._running)
        if not decodes and not self.prompts:
            self.phase = None
            return
        steps = self._running[0][0] - self._steps if decodes else 1 << 60
        parts: list[tuple[Request, int]] = []
        if self.prompts and self.prompts[0].left >= budget:
            parts = [(self.prompts[0], budget)]
            steps = min(steps, self.prompts[0].left // budget)
            if decodes and budget > BESIDE:  # as many as until the queue is short enough for smaller chunks
                over = self._queued + self._left - budget // 2 * STEPS
                steps = max(1, min(steps, -(-over // budget)))
        elif self.prompts:
            steps, room = 1, budget
            for request in self.prompts:
                parts.append((request, min(room, request.left)))
                room -= parts[-1][1]
                if not room:
                    break
        chunk = sum(tokens for _, tokens in parts)
        pairs = sum(tokens * (request.at + tokens / 2) for request, tokens in parts)
        first = self.times.step(decodes, self._context, chunk, pairs)
        more = self.times.key_seconds * decodes + self.times.pair_seconds * sum(tokens**2 for _, tokens in parts)
        self.phase = Phase(now, steps, first, more, decodes, parts)

    def finish(self) -> Phase:
        """The phase is over: tell who got what."""
        phase = self.phase
        assert phase is not None
        now = phase.end
        self.busy += now - phase.begin
        self._steps += phase.steps
        self._context += phase.decodes * phase.steps
        for request in self._fresh:
            request.first = phase.begin + phase.first
        self._fresh.clear()
        while self._running and self._running[0][0] <= self._steps:
            request = heappop(self._running)[2]
            self._context -= request.prompt + request.output + (self.role == "decode")
            self._leave(request)
            self._ended(request, now)
        for request, tokens in phase.parts:
            request.at += tokens * phase.steps
            request.left -= tokens * phase.steps
            self._left -= tokens * phase.steps
        while self.prompts and not self.prompts[0].left:
            request = self.prompts.popleft()
            self.cache.computed(request)
            if self.role == "prefill" or request.output == 1:
                self._leave(request)
            else:
                self._join(request, request.output - 1)
            self._computed(request, now)
            if self.role == "both" and request.output == 1:
                self._ended(request, now)
        return phase

    def _leave(self, request: Request) -> None:
        self.cache.release(request, self.holds(request))
        if self.tier is not None and self.role != "decode":
            self.tier.put(request.session, self.holds(request))

    def lose_all(self) -> tuple[list[Request], list[Request]]:
        """The replica is gone: the requests that had no token yet, and those that had."""
        streaming = [request for _, _, request in self._running if request.first >= 0]
        silent = [request for _, _, request in self._running if request.first < 0]
        silent += [*self.prompts, *self.waiting]
        self.phase, self.version = None, self.version + 1
        self._running, self._context, self._left, self._queued = [], 0, 0, 0
        for queue in (self.prompts, self.waiting, self._fresh):
            queue.clear()
        self.cache = BlockCache(self.cache.blocks, self.cache.keeps)
        return silent, streaming
