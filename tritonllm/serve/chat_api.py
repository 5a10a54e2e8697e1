"""``POST /v1/chat/completions``."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from tritonllm.engine.outputs import CompletionOutput, RequestOutput
from tritonllm.serve.answering import Outputs, Service, answer_id, respond, stream
from tritonllm.serve.protocol import ChatRequest, TokenizeRequest
from tritonllm.serve.replies import Usage, chat_logprobs, ending, event, now, prompt_logprobs


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Raises:
    APIError, ValueError, QueueFullError, EngineDeadError: see :mod:`tritonllm.serve.errors`.
    """
    model = service.check_model(body.model)
    top = (body.top_logprobs or 0) if body.logprobs else None
    params = body.sampling_params(service.llm.inputs.default_params, body.new_tokens(), top)
    options = body.options(service.config.chat_template, service.config.trust_request_chat_template)
    prompt: Any = await service.llm.render_chat(body.messages, options)
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    name = answer_id("chatcmpl", request, body.request_id)
    outputs = service.run(name, [prompt], params, body.priority)
    head = {"id": name, "object": "chat.completion", "created": now(), "model": model}
    if body.stream:
        return await stream(request, _chunks({**head, "object": "chat.completion.chunk"}, body, outputs))
    return await respond(request, _whole(head, body, outputs))


def _role(body: ChatRequest) -> str:
    """Of the answer: that of the last message if it is to be continued."""
    return str(body.messages[-1].get("role", "assistant")) if body.continue_final_message else "assistant"


async def _whole(head: dict[str, Any], body: ChatRequest, outputs: Outputs) -> dict[str, Any]:
    usage, last = Usage(), None
    async with aclosing(outputs):
        async for index, output in outputs:
            usage.add(index, output)
            last = output
    assert last is not None
    answer = {**head, "choices": [_choice(body, part) for part in last.outputs], "usage": usage.as_dict()}
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(last)
    if body.return_token_ids:
        answer["prompt_token_ids"] = last.prompt_token_ids
    return answer


def _choice(body: ChatRequest, completion: CompletionOutput) -> dict[str, Any]:
    choice = {
        "index": completion.index,
        "message": {"role": _role(body), "content": completion.text},
        "logprobs": chat_logprobs(completion.token_ids, completion.logprobs, body.top_logprobs or 0),
        **ending(completion),
    }
    if body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


async def _chunks(head: dict[str, Any], body: ChatRequest, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    usage, ended = Usage(), set[int]()
    asked = body.stream_options
    always = asked is not None and asked.continuous_usage_stats
    begun = False
    async with aclosing(outputs):
        async for index, output in outputs:
            usage.add(index, output)
            extra: dict[str, Any] = {"usage": usage.as_dict()} if always else {}
            if not begun:
                begun = True
                yield event({**head, "choices": _first(body, output), **extra})
            for completion in output.outputs:
                if completion.index in ended:
                    continue
                if completion.finished:
                    ended.add(completion.index)
                elif not completion.text and not (completion.token_ids and (body.logprobs or body.return_token_ids)):
                    continue  # half a character, or what may be the beginning of a stop string
                yield event({**head, "choices": [_delta(body, completion)], **extra})
    if asked is not None and asked.include_usage:
        yield event({**head, "choices": [], "usage": usage.as_dict()})


def _first(body: ChatRequest, output: RequestOutput) -> list[dict[str, Any]]:
    delta = {"role": _role(body), "content": ""}
    return [{"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None} for part in output.outputs]


def _delta(body: ChatRequest, completion: CompletionOutput) -> dict[str, Any]:
    choice = {
        "index": completion.index,
        "delta": {"content": completion.text} if completion.text or not completion.finished else {},
        "logprobs": chat_logprobs(completion.token_ids, completion.logprobs, body.top_logprobs or 0),
        **ending(completion),
    }
    if body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


async def tokens_of_chat(service: Service, body: TokenizeRequest) -> list[int]:
    """Token ids of a conversation's prompt."""
    assert body.messages is not None
    chat_body = ChatRequest(
        messages=body.messages,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    prompt: Any = await service.llm.render_chat(body.messages, chat_body.options(service.config.chat_template, False))
    return prompt["prompt_token_ids"]
