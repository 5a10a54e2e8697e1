"""From a checked body to a response: run its requests, notice a client that leaves, send events or one object."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.prompts import Prompt
from tritonllm.engine.data.outputs import RequestOutput
from tritonllm.engine.text.input_processor import TokenizedPrompt
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.api.errors import APIError, as_api_error, error_body
from tritonllm.serve.api.fields import IgnoredFields, shown
from tritonllm.serve.api.pace import Pace
from tritonllm.serve.api.protocol import Body
from tritonllm.serve.api.replies import DONE, as_json, event
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.engines.room import QueueFullError, sequences_of
from tritonllm.serve.engines.tokenizing import Params
from tritonllm.serve.parsing.choose import choose
from tritonllm.serve.parsing.formats import TOOL_PARSERS

T = TypeVar("T")
AT_ONCE = 8  # requests of bodies with several prompts that begin in one turn of the event loop
BEGIN_AT_ONCE = 64  # tasks of these, each of which asks for its turn
CLIENT_LEFT = 499  # nobody reads the answer; the log shows why there is none
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]


class Service:
    """What every handler needs.

    Args:
        llm: the engine.
        config: the configuration of the server.
        count_ignored: is told the name of each field of a request that changes nothing.

    Raises:
        ValueError: a parser of the configuration is unknown, there is none where one must be, or the chat template
            shall tell it and does not.
    """

    def __init__(
        self, llm: AsyncLLM, config: ServerConfig, count_ignored: Callable[[str], None] = lambda name: None
    ) -> None:
        self.llm = llm
        self._ignored = IgnoredFields(count_ignored)
        self.config = config
        self._pace = Pace(AT_ONCE)
        tokenizer = llm.inputs.tokenizer
        own = config.own_parsers()
        self.formats = choose(tokenizer, config.chat_template, config.tool_call_parser, config.reasoning_parser, own)
        if config.enable_auto_tool_choice and self.formats.tools is None:
            raise ValueError(
                "--enable-auto-tool-choice: the chat template does not tell how this model writes calls: give "
                f"--tool-call-parser, one of {', '.join({**TOOL_PARSERS, **own.tools})}"
            )

    def accept(self, request: Request, body: Body) -> str:
        """Take a body whose fields are checked, as far as they are without the engine; those that change nothing are
        noted, or refused with ``--strict-fields``.

        Args:
            body: has the field ``model``.

        Returns:
            The model's name that answers carry.

        Raises:
            APIError: 404, no such model; 400, a field that changes nothing.
            ValueError: more log-probabilities than the engine lets requests have.
        """
        model = self.check_model(getattr(body, "model", None))
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            count = getattr(body, name, None)
            if count is not None and not isinstance(count, bool):  # a chat says whether, and how many by another name
                self.llm.inputs.check_logprobs(name, count)
        if self.config.strict_fields:
            for name in body.ignored():
                known = shown(name)
                raise APIError(400, f"unknown field '{known}': leave it out", param=known)
        self._ignored.note(body.ignored(), request.url.path)
        return model

    def check_model(self, name: str | None) -> str:
        """The name that answers carry.

        Raises:
            APIError: 404, no such model.
        """
        if name is None:
            return self.config.model_names[0]
        if name not in self.config.model_names:
            known = ", ".join(self.config.model_names)
            message = f"model {name!r} is not served here; there is {known}"
            raise APIError(404, message, param="model", code="model_not_found")
        return name

    async def run(
        self,
        answer_id: str,
        prompts: Sequence[Prompt | TokenizedPrompt],
        params: Params,
        priority: int,
        names: Sequence[str] | None = None,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """Run one request for each prompt. If there are several, all of them are checked before the first one starts.

        Args:
            names: what errors call each prompt; by default ``prompt``, with its index if there are several.

        Yields:
            ``(index of the prompt, what is new)``.

        Raises:
            ValueError: one is bad; the message begins with its name.
            APIError: a request ended with an error, or took too long.
            Exception: as :meth:`AsyncLLM.generate`.
        """
        unique = uuid.uuid4().hex[:8]  # two clients may send the same X-Request-Id
        ways: dict[type, Any] = {PoolingParams: self.llm.encode, BeamSearchParams: self.llm.beam_search}
        start = ways.get(type(params), self.llm.generate)
        end = _Deadline(self.config.request_timeout)
        if len(prompts) > 1 or names is not None:
            prompts = await end.before(self.llm.check_prompts(prompts, params, names))
        starts = [
            partial(start, prompt, params, f"{answer_id}-{unique}-{index}", priority=priority)
            for index, prompt in enumerate(prompts)
        ]
        streams = [self._in_turn(one, params) for one in starts] if len(starts) > 1 else [starts[0]()]
        merged = merge(streams, self._at_once(params))
        async with aclosing(merged):
            while True:
                try:
                    index, output = await end.before(anext(merged))
                except StopAsyncIteration:
                    return
                if output.error is not None:
                    raise APIError(500, f"the engine failed: {output.error}", code="engine_error")
                yield index, output

    async def _in_turn(
        self, start: Callable[[], AsyncGenerator[Any, None]], params: Params
    ) -> AsyncGenerator[Any, None]:
        """One request of several of a body: where others fill the queue meanwhile, it waits until it is taken."""
        await self._pace.turn()
        while True:
            await self.llm.wait_for_room(params)
            try:
                async with aclosing(start()) as stream:
                    async for output in stream:
                        yield output
                return
            except QueueFullError:  # another API process was sooner
                continue

    def _at_once(self, params: Params) -> int:
        """How many requests of one body may be in the engine: enough to fill it, but others find a place in the queue,
        and a body may have more prompts than the engine takes."""
        sequences = max(self.llm.max_num_seqs, self.llm.max_sequences // 2)
        return max(sequences // sequences_of(params), 1)


class _Deadline:
    """A time by which an answer must have ended, so many seconds from now; ``None``: there is none."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds

    async def before(self, work: Awaitable[T]) -> T:
        """Await some work, but no longer than until the deadline.

        Raises:
            APIError: 504, the work takes longer.
        """
        if self._end is None:
            return await work
        try:
            async with asyncio.timeout_at(self._end):
                return await work
        except TimeoutError:
            raise APIError(504, f"the request took more than {self._seconds:g} seconds", code="timeout") from None


