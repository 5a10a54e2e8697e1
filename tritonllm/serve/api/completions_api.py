"""``POST /v1/completions``: one prompt or several, each continued ``n`` times."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.outputs import CompletionOutput, Logprobs, RequestOutput
from tritonllm.engine.text.detokenizer import IncrementalDetokenizer
from tritonllm.engine.text.input_processor import InputProcessor
from tritonllm.serve.api.answering import Outputs, Service, answer_id, respond, stream, unless_disconnected
from tritonllm.serve.api.beam_search import search_params, with_logprobs
from tritonllm.serve.api.protocol import CompletionRequest, StreamOptions
from tritonllm.serve.api.replies import (
    Offsets,
    Usage,
    completion_logprobs,
    ending,
    event,
    now,
    prompt_logprobs,
    transfer,
)
from tritonllm.serve.engines.tokenizing import about, numbered


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Answer ``POST /v1/completions``.

    Raises:
        APIError, ValueError, QueueFullError, EngineDeadError: see :mod:`tritonllm.serve.api.errors`.
    """
    head, build, outputs = await start(service, request, body)
    if body.stream:
        return await stream(request, _chunks(head, body, build, outputs))
    return await respond(request, _whole(head, body, build, outputs))


async def start(
    service: Service, request: Request, body: CompletionRequest
) -> tuple[dict[str, Any], "Choices", Outputs]:
    """Check what is asked for and tokenize it.

    Returns:
        The fields that every part of the answer has, what makes its choices, and the outputs. The requests begin with
        the first of these.

    Raises:
        APIError, ValueError: bad input.
    """
    model = service.accept(request, body)
    more = {}
    max_tokens, scored = body.max_tokens, body.max_tokens == 0  # the prompt alone is wanted, with its log-probabilities
    if scored:
        max_tokens = 1  # the engine gives every request one
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = body.logprobs
    params: SamplingParams | BeamSearchParams
    if body.use_beam_search:
        params = search_params(body, service.llm.max_model_len if max_tokens is None else max_tokens)
    else:
        params = body.sampling_params(service.llm.inputs.default_params, max_tokens, body.logprobs, **more)
    prompts = await unless_disconnected(request, _prompts(service, body))
    name = answer_id("cmpl-", request, body.request_id)
    outputs = service.run(name, prompts, params, body.priority)
    head = {"id": name, "object": "text_completion", "created": now(), "model": model}
    if isinstance(params, BeamSearchParams):
        outputs = with_logprobs(outputs, body.logprobs)
    if scored:
        outputs = _without_tokens(outputs)
    each = params.beam_width if isinstance(params, BeamSearchParams) else params.n
    return head, Choices(service, body, each), outputs


