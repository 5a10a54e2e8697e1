"""Prompts that join requests which decode: what a chat server's steps are most of the time.

The requests of a workload decode, all of them; then its ``joins`` come together, several times, some steps apart. A
time is from the first of them to the last of their first tokens, from the steps of the engine, whose one it shares with
the requests that decode. Engines are driven by ``llm_engine.add_request`` and ``step``, which vLLM has, too.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from bench.engine_workloads import Request, Workload, requests

TIMES = 12  # that prompts join in a repetition, each with other tokens
STEPS_BETWEEN = 4
SETTLED = 4  # tokens that all requests have before the first prompts join


class Engine(Protocol):
    llm: Any

    def params_of(self, request: Request) -> Any: ...


def joined(workload: Workload, repetition: int, number: int) -> list[Request]:
    """The requests that join, for the ``number``-th time."""
    many, tokens = workload.joins
    some = replace(workload, count=many, prompt=(tokens, tokens), output=(1, 1))
    return requests(some, repetition, again=1 + number)


class _Running:
    """Requests in an engine, and how many tokens each of them has got."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._llm_engine = engine, engine.llm.llm_engine
        self.tokens: dict[str, int] = {}

    def add(self, batch: Sequence[Request], name: str) -> list[str]:
        names = [f"{name}-{i}" for i in range(len(batch))]
        for one, request in zip(names, batch, strict=True):
            prompt = {"prompt_token_ids": request.prompt}
            self._llm_engine.add_request(one, prompt, self._engine.params_of(request))
        self.tokens |= dict.fromkeys(names, 0)
        return names

    def step(self) -> None:
        for output in self._llm_engine.step():
            self.tokens[output.request_id] = len(output.outputs[0].token_ids)

    def until(self, names: Sequence[str], tokens: int) -> None:
        """Run steps until each of these has so many tokens."""
        while any(self.tokens[name] < tokens for name in names):
            self.step()

    def end(self) -> None:
        while self._llm_engine.has_unfinished_requests():
            self.step()


def measure(engine: Engine, workload: Workload, repetition: int) -> dict[str, float]:
    """One repetition: ``value`` is the median of the times, in milliseconds, and ``longest`` the longest.

    Raises:
        RuntimeError: the requests had ended before all prompts joined them.
    """
    begin = time.perf_counter()
    running = _Running(engine)
    decoding = running.add(requests(workload, repetition), f"{repetition}-decodes")
    running.until(decoding, SETTLED)
    times = []
    for number in range(TIMES):
        batch = joined(workload, repetition, number)
        came = time.perf_counter()
        running.until(running.add(batch, f"{repetition}-joins-{number}"), 1)
        times.append(1e3 * (time.perf_counter() - came))
        for _ in range(STEPS_BETWEEN):
            running.step()
    if any(
        running.tokens[name] >= request.max_tokens for name, request in zip(decoding, requests(workload), strict=True)
    ):
        raise RuntimeError("requests ended before all prompts had joined them: no result")
    running.end()
    return {"value": statistics.median(times), "longest": max(times), "seconds": time.perf_counter() - begin}
