"""What ``GET /activity`` tells: the engine's requests, blocks and steps, as ``tritonllm dashboard --url`` shows them.

The engine's process follows its events only while somebody asks again and again; else nothing is built.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tritonllm.telemetry.recorder import ActivityRecorder
from tritonllm.telemetry.snapshot import View, to_json

if TYPE_CHECKING:
    from tritonllm.engine.loop.engine import LLMEngine

LINGER = 10.0  # seconds after the last question for which the events are still followed


class Activity:
    """What one engine has in its hands, told in its thread.

    Args:
        engine: an engine that has started.
    """

    def __init__(self, engine: "LLMEngine") -> None:
        self._engine = engine
        self._recorder: ActivityRecorder | None = None
        self._asked = 0.0

    @property
    def is_followed(self) -> bool:
        return self._recorder is not None

    def tell(self, view: Mapping[str, int]) -> dict[str, Any]:
        """A snapshot as JSON; its totals are those since the engine started.

        Args:
            view: fields of :class:`View`.

        Raises:
            ValueError: a number is out of its range.
        """
        shown = View(**view)
        self._asked = time.monotonic()
        if self._recorder is None:
            self._recorder = ActivityRecorder(self._engine)
        snapshot, stats = self._recorder.look(shown), self._engine.stats
        counters = dataclasses.replace(
            snapshot.counters,
            steps=stats.steps,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            query_tokens=stats.prefix_cache_query_tokens,
            hit_tokens=stats.prefix_cache_hit_tokens,
            preemptions=stats.preemptions,
            running=stats.num_running,
            waiting=stats.num_waiting,
            drafts=stats.num_draft_tokens,
            accepted=stats.num_accepted_tokens,
        )
        return to_json(dataclasses.replace(snapshot, counters=counters))

    def rest(self) -> None:
        """Stop to follow the events if nobody has asked for a while."""
        if self._recorder is not None and time.monotonic() - self._asked > LINGER:
            self._recorder.stop()
            self._recorder = None
