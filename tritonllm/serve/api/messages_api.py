"""Anthropic's ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from tritonllm.engine.data.outputs import CompletionOutput
from tritonllm.serve.api.answering import Outputs, Service, answer_id, respond, stream
from tritonllm.serve.api.blocks import Begin, Block, Blocks, Change, End, More, follow
from tritonllm.serve.api.errors import APIError, anthropic_error
from tritonllm.serve.api.messages_protocol import CountRequest, MessagesRequest
from tritonllm.serve.api.protocol import chat_request
from tritonllm.serve.api.replies import Usage, named_event
from tritonllm.serve.api.turn import ChatTurn, prepare
from tritonllm.serve.parsing.objects import Objects


async def message(service: Service, request: Request, body: MessagesRequest) -> Response:
    """Answer ``POST /v1/messages``.

    Raises:
        APIError, ValueError, QueueFullError, EngineDeadError: see :mod:`tritonllm.serve.api.errors`.
    """
    model = service.accept(request, body)
    turn = await prepare(service, request, body.chat(service.llm.inputs.knows_thoughts))
    new_reader = turn.new_reader
    turn = replace(turn, new_reader=lambda: Objects(new_reader()))
    name = answer_id("msg_", request, None)
    outputs = service.run(name, [turn.prompt], turn.params, 0)
    head = {"id": name, "type": "message", "role": "assistant", "model": model}
    if body.stream:
        return await stream(request, _stream(head, turn, outputs), _error_event, b"")
    return await respond(request, _whole(head, turn, outputs))


async def count_tokens(service: Service, request: Request, body: CountRequest) -> Response:
    """Answer ``POST /v1/messages/count_tokens``: the prompt's tokens, whether it would fit or not."""
    service.accept(request, body)
    turn: Any = await prepare(service, request, chat_request(body.fields()), must_fit=False)
    return JSONResponse({"input_tokens": len(turn.prompt["prompt_token_ids"])})


def _usage(usage: Usage) -> dict[str, Any]:
    counts = usage.as_dict()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts["completion_tokens"],
    }


def _ending(completion: CompletionOutput, blocks: Blocks) -> dict[str, Any]:
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if blocks.has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _content(block: Block) -> dict[str, Any]:
    """An entry of ``content``."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    arguments = msgspec.Raw((block.text or "{}").encode())  # they are an object, as text
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


async def _whole(head: dict[str, Any], turn: ChatTurn, outputs: Outputs) -> dict[str, Any]:
    usage, blocks, last = Usage(), Blocks(turn.new_call_id), None
    async for _, completion in follow(turn, outputs, usage, blocks):
        last = completion
    assert last is not None
    content = [_content(block) for block in blocks.all]
    return {**head, "content": content, **_ending(last, blocks), "usage": _usage(usage)}


async def _stream(head: dict[str, Any], turn: ChatTurn, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    usage, blocks, begun = Usage(), Blocks(turn.new_call_id), False
    async for changes, completion in follow(turn, outputs, usage, blocks):
        if not begun:
            begun = True
            start = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
            yield _event("message_start", message=start)
        for change in changes:
            for one in _events(change):
                yield one
        if completion.finished():
            yield _event("message_delta", delta=_ending(completion, blocks), usage=_usage(usage))
            yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _error_event(error: APIError) -> bytes:
    return named_event("error", anthropic_error(error))


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _events(change: Change) -> list[bytes]:
    index, block = change.index, change.block
    if isinstance(change, Begin):
        return [_event("content_block_start", index=index, content_block=_content(block))]
    if isinstance(change, More):
        kind, name = _DELTAS[block.kind]
        return [_event("content_block_delta", index=index, delta={"type": kind, name: change.text})]
    assert isinstance(change, End)
    return [_event("content_block_stop", index=index)]
