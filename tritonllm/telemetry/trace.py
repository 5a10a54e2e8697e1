"""A trace of what an engine does, for Perfetto (https://ui.perfetto.dev) and for ``tritonllm trace FILE``.

    with Trace(llm, "trace.json.gz"):
        llm.generate(...)

Tracks: what the host does for each step (plan, launch, wait), the device between a step's launch and its results, its
kernels, each sequence (:mod:`tritonllm.telemetry.trace_requests`), and counters of blocks, tokens, sequences and
drafts. A file holds a bounded number of events and a trace a bounded amount of memory, however long the engine runs.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tritonllm.events import (
    EngineReset,
    Event,
    RequestAdded,
    RequestFinished,
    StepFinished,
    StepLaunched,
    StepPlanned,
    TokensForced,
)
from tritonllm.telemetry.kernel_records import KernelRecorder
from tritonllm.telemetry.trace_file import Clock, TraceFile
from tritonllm.telemetry.trace_layout import DEVICE, ENGINE, GPU, HOST, REQUESTS
from tritonllm.telemetry.trace_requests import RequestTracks, Sequence
from tritonllm.version import __version__

logger = logging.getLogger(__name__)
MAX_EVENTS = 1_000_000  # some 100 MB of JSON, 10 MB compressed
KERNEL_STEPS = 64
NAMED = 12  # prompts, and requests that lost their blocks, that a step names


class TracedStep:
    """A step that was planned, until its results are known.

    Attributes:
        filling: the parts of the step that compute prompts.
        begin: when its launch began, in ticks.
    """

    __slots__ = ("begin", "facts", "filling", "late", "name")

    def __init__(self, event: StepPlanned, filling: list[tuple[Sequence, Any]]) -> None:
        self.filling, self.begin, self.late = filling, 0, False
        sequences, tokens = {"decode": 0, "verify": 0, "prefill": 0}, {"decode": 0, "verify": 0, "prefill": 0}
        for part in event.parts:
            sequences[part.kind] += 1
            tokens[part.kind] += part.num_tokens
        kinds = [kind for kind, count in sequences.items() if count]
        self.name = " + ".join(kinds)
        self.facts: dict[str, Any] = {"step": event.step, "tokens": event.num_tokens}
        for kind in kinds:
            self.facts[kind] = sequences[kind]
            self.facts[f"{kind}_tokens"] = tokens[kind]
        self.facts |= {"running": event.num_running, "waiting": event.num_waiting, "why": event.admission_end}
        if filling:
            self.facts["prompts"] = [f"{part.sequence_id}: {part.start}+{part.num_tokens}" for _, part in filling][
                :NAMED
            ]
        for name in ("copies", "stores", "loads"):
            if getattr(event, name):
                self.facts[name] = len(getattr(event, name))
        if event.preempted:
            self.facts |= {"preempted": len(event.preempted), "lost_blocks": list(event.preempted[:NAMED])}


class Trace:
    """Writes what happens in an engine while it is open; used in the engine's thread.

    Args:
        llm: an :class:`~tritonllm.LLM` or its engine.
        path: the path of the file, which is overwritten; it is compressed if it ends with ``.gz``.
        max_events: how many events the file has when the trace ends itself.
        kernel_steps: of how many steps the kernels are recorded, if there is a GPU.
        delay_steps: how many steps go by before the trace begins.
        max_steps: after how many steps the trace ends itself; 0: it does not.
        fresh: the file must not be there already.

    Attributes:
        note: why it has ended, once it has.
        failure: what went wrong, if the file could not be written.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(
        self,
        llm: Any,
        path: str | Path,
        *,
        max_events: int = MAX_EVENTS,
        kernel_steps: int = KERNEL_STEPS,
        delay_steps: int = 0,
        max_steps: int = 0,
        fresh: bool = False,
    ) -> None:
        self.path, self.note = Path(path), ""
        self.failure: OSError | None = None
        self._max_steps, self._delay, self._steps_seen = max_steps, delay_steps, 0
        self._file = TraceFile(path, max_events, fresh)
        self._clock = Clock(time.monotonic())
        self._tracks = RequestTracks(self._file, self._clock, (ENGINE, DEVICE))
        self._kernels = KernelRecorder(kernel_steps)
        self._steps: dict[int, TracedStep] = {}
        self._host = self._device = 0  # where their tracks end, in ticks
        self._counters: dict[str, Mapping[str, float]] = {}
        self._copied = {"copied": 0, "stored": 0, "loaded": 0}
        self._drafts = {"verified": 0, "accepted": 0}
        self._draft_seconds: float | None = None
        self._head()
        self._unsubscribe = getattr(llm, "engine", llm).subscribe(self._take)
        if not self._delay:
            self._kernels.start()

    @property
    def events(self) -> int:
        """How many events the file has."""
        return self._file.events

    @property
    def open(self) -> bool:
        return not self.note

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _head(self) -> None:
        file = self._file
        for pid, name in ((ENGINE, "engine"), (REQUESTS, "requests"), (GPU, "GPU")):
            file.name_process(pid, name, pid)
        file.name_track(ENGINE, HOST, "host: plan, launch, wait for results")
        file.name_track(ENGINE, DEVICE, "device, as the host sees it")
        about = {"version": __version__, "monotonic": self._clock.start, "unix": time.time()}
        file.instant("trace begins", ENGINE, HOST, 0, about | {"kernels": self._kernels.about})
        file.flush()

    def _take(self, event: Event) -> None:
        """The sink. An error of the disk ends the trace, and not the engine."""
        try:
            if self._delay:
                if isinstance(event, StepFinished):
                    self._delay -= 1
                    if not self._delay:
                        self._kernels.start()
                return
            self._write(event)
        except OSError as error:
            self._fail(error)

    def _write(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            self._planned(event)
        elif isinstance(event, StepLaunched):
            self._launched(event)
        elif isinstance(event, StepFinished):
            self._finished(event)
        elif isinstance(event, RequestAdded):
            self._tracks.added(event)
        elif isinstance(event, RequestFinished):
            self._tracks.finished(event)
            if not self._tracks.unfinished:  # nobody knows when the next event comes
                self._file.flush()
        elif isinstance(event, TokensForced):
            self._tracks.forced(event.tokens)
            tokens = sum(len(new.token_ids) for new in event.tokens)
            at = max(self._host, self._clock.ticks(event.time))
            self._file.instant("forced", ENGINE, HOST, at, {"step": event.step, "tokens": tokens})
        elif isinstance(event, EngineReset):
            self._steps.clear()
            at = max(self._host, self._clock.ticks(event.time))
            self._file.instant("reset", ENGINE, HOST, at, {"reason": event.reason})
            self._tracks.lost(event.time, event.reason)
            self._file.flush()

    def _on_host(self, name: str, time: float, seconds: float, facts: Mapping[str, Any]) -> int:
        """A slice that ends at ``time``; returns its begin. It does not overlap the one before."""
        begin = max(self._host, self._clock.ticks(time - seconds))
        self._host = max(begin, self._clock.ticks(time))
        self._file.slice(name, ENGINE, HOST, begin, self._host, facts)
        return begin

    def _planned(self, event: StepPlanned) -> None:
        self._on_host("plan", event.time, event.seconds, {"step": event.step})
        at = self._clock.ticks(event.time)
        self._tracks.preempted(event.preempted, at)
        self._steps[event.step] = TracedStep(event, self._tracks.planned(event.parts, at))
        used = event.num_blocks - event.num_free_blocks
        self._count("blocks", at, {"used": used, "free": event.num_free_blocks})
        self._count("cached blocks", at, {"cached": event.num_cached_blocks})
        self._count("evicted blocks", at, {"evicted": event.evicted_blocks})
        if event.copies or event.stores or event.loads:
            for name, blocks in (("copied", event.copies), ("stored", event.stores), ("loaded", event.loads)):
                self._copied[name] += len(blocks)
            self._count("block copies", at, dict(self._copied))
        self._count("sequences", at, {"running": event.num_running, "waiting": event.num_waiting})

    def _count(self, name: str, at: int, values: Mapping[str, float]) -> None:
        if self._counters.get(name) != values:
            self._counters[name] = values
            self._file.counter(name, ENGINE, at, values)

    def _launched(self, event: StepLaunched) -> None:
        facts = {"step": event.step, "late": True} if event.late else {"step": event.step}
        begin = self._on_host("launch", event.time, event.seconds, facts)
        if event.step in self._steps:
            self._steps[event.step].begin, self._steps[event.step].late = begin, event.late

    def _finished(self, event: StepFinished) -> None:
        self._on_host("wait", event.time, event.seconds, {"step": event.step})
        end = max(self._device, self._clock.ticks(event.time))
        step = self._steps.pop(event.step, None)
        begin = end if step is None else max(step.begin, self._device)  # unknown: launched before the trace
        if step is not None:
            self._on_device(step, event, begin, end)
            self._tracks.computed(step.filling, event.step, begin, end)
        self._tracks.got(event.tokens, begin, end)
        self._file.settle()
        if step is None:
            return
        self._steps_seen += 1
        if self._kernels.took_step():
            self._write_kernels()
        if self._file.full:
            self._end(f"the file has its {self._file.most} events (max_events)")
        elif self._steps_seen == self._max_steps:
            self._end(f"it has seen its {self._max_steps} steps (max_iterations)")

    def _on_device(self, step: TracedStep, event: StepFinished, begin: int, end: int) -> None:
        facts, new, drafts, accepted = step.facts, 0, 0, 0
        for tokens in event.tokens:
            new += len(tokens.token_ids)
            drafts += tokens.drafts
            accepted += tokens.accepted
        facts["new_tokens"] = new
        if step.late:
            facts["late"] = True
        if drafts:
            facts |= {"drafts": drafts, "accepted": accepted}
            self._drafts["verified"] += drafts
            self._drafts["accepted"] += accepted
        if event.draft_seconds:
            before, self._draft_seconds = self._draft_seconds, event.draft_seconds
            if before is not None:
                facts["draft_ms"] = round(1e3 * (event.draft_seconds - before), 6)
        self._file.slice(step.name, ENGINE, DEVICE, begin, end, facts)
        self._device = end
        if drafts:
            self._count("drafts", end, dict(self._drafts))

    def _write_kernels(self) -> None:
        """Takes time, in which no step is planned: a slice shows it."""
        began = time.monotonic()
        more = self._kernels.write(self._file, self._clock, GPU)
        now = time.monotonic()
        self._on_host("read the profiler's records", now, now - began, more)

    def close(self, why: str = "it was told to end") -> None:
        """End the trace and the file. May be called again.

        Raises:
            OSError: it cannot be written, now or before.
        """
        try:
            self._end(why)
        except OSError as error:
            self._fail(error)
        if self.failure is not None:
            raise self.failure

    def _end(self, why: str) -> None:
        if self.note:
            return
        self.note = why
        self._unsubscribe()
        if self._kernels.running:
            self._write_kernels()
        now = time.monotonic()
        self._tracks.leave(now)
        at = max(self._host, self._clock.ticks(now))
        self._file.instant("trace ends", ENGINE, HOST, at, {"why": why})
        self._file.close()

    def _fail(self, error: OSError) -> None:
        self.failure = self.failure or error
        self.note = self.note or f"it could not be written: {error}"
        self._unsubscribe()
        self._kernels.stop()
        try:
            self._file.close()
        except OSError:
            logger.debug("the trace's file did not close", exc_info=True)
        logger.warning("the trace %s ends early: %s", self.path, error)
