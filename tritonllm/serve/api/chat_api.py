"""``POST /v1/chat/completions``."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from tritonllm.engine.data.outputs import CompletionOutput, RequestOutput
from tritonllm.serve.api.answering import Outputs, Service, answer_id, respond, stream, unless_disconnected
from tritonllm.serve.api.beam_search import with_logprobs
from tritonllm.serve.api.protocol import ChatRequest, StreamOptions, TokenizeRequest, chat_request
from tritonllm.serve.api.replies import Usage, chat_logprobs, ending, event, now, prompt_logprobs, transfer
from tritonllm.serve.api.turn import ChatTurn, prepare
from tritonllm.serve.parsing.pieces import (
    AnswerReader,
    Arguments,
    Content,
    ParsedAnswer,
    Piece,
    Reasoning,
    ToolCallBegin,
    read,
)


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer ``POST /v1/chat/completions``.

    Raises:
        APIError, ValueError, QueueFullError, EngineDeadError: see :mod:`tritonllm.serve.api.errors`.
    """
    model = service.accept(request, body)
    turn = await prepare(service, request, body, (body.top_logprobs or 0) if body.logprobs else None)
    name = answer_id("chatcmpl-", request, body.request_id)
    outputs = service.run(name, [turn.prompt], turn.params, body.priority)
    if body.use_beam_search:
        outputs = with_logprobs(outputs, (body.top_logprobs or 0) if body.logprobs else None)
    head = {"id": name, "object": "chat.completion", "created": now(), "model": model}
    if body.stream:
        return await stream(request, _chunks({**head, "object": "chat.completion.chunk"}, body, turn, outputs))
    return await respond(request, _whole(head, body, turn, outputs))


def _role(body: ChatRequest) -> str:
    """The role of the answer: that of the last message if it is to be continued."""
    return str(body.messages[-1].get("role", "assistant")) if body.continue_final_message else "assistant"


async def _whole(head: dict[str, Any], body: ChatRequest, turn: ChatTurn, outputs: Outputs) -> dict[str, Any]:
    usage, last = Usage(), None
    async with aclosing(outputs):
        async for index, output in outputs:
            usage.add(index, output)
            last = output
    assert last is not None
    answer = {**head, "choices": [_choice(body, turn, part) for part in last.outputs], "usage": usage.as_dict()}
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(last)
    if body.return_token_ids:
        answer["prompt_token_ids"] = last.prompt_token_ids
    return answer | transfer(body.kv_transfer_params, last)


def _choice(body: ChatRequest, turn: ChatTurn, completion: CompletionOutput) -> dict[str, Any]:
    answer = read(turn.new_reader(), completion.text)
    choice = {
        "index": completion.index,
        "message": {"role": _role(body), **_message(answer, turn)},
        "logprobs": _logprobs(body, turn, completion),
        **_ending(completion, turn, bool(answer.calls)),
    }
    if body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def _logprobs(body: ChatRequest, turn: ChatTurn, completion: CompletionOutput) -> dict[str, Any] | None:
    return chat_logprobs(completion.token_ids, completion.logprobs, body.top_logprobs or 0, turn.tokenizer)


def _message(answer: ParsedAnswer, turn: ChatTurn) -> dict[str, Any]:
    message: dict[str, Any] = {"content": answer.content}
    if answer.reasoning:
        message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": turn.new_call_id(call.name),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return message


def _ending(completion: CompletionOutput, turn: ChatTurn, calls: bool) -> dict[str, Any]:
    end = ending(completion)
    if calls and turn.ends_with_calls and completion.finish_reason == "stop":
        end["finish_reason"] = "tool_calls"
    return end


class _Deltas:
    """Makes the entries of ``choices`` of one stream."""

    def __init__(self, body: ChatRequest, turn: ChatTurn) -> None:
        self._body, self._turn = body, turn
        self._readers: dict[int, AnswerReader] = {}
        self._calls: set[int] = set()  # choices that have some

    def choice(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """What is new; ``None`` if that cannot be told yet."""
        index, body = completion.index, self._body
        reader = self._readers.get(index) or self._readers.setdefault(index, self._turn.new_reader())
        pieces = reader.feed(completion.text)
        if completion.finished():
            pieces += reader.finish()
        elif not pieces and not (completion.token_ids and (body.logprobs or body.return_token_ids)):
            return None  # half a character, or the beginning of a stop string or of a call, perhaps
        if any(isinstance(piece, ToolCallBegin) for piece in pieces):
            self._calls.add(index)
        choice = {
            "index": index,
            "delta": delta(pieces, self._turn.new_call_id),
            "logprobs": _logprobs(body, self._turn, completion),
            **_ending(completion, self._turn, index in self._calls),
        }
        if body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice


def delta(pieces: Sequence[Piece], new_call_id: Callable[[str], str]) -> dict[str, Any]:
    """Pieces as one delta of a chat completion."""
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if isinstance(piece, ToolCallBegin):
            function = {"name": piece.name, "arguments": ""}
            new = new_call_id(piece.name)
            calls[piece.index] = {"index": piece.index, "id": new, "type": "function", "function": function}
        elif isinstance(piece, Arguments):
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    result: dict[str, Any] = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
    if content:
        result["content"] = content
    if calls:
        result["tool_calls"] = list(calls.values())
    return result


async def _chunks(
    head: dict[str, Any], body: ChatRequest, turn: ChatTurn, outputs: Outputs
) -> AsyncGenerator[bytes, None]:
    usage, ended, deltas = Usage(), set[int](), _Deltas(body, turn)
    asked = body.stream_options or StreamOptions()
    begun, last = False, dict[str, Any]()
    async with aclosing(outputs):
        async for index, output in outputs:
            usage.add(index, output)
            extra = usage.of_chunk(asked.include_usage, asked.continuous_usage_stats)
            if not begun:
                begun = True
                ids = {"prompt_token_ids": output.prompt_token_ids} if body.return_token_ids else {}
                yield event({**head, "choices": _first(body, output), **ids, **extra})
            for completion in output.outputs:
                if completion.index in ended:
                    continue
                if completion.finished():
                    ended.add(completion.index)
                if len(ended) == len(output.outputs):
                    last = transfer(body.kv_transfer_params, output)
                choice = deltas.choice(completion)
                if choice is not None:
                    yield event({**head, "choices": [choice], **extra, **last})
    if asked.include_usage:
        yield event({**head, "choices": [], "usage": usage.as_dict(), **last})


def _first(body: ChatRequest, output: RequestOutput) -> list[dict[str, Any]]:
    delta = {"role": _role(body), "content": ""}
    return [{"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None} for part in output.outputs]


async def tokens_of_chat(service: Service, request: Request, body: TokenizeRequest) -> list[int]:
    """Token ids of a conversation's prompt."""
    assert body.messages is not None
    same = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    chat_body = chat_request({name: getattr(body, name) for name in same})
    options = chat_body.options(service.config.chat_template, False, service.config.default_chat_template_kwargs)
    prompt: Any = await unless_disconnected(request, service.llm.render_chat(body.messages, options))
    return prompt["prompt_token_ids"]
