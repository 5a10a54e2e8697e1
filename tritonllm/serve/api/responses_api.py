"""``POST /v1/responses`` of OpenAI. Stateless: nothing is kept, each request brings its conversation."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.outputs import CompletionOutput
from tritonllm.serve.api.answering import Outputs, Service, answer_id, respond, stream
from tritonllm.serve.api.blocks import Begin, Block, Blocks, Change, More, follow
from tritonllm.serve.api.errors import APIError
from tritonllm.serve.api.protocol import Body
from tritonllm.serve.api.replies import Usage, named_event, now
from tritonllm.serve.api.responses_protocol import ResponsesRequest
from tritonllm.serve.api.turn import ChatTurn, prepare


async def respond_to(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """Answer ``POST /v1/responses``.

    Raises:
        APIError, ValueError, QueueFullError, EngineDeadError: see :mod:`tritonllm.serve.api.errors`.
    """
    model = service.accept(request, body)
    chat = body.chat()
    turn = await prepare(service, request, chat)
    name = answer_id("resp_", request, body.request_id)
    outputs = service.run(name, [turn.prompt], turn.params, body.priority)
    head = _head(name, model, body, turn)
    if body.stream:
        events = _Events(head)
        return await stream(request, _stream(events, turn, outputs), events.error, b"")
    return await respond(request, _whole(head, turn, outputs))


def _head(name: str, model: str, body: ResponsesRequest, turn: ChatTurn) -> dict[str, Any]:
    params = turn.params
    assert isinstance(params, SamplingParams)  # this API knows no beam search
    return {
        "id": name,
        "object": "response",
        "created_at": now(),
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": _given(body.reasoning),
        "store": False,
        "temperature": params.temperature,
        "text": _given(body.text) or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _given(options: Body | None) -> dict[str, Any] | None:
    """The options that were given, as they came."""
    return None if options is None else options.model_dump(exclude_unset=True)


def _item(head: dict[str, Any], index: int, block: Block, status: str) -> dict[str, Any]:
    """An entry of ``output``."""
    own = f"{head['id'].removeprefix('resp_')}_{index}"
    if block.kind == "text":
        content = [_part(block)] if status != "in_progress" else []
        return {"type": "message", "id": f"msg_{own}", "role": "assistant", "status": status, "content": content}
    if block.kind == "reasoning":
        content = [_part(block)] if status != "in_progress" else []
        return {"type": "reasoning", "id": f"rs_{own}", "summary": [], "content": content, "status": status}
    return {
        "type": "function_call",
        "id": f"fc_{own}",
        "call_id": block.call_id,
        "name": block.name,
        "arguments": block.text,
        "status": status,
    }


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _ended(head: dict[str, Any], blocks: Blocks, last: CompletionOutput, usage: Usage) -> dict[str, Any]:
    """The response as it is at its end."""
    counts = usage.as_dict()
    cut = last.finish_reason == "length"
    output = [_item(head, index, block, "completed") for index, block in enumerate(blocks.all)]
    if cut and output:
        output[-1]["status"] = "incomplete"
    return {
        **head,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},  # which tokens those were is not counted
            "total_tokens": counts["total_tokens"],
        },
    }


async def _whole(head: dict[str, Any], turn: ChatTurn, outputs: Outputs) -> dict[str, Any]:
    usage, blocks, last = Usage(), Blocks(turn.new_call_id), None
    async for _, completion in follow(turn, outputs, usage, blocks):
        last = completion
    assert last is not None
    return _ended(head, blocks, last, usage)


class _Events:
    """Makes the events of a stream, which are numbered."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head
        self._count = 0

    def make(self, kind: str, **fields: Any) -> bytes:
        number, self._count = self._count, self._count + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def error(self, error: APIError) -> bytes:
        return self.make("error", code=error.code, message=error.message, param=error.param)

    def of(self, change: Change) -> list[bytes]:
        """What one change of the blocks is."""
        index, block = change.index, change.block
        item = _item(self.head, index, block, "in_progress" if isinstance(change, Begin) else "completed")
        where = {"item_id": item["id"], "output_index": index}
        stem = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]
        part = {} if block.kind == "call" else {"content_index": 0}
        scores: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if isinstance(change, Begin):
            events = [self.make("response.output_item.added", output_index=index, item=item)]
            if part:
                events.append(self.make("response.content_part.added", **where, **part, part=_part(block)))
            return events
        if isinstance(change, More):
            return [self.make(f"response.{stem}.delta", **where, **part, **scores, delta=change.text)]
        text = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
        events = [self.make(f"response.{stem}.done", **where, **part, **scores, **text)]
        if part:
            events.append(self.make("response.content_part.done", **where, **part, part=_part(block)))
        return [*events, self.make("response.output_item.done", output_index=index, item=item)]


async def _stream(events: _Events, turn: ChatTurn, outputs: Outputs) -> AsyncGenerator[bytes, None]:
    usage, blocks, begun = Usage(), Blocks(turn.new_call_id), False
    async for changes, completion in follow(turn, outputs, usage, blocks):
        if not begun:
            begun = True
            yield events.make("response.created", response=events.head)
            yield events.make("response.in_progress", response=events.head)
        for change in changes:
            for one in events.of(change):
                yield one
        if completion.finished():
            response = _ended(events.head, blocks, completion, usage)
            yield events.make(f"response.{response['status']}", response=response)
