"""Sleep, weights, profiles and the like of a running engine, as :class:`~tritonllm.serve.engines.async_llm.AsyncLLM`
tells it between requests. Names are vLLM's."""

import asyncio
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tritonllm.config.vllm_arguments import only_false
from tritonllm.engine.data.asleep import check_rpc
from tritonllm.engine.data.stats import EngineStats
from tritonllm.experts.load import ExpertLoad
from tritonllm.serve.engines.engine_client import EngineDeadError, EngineLink
from tritonllm.serve.engines.messages import Answer, Call
from tritonllm.serve.engines.replicas import Replicas


class CallFailedError(RuntimeError):
    """The engine could not do what it was told; the message says why. It is as it was."""


class ProfileRefusedError(RuntimeError):
    """A trace is written already, or none is."""


class EngineCalls:
    """A part of :class:`~tritonllm.serve.engines.async_llm.AsyncLLM`."""

    stats: EngineStats
    _client: EngineLink | Replicas
    attach: Callable[[], None]

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Future[Answer]] = {}  # by number
        self._numbers = itertools.count()

    async def sleep(self, level: int = 1, mode: str = "wait") -> None:
        """Give the memory of weights and cache to others (:meth:`tritonllm.LLM.sleep`). Requests are refused from now
        on, with :class:`AsleepError`, until :meth:`wake_up`.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.
            mode: ``wait`` lets the running requests end first, ``abort`` ends them.

        Raises:
            ValueError: the engine cannot sleep, or a bad argument.
            RuntimeError: it failed; the engine is awake.
        """
        if mode not in ("wait", "abort"):
            raise ValueError(f"mode must be wait or abort, got {mode!r}")
        await self._call("sleep", abort=mode == "abort", level=level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory back (:meth:`tritonllm.LLM.wake_up`).

        Raises:
            ValueError: an unknown tag.
            RuntimeError: there is not enough memory now; the engine sleeps on.
        """
        await self._call("wake_up", tags=tags)

    async def is_sleeping(self) -> bool:
        return self.stats.is_sleeping

    async def reload_weights(self, model: str | None = None) -> None:
        """Go on with other weights (:meth:`tritonllm.LLM.reload_weights`), when the running requests have ended.

        Raises:
            ValueError: a model that does not fit or cannot be read; the old weights stay.
            RuntimeError: the weights sleep.
        """
        await self._call("reload_weights", model=model)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prompts. ``False``: a request runs, and nothing was forgotten.

        Raises:
            ValueError: one of the arguments, which only vLLM has, is not ``False``.
        """
        only_false(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        return await self._call("reset_prefix_cache")

    async def expert_load(self) -> ExpertLoad:
        """How many tokens went to each expert of each layer (:meth:`tritonllm.LLM.expert_load`); of several engines,
        the sum.

        Raises:
            ValueError: the engine does not count (``count_expert_load``).
            EngineDeadError: an engine has died.
        """
        engines = len(self._client.stats) if isinstance(self._client, Replicas) else 1
        answers = [await self._call("expert_load", replica=number) for number in range(engines)]
        return functools.reduce(operator.add, map(ExpertLoad.of_json, answers))

    async def reset_expert_load(self) -> None:
        """Count from 0 again. Raises as :meth:`expert_load`."""
        await self._call("reset_expert_load")

    async def start_profile(self, profile_prefix: str | None = None) -> dict[str, Any]:
        """Let the engine write a trace (docs/teach.md), from now to :meth:`stop_profile`.

        Args:
            profile_prefix: what the file's name begins with.

        Returns:
            ``file``: where it is written.

        Raises:
            ValueError: there is no ``profiler_config``, or a bad prefix.
            ProfileRefusedError: a trace is written already.
            RuntimeError: the file cannot be made.
        """
        return _unless_refused(await self._call("start_profile", profile_prefix=profile_prefix))

    async def stop_profile(self) -> dict[str, Any]:
        """End the trace.

        Returns:
            ``file``, its number of ``events``, and ``note``: why it ended, by this or before.

        Raises:
            ValueError: there is no ``profiler_config``.
            ProfileRefusedError: no trace is written.
            RuntimeError: the file could not be written.
        """
        return _unless_refused(await self._call("stop_profile"))

    async def activity(self, view: Mapping[str, int], replica: int | None = None) -> dict[str, Any]:
        """What the engine has in its hands (:mod:`tritonllm.serve.engines.activity`).

        Args:
            view: fields of :class:`~tritonllm.telemetry.snapshot.View`.
            replica: of several engines; ``None``: the first that lives.

        Raises:
            ValueError: a number of the view is out of its range.
            EngineDeadError: that engine has died.
        """
        return await self._call("activity", replica=replica, view=dict(view))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        """vLLM's way to reach :meth:`reload_weights`, the only method that there is.

        Raises:
            ValueError: another method; and as the method.
        """
        check_rpc(method, args, kwargs)
        await self.reload_weights(*args, **(kwargs or {}))
        return [None]

    async def _call(self, method: str, *, abort: bool = False, replica: int | None = None, **arguments: Any) -> Any:
        """Let the engine's process do something, and wait for it.

        Raises:
            ValueError, RuntimeError: what it raised there.
            EngineDeadError: the engine process has died.
        """
        self.attach()
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._client.send(Call(number, method, arguments, abort, replica))
            answer = await future
        finally:
            del self._calls[number]
        if answer.error is not None:
            raise ValueError(answer.error) if answer.is_value_error else CallFailedError(answer.error)
        return answer.value

    def _take_answers(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            future = self._calls.get(answer.number)
            if future is not None and not future.done():
                future.set_result(answer)

    def _fail_calls(self, why: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(why))


def _unless_refused(answer: dict[str, Any]) -> dict[str, Any]:
    if "refused" in answer:
        raise ProfileRefusedError(answer["refused"])
    return answer
