"""Sleep, and other weights: what an engine does with its two big tensors, the weights and the cache, between requests.

Names are vLLM's. The memory is :class:`~tritonllm.engine.cache.engine_memory.EngineMemory`'s.
"""

from collections.abc import Callable, Collection
from typing import Any

from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.loop.announcer import Announcer
from tritonllm.engine.loop.in_flight import InFlight
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.transfer.transfer import KVTransfer


class SleepMethods:
    """What :class:`~tritonllm.engine.loop.engine.LLMEngine` has of this."""

    _memory: EngineMemory
    _events: Announcer
    _scheduler: Scheduler
    _transfer: KVTransfer | None
    _in_flight: InFlight
    _whole: bool
    _recover: Callable[[], None]
    has_unfinished_requests: Callable[[], bool]
    step: Callable[[], Any]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts (the weights changed, say). ``False``: nothing was forgotten, as a request runs."""
        self._recover()
        stats = self._scheduler.stats
        if stats.num_free_blocks != stats.num_blocks:
            return False
        self._forget_cache()
        return True

    def _forget_cache(self) -> None:
        self._whole = False
        if self._scheduler.prefix_cache is not None:
            self._scheduler.prefix_cache.reset()
        if self._transfer is not None:
            self._transfer.rename()
        if self._events.heard:
            self._events.reset("the prefix cache was reset")
        self._whole = True

    @property
    def is_sleeping(self) -> bool:
        """Weights or cache sleep."""
        return bool(self._memory.asleep)

    @property
    def takes_requests(self) -> bool:
        """Whether the engine is awake and has weights."""
        return not (self._memory.asleep or self._memory.weights_lost)

    def check_sleep(self, level: int = 1) -> None:
        """Check that :meth:`sleep` could do this, whatever runs.

        Raises:
            ValueError: :meth:`sleep` would not do that, whatever runs.
        """
        self._memory.check_level(level)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and cache to others, until :meth:`wake_up`. Cached prompts are forgotten.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.

        Raises:
            ValueError: the engine was made without ``enable_sleep_mode``, or there is no such level.
            RuntimeError: a request is unfinished, or the host has no room for the weights; the engine is awake.
        """
        self.check_sleep(level)
        self._require_idle("sleep")
        self._forget_cache()
        self._memory.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory back. After level 1 the engine is as it was, but for its cached prompts.

        Args:
            tags: some of ``weights`` and ``kv_cache``; by default both.

        Raises:
            ValueError: an unknown tag.
            MemoryError: the device has not enough memory now; the engine sleeps on.
        """
        self._memory.wake_up(tags)

    def reload_weights(self, model: str | None = None) -> None:
        """Go on with other weights of the same architecture. Cached prompts are forgotten: their keys are old.

        Args:
            model: a folder or hub id; by default the engine's own, which is read again.

        Raises:
            ValueError: a model that does not fit or cannot be read; the old weights stay.
            RuntimeError: a request is unfinished, or the weights sleep.
        """
        self._require_idle("reload_weights")
        self._memory.reload_weights(model)
        self._forget_cache()

    def _require_idle(self, what: str) -> None:
        """Check that there are no requests, and take in the steps that were launched ahead.

        Raises:
            RuntimeError: a request is unfinished.
        """
        if self.has_unfinished_requests():
            raise RuntimeError(f"{what}: requests are unfinished: let them end, or abort them")
        while self._in_flight:  # launched ahead of the ends of the last requests
            self.step()
        assert self._scheduler.stats.num_free_blocks == self._scheduler.stats.num_blocks
