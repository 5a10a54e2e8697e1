"""Prompts become token ids in a thread of their own: a long one does not hold up the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tritonllm.beam_search_params import BeamSearchParams
from tritonllm.engine.chat import ChatOptions, Message, render
from tritonllm.engine.input_processor import InputProcessor, TokenizedPrompt
from tritonllm.inputs import Prompt
from tritonllm.pooling_params import PoolingParams
from tritonllm.sampling_params import SamplingParams

Params = SamplingParams | BeamSearchParams | PoolingParams


class Tokenizing:
    """What :class:`~tritonllm.serve.async_llm.AsyncLLM` does with a tokenizer.

    Args:
        inputs: checks requests, and has the tokenizer.
        causal: the model's tokens see only earlier ones.
    """

    def __init__(self, inputs: InputProcessor, *, causal: bool) -> None:
        self.inputs = inputs
        self._causal = causal
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")  # tokenizers are not made for several

    @property
    def max_model_len(self) -> int:
        return self.inputs.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        return self.inputs.default_params.clone()

    async def get_tokenizer(self) -> Any:
        return self.inputs.tokenizer

    async def in_tokenizer_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run what uses the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function, *args)

    async def render_chat(
        self, conversation: Sequence[Message], options: ChatOptions, *, must_fit: bool = False
    ) -> Prompt:
        """The prompt of a conversation; errors as :func:`tritonllm.engine.chat.render`, and if it ``must_fit`` as
        :meth:`tritonllm.engine.input_processor.InputProcessor.encode_prompt`."""
        encode = partial(self.inputs.encode_prompt, add_special_tokens=False) if must_fit else None
        return await self.in_tokenizer_thread(render, self.inputs.tokenizer, conversation, options, encode)

    async def _tokenized(self, prompt: Prompt | TokenizedPrompt, params: Params) -> TokenizedPrompt:
        """Raises:
        ValueError: as :meth:`tritonllm.engine.input_processor.InputProcessor.tokenize`.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        truncate = None if isinstance(params, BeamSearchParams) else params.truncate_prompt_tokens
        tokenize = self.inputs.tokenize
        if isinstance(params, PoolingParams):
            tokenize = partial(tokenize, continued=False, separated=not self._causal)
        return await self.in_tokenizer_thread(tokenize, prompt, truncate)

    async def _all_tokenized(
        self, prompts: Sequence[Prompt | TokenizedPrompt], params: Params
    ) -> list[TokenizedPrompt]:
        """Raises:
        ValueError: one of them is bad; the message begins with its index.
        """
        tokenized = []
        for index, prompt in enumerate(prompts):
            try:
                tokenized.append(await self._tokenized(prompt, params))
            except ValueError as error:
                name, text = f"prompt[{index}]", str(error)
                about = text.startswith(("prompt ", "prompt["))
                raise ValueError(name + text.removeprefix("prompt") if about else f"{name}: {text}") from error
        return tokenized

    def _end_tokenizing(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
