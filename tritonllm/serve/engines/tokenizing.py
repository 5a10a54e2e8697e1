"""Prompts become token ids in two threads. One has the short texts, some milliseconds each. The other has long ones: to
tokenize 5 MB takes seconds, and neither the event loop nor a short prompt waits for that.

Each thread has a tokenizer of its own. One is not made for two threads: whatever a call sets in it (a truncation, say)
would hold for the other's call. Those of the package ``tokenizers`` let other threads run while they work.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.text.chat import ChatOptions, Message, render
from tritonllm.engine.text.input_processor import SURELY_QUICK, InputProcessor, PromptTooLongError, TokenizedPrompt

logger = logging.getLogger(__name__)
Params = SamplingParams | BeamSearchParams | PoolingParams
T = TypeVar("T")
TOKEN_CHARACTERS = 4  # about


class Tokenizing:
    """The two threads of one event loop.

    Args:
        inputs: checks requests, and has the tokenizer.
        causal: the model's tokens see only earlier ones.
    """

    def __init__(self, inputs: InputProcessor, *, causal: bool) -> None:
        self._inputs = inputs
        self._causal = causal
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-texts")
        self._long_inputs: InputProcessor | None = None  # with a tokenizer of its own, from the first long text on
        self._in_long_text = False
        self._waits: set[asyncio.Future[Exception]] = set()  # for a long text; they may end sooner, with an error

    @property
    def is_in_long_text(self) -> bool:
        """A thread works on a long text, which Python would wait for at the end of the process."""
        return self._in_long_text

    async def with_tokenizer(self, size: int, work: Callable[[InputProcessor], T]) -> T:
        """Run what uses the tokenizer, in a thread.

        Args:
            size: characters of the text, of which long ones wait for each other.
            work: is given what has the thread's tokenizer.

        Raises:
            Exception: what ``work`` raises, or what :meth:`end_waits` was given meanwhile.
        """
        loop = asyncio.get_running_loop()
        if size <= SURELY_QUICK:
            return await loop.run_in_executor(self._short, work, self._inputs)
        result = loop.run_in_executor(self._long, self._with_long_text, work)
        wait: asyncio.Future[Exception] = loop.create_future()
        self._waits.add(wait)
        either: set[asyncio.Future[Any]] = {result, wait}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if wait.done():
                raise wait.result()
            return result.result()
        finally:
            self._waits.discard(wait)
            result.cancel()

    def end_waits(self, error: Exception) -> None:
        """End the waiting for long texts with this error."""
        for wait in self._waits:
            if not wait.done():
                wait.set_result(error)

    def _with_long_text(self, work: Callable[[InputProcessor], T]) -> T:
        self._in_long_text = True
        try:
            return self._in_its_thread(work)
        finally:
            self._in_long_text = False

    def _in_its_thread(self, work: Callable[[InputProcessor], T]) -> T:
        if self._long_inputs is None:
            try:
                self._long_inputs = self._inputs.copied()
            except TypeError as error:
                logger.warning("the tokenizer cannot be copied (%s): short prompts wait for long texts", error)
                self._long_inputs = self._inputs
        if self._long_inputs is self._inputs:
            return self._short.submit(work, self._inputs).result()
        return work(self._long_inputs)

    async def render_chat(
        self, conversation: Sequence[Message], options: ChatOptions, *, must_fit: bool = False
    ) -> Prompt:
        """The prompt of a conversation; errors as :func:`tritonllm.engine.text.chat.render`, and if it ``must_fit`` as
        :meth:`tritonllm.engine.text.input_processor.InputProcessor.encode_prompt`."""

        def rendered(inputs: InputProcessor) -> Prompt:
            encode = inputs.encode_prompt if must_fit else inputs.encode
            return render(inputs.tokenizer, conversation, options, partial(encode, add_special_tokens=False))

        return await self.with_tokenizer(characters(conversation) + characters(options.tools), rendered)

    async def tokenized(self, prompt: Prompt | TokenizedPrompt, params: Params) -> TokenizedPrompt:
        """Tokenize a prompt as the parameters ask for it; a tokenized one is returned as it is.

        Raises:
            ValueError: as :meth:`tritonllm.engine.text.input_processor.InputProcessor.tokenize`.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        truncate = None if isinstance(params, BeamSearchParams) else params.truncate_prompt_tokens
        more: dict[str, Any] = {}
        if isinstance(params, PoolingParams):
            more = {"continued": False, "separated": not self._causal}
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        size = len(text) if isinstance(text, str) else 0
        return await self.with_tokenizer(size, lambda inputs: inputs.tokenize(prompt, truncate, **more))

    async def with_bad_words(self, prompt: TokenizedPrompt, params: SamplingParams) -> TokenizedPrompt:
        """The prompt with the token sequences of the request's bad words. In the engine, steps would wait for them."""
        if not params.bad_words:
            return prompt
        size = 2 * sum(map(len, params.bad_words))
        return replace(prompt, bad_words=await self.with_tokenizer(size, lambda inputs: inputs.bad_words(params)))

    async def all_tokenized(
        self, prompts: Sequence[Prompt | TokenizedPrompt], params: Params, names: Sequence[str]
    ) -> list[TokenizedPrompt]:
        """Tokenize the prompts of one body.

        Args:
            names: what errors call each prompt.

        Raises:
            ValueError: one of them is bad; the message begins with its name.
        """
        tokenized = []
        for name, prompt in zip(names, prompts, strict=True):
            with about(name):
                tokenized.append(await self.tokenized(prompt, params))
        return tokenized

    def close(self) -> None:
        """End the threads, and do not wait for them."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)


def numbered(name: str, count: int) -> list[str]:
    """What errors call each of so many entries of a field; a single one is called as the field is."""
    return [name] if count == 1 else [f"{name}[{index}]" for index in range(count)]


@contextmanager
def about(name: str) -> Iterator[None]:
    """Inside the block, errors of a prompt begin with this name of it.

    Raises:
        ValueError: in place of another one; :class:`PromptTooLongError` in place of such a one.
    """
    try:
        yield
    except ValueError as error:
        text = str(error)
        own = text.startswith(("prompt ", "prompt["))
        kind = PromptTooLongError if isinstance(error, PromptTooLongError) else ValueError
        raise kind(name + text.removeprefix("prompt") if own else f"{name}: {text}") from error


def characters(value: object) -> int:
    """How many characters all texts in a value have that JSON can hold."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(characters, value.values()))
    return sum(map(characters, value)) if isinstance(value, Sequence) else 0