async def _without_tokens(outputs: Outputs) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of requests for one token each, without it."""
    async with aclosing(outputs):
        async for index, output in outputs:
            for completion in output.outputs:
                completion.text, completion.token_ids, completion.stop_reason = "", [], None
                completion.logprobs = None if completion.logprobs is None else []
                if completion.finish_reason in ("stop", "repetition"):
                    completion.finish_reason = "length"
            yield index, output


async def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    """The prompts of the body, tokenized; an error begins with the name of its prompt."""
    prompts = []
    for name, prompt in zip(numbered("prompt", len(body.prompts())), body.prompts(), strict=True):
        with about(name):
            prompts.append(await _prompt(service, body, prompt))
    return prompts


async def _prompt(service: Service, body: CompletionRequest, prompt: str | list[int]) -> Prompt:
    parts: dict[str, Any] = {}
    if isinstance(prompt, str):
        parts["prompt"] = text = prompt
        if not body.add_special_tokens:
            must_fit = body.truncate_prompt_tokens is None

            def encode(inputs: InputProcessor) -> list[int]:
                return (inputs.encode_prompt if must_fit else inputs.encode)(text, add_special_tokens=False)

            parts["prompt_token_ids"] = await service.llm.with_tokenizer(len(prompt), encode)
    else:
        parts["prompt_token_ids"] = prompt
    if body.cache_salt is not None:
        parts["cache_salt"] = body.cache_salt
    return parts  # type: ignore[return-value]


class Choices:
    """Makes the entries of a completion's ``choices``.

    Args:
        n: how many continuations each prompt has.

    Attributes:
        count: how many entries there are in all.
    """

    def __init__(self, service: Service, body: CompletionRequest, n: int) -> None:
        self._tokenizer = service.llm.inputs.tokenizer
        self._body = body
        self._n = n
        self.count = n * len(body.prompts())
        self._offsets: dict[int, Offsets] = {}  # of each choice

    def index(self, prompt: int, completion: CompletionOutput) -> int:
        return prompt * self._n + completion.index

    def prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids)

    def choice(self, prompt: int, output: RequestOutput, completion: CompletionOutput, first: bool) -> dict[str, Any]:
        """One entry; the ``first`` of a choice begins with the prompt, if that is asked for."""
        index, body = self.index(prompt, completion), self._body
        echo = first and bool(body.echo)
        choice = {
            "index": index,
            "text": (self.prompt_text(output) if echo else "") + completion.text,
            "logprobs": None if completion.logprobs is None else self._logprobs(index, output, completion, echo),
            **ending(completion),
        }
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        return choice

    def _logprobs(self, index: int, output: RequestOutput, completion: CompletionOutput, echo: bool) -> dict[str, Any]:
        tokens, positions = list(completion.token_ids), list[Logprobs | None](completion.logprobs or ())
        prompt = list(output.prompt_token_ids)
        if index not in self._offsets:
            options = {
                "skip_special_tokens": self._body.skip_special_tokens is not False,
                "spaces_between_special_tokens": self._body.spaces_between_special_tokens is not False,
            }
            before = len(self.prompt_text(output)) if echo else 0
            self._offsets[index] = Offsets(self._detokenizer(prompt, **options), before)
        begins = self._offsets[index].add(tokens)
        if echo and output.prompt_logprobs is not None:
            begins = self._prompt_offsets(output) + begins
            tokens, positions = prompt + tokens, [*output.prompt_logprobs, *positions]
        return completion_logprobs(tokens, positions, begins, self._tokenizer)

    def _prompt_offsets(self, output: RequestOutput) -> list[int]:
        """Where the prompt's tokens begin. A text that was given lacks the special tokens that were set before it."""
        prompt, lacks = output.prompt_token_ids, 0
        if output.prompt is not None and self._tokenizer is not None:
            lacks = len(self._tokenizer.decode(prompt)) - len(output.prompt)
        return Offsets(self._detokenizer([], skip_special_tokens=False), -lacks).add(prompt)

    def _detokenizer(self, prompt: Sequence[int], **options: bool) -> IncrementalDetokenizer | None:
        return None if self._tokenizer is None else IncrementalDetokenizer(self._tokenizer, prompt, **options)

    def whole(self, prompt: int, output: RequestOutput) -> list[dict[str, Any]]:
        choices = [self.choice(prompt, output, part, first=True) for part in output.outputs]
        if self._body.prompt_logprobs is not None:
            for choice in choices:
                choice["prompt_logprobs"] = prompt_logprobs(output)
        return choices


async def _whole(head: dict[str, Any], body: CompletionRequest, build: Choices, outputs: Outputs) -> dict[str, Any]:
    usage, ended = Usage(), dict[int, RequestOutput]()
    async with aclosing(outputs):
        async for index, output in outputs:
            usage.add(index, output)
            ended[index] = output
    choices = [choice for index in sorted(ended) for choice in build.whole(index, ended[index])]
    return {**head, "choices": choices, "usage": usage.as_dict()} | transfer(body.kv_transfer_params, ended[0])


async def _chunks(
    head: dict[str, Any], body: CompletionRequest, build: Choices, outputs: Outputs
) -> AsyncGenerator[bytes, None]:
    usage, begun, ended, last = Usage(), set[int](), set[int](), dict[str, Any]()
    asked = body.stream_options or StreamOptions()
    async with aclosing(outputs):
        async for prompt, output in outputs:
            usage.add(prompt, output)
            extra = usage.of_chunk(asked.include_usage, asked.continuous_usage_stats)
            for completion in output.outputs:
                index = build.index(prompt, completion)
                if index in ended:
                    continue
                first = index not in begun
                if completion.finished():
                    ended.add(index)
                    if len(ended) == build.count:
                        last = transfer(body.kv_transfer_params, output)
                elif not ((body.echo and first) or completion.text) and not (
                    completion.token_ids and (body.logprobs is not None or body.return_token_ids)
                ):
                    continue  # half a character, or what may be the beginning of a stop string
                begun.add(index)
                choice = build.choice(prompt, output, completion, first)
                yield event({**head, "choices": [choice], **extra, **last})
    if asked.include_usage:
        yield event({**head, "choices": [], "usage": usage.as_dict(), **last})
