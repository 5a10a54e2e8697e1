"""The dashboard of a server: a thread asks it some times a second, so that the screen never waits for it.

``GET /activity`` tells everything (docs/serving.md). Where it is not to be had, ``/metrics`` still tells the totals.
"""

import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from types import TracebackType
from typing import Self

from tritonllm.teach.dashboard.source import Status
from tritonllm.telemetry.recorder import Gate
from tritonllm.telemetry.snapshot import Counters, Snapshot, View, from_json

TIMEOUT = 5.0  # seconds for an answer
RATE_SECONDS = 2.0
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$", re.MULTILINE)
NO_KEY = "requests and blocks are told to those who have a key: --api-key"
NO_ACTIVITY = "this server tells totals only"


class Refused(Exception):
    """The server lives, and does not say that."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answers {status}")
        self.status = status


class ServerSource:
    """The snapshots of a server. It is asked from the ``with`` block's beginning to its end.

    Args:
        url: the address of the server, with or without ``/v1``.
        key: an API key, if it wants one.
        every: how many seconds there are between two questions.
        replica: the number of one of several engines behind the server.
    """

    gate: Gate | None = None
    is_over = False

    def __init__(self, url: str, key: str | None = None, every: float = 0.5, replica: int = 0) -> None:
        self.title = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._every, self._replica = every, replica
        self._view, self._snapshot = View(), Snapshot()
        self._error: str | None = "connecting"
        self._since: float | None = None  # when it last answered
        self._totals: deque[tuple[float, int, int]] = deque(maxlen=64)
        self._ends, self._asks = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._ask_on, name="dashboard", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ends.set()
        self._asks.set()

    def look(self, view: View) -> Snapshot:
        if view != self._view:
            self._view = view
            self._asks.set()  # the next answer has what there is room for now
        return self._snapshot

    def status(self) -> Status:
        if self._error is None:
            return Status("running", "connected")
        if self._since is None:
            return Status("bad", f"no answer yet: {self._error}")
        return Status("bad", f"gone for {time.monotonic() - self._since:.0f} s, trying again: {self._error}")

    def _ask_on(self) -> None:
        while not self._ends.is_set():
            try:
                self._snapshot, self._error = self._ask(), None
                self._since = time.monotonic()
            except (OSError, ValueError, Refused) as error:  # URLError is an OSError
                reason = getattr(error, "reason", None) or error
                self._error = " ".join(str(reason).split()) or type(error).__name__
                self._totals.clear()
            self._asks.wait(self._every)
            self._asks.clear()

    def _ask(self) -> Snapshot:
        view = self._view
        query = {
            "replica": self._replica,
            "first_row": view.first_row,
            "rows": view.rows,
            "cells": view.cells,
            "steps": view.steps,
        }
        try:
            answer = self._get(f"/activity?{urllib.parse.urlencode(query)}")
        except Refused as error:
            if error.status not in (401, 403, 404, 405):
                raise
            note = NO_KEY if error.status in (401, 403) else NO_ACTIVITY
            return self._from_metrics(self._get("/metrics"), note)
        return from_json(json.loads(answer))

    def _get(self, path: str) -> str:
        """The text of the server's answer to a GET request.

        Raises:
            Refused: another status than 200.
            OSError: there is no answer.
        """
        request = urllib.request.Request(self.title + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                return response.read().decode()
        except urllib.error.HTTPError as error:
            raise Refused(error.code) from error

    def _from_metrics(self, text: str, note: str) -> Snapshot:
        """What Prometheus' text tells, under vLLM's names."""
        sums: dict[str, float] = {}
        for name, value in SAMPLE.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)

        def get(name: str) -> int:
            return int(sums.get(f"vllm:{name}", 0))

        counters = Counters(
            steps=int(sums.get("tritonllm:steps_total", 0)),
            prompt_tokens=get("prompt_tokens_total"),
            generated_tokens=get("generation_tokens_total"),
            query_tokens=get("prefix_cache_queries_total"),
            hit_tokens=get("prefix_cache_hits_total"),
            preemptions=get("num_preemptions_total"),
            running=get("num_requests_running"),
            waiting=get("num_requests_waiting"),
            drafts=get("spec_decode_num_draft_tokens_total"),
            accepted=get("spec_decode_num_accepted_tokens_total"),
        )
        now = time.monotonic()
        self._totals.append((now, counters.generated_tokens, counters.prompt_tokens))
        while len(self._totals) > 2 and self._totals[1][0] < now - RATE_SECONDS:
            self._totals.popleft()
        before = self._totals[0]
        seconds = max(now - before[0], 1e-6)
        return Snapshot(
            counters=counters,
            requests=None,
            steps=None,
            used_part=min(1.0, sums.get("vllm:kv_cache_usage_perc", 0.0)),
            tokens_per_second=max(0, counters.generated_tokens - before[1]) / seconds,
            prompt_tokens_per_second=max(0, counters.prompt_tokens - before[2]) / seconds,
            note=note,
        )