async def merge(streams: Sequence[AsyncGenerator[RequestOutput, None]], at_once: int) -> Outputs:
    """What several generators yield, with the index of each; so many run at a time, and closing this closes them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(len(streams))
    places = asyncio.Semaphore(at_once)

    async def forward(index: int) -> None:
        try:
            async with places, aclosing(streams[index]) as stream:
                async for output in stream:
                    await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = list[asyncio.Task[None]]()

    async def begin() -> None:
        for index in range(len(streams)):
            tasks.append(asyncio.create_task(forward(index)))
            if index % BEGIN_AT_ONCE == BEGIN_AT_ONCE - 1:
                await asyncio.sleep(0)  # or the first steps of all of them would be one turn of the event loop

    beginning = asyncio.create_task(begin())
    try:
        running = len(streams)
        while running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        beginning.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(beginning, *tasks, return_exceptions=True)


def answer_id(prefix: str, request: Request, chosen: str | None) -> str:
    """The id of an answer as vLLM makes it: the id that the body chose, or else the request's, behind what kind of
    answer it is."""
    return f"{prefix}{chosen or request.state.request_id}"


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """The work's result; it is cancelled if the client goes away first. The body must have been read.

    Raises:
        APIError: the client has gone.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(CLIENT_LEFT, "the client has gone")
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def respond(request: Request, answer: Awaitable[dict[str, Any]]) -> Response:
    """Respond with one JSON object."""
    return Response(as_json(await unless_disconnected(request, answer)), media_type="application/json")


def _error_event(error: APIError) -> bytes:
    return event(error_body(error))


async def stream(
    request: Request,
    chunks: AsyncGenerator[bytes, None],
    failed: Callable[[APIError], bytes] = _error_event,
    done: bytes = DONE,
    media_type: str = "text/event-stream",
) -> Response:
    """An answer in parts, by default server-sent events. The status is sent with the first part: what goes wrong before
    has its own.

    Args:
        failed: makes the part of what goes wrong later.
        done: the last part.
        media_type: what the parts are.
    """
    first = await unless_disconnected(request, anext(chunks))
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    events = _events(request, first, chunks, failed, done)
    return StreamingResponse(events, media_type=media_type, headers=headers)


async def _events(
    request: Request,
    first: bytes,
    chunks: AsyncGenerator[bytes, None],
    failed: Callable[[APIError], bytes],
    done: bytes,
) -> AsyncIterator[bytes]:
    async with aclosing(chunks):
        yield first
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            yield failed(as_api_error(error, request))
        if done:
            yield done
