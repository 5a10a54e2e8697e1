"""The body of ``POST /v1/responses``, and the conversation that it holds."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tritonllm.serve.api.fields import STATELESS
from tritonllm.serve.api.protocol import Body, ChatRequest, Objects, Strings, TokenCount, ToolsBody, Word, chat_request

SAME = (  # in chat completions
    *("temperature", "top_p", "top_k", "seed", "stop", "repetition_penalty", "ignore_eos", "parallel_tool_calls"),
    *(
        "stop_after_thought",
        "structured_outputs",
        "chat_template_kwargs",
        "priority",
        "cache_salt",
        "request_id",
        "stream",
        "model",
    ),
)


class ReasoningOptions(Body):
    """How hard the model thinks."""

    path = "reasoning."

    effort: str | None = None


class TextOptions(Body):
    """What the answer looks like."""

    path = "text."

    format: dict[str, Any] | None = None


class ResponsesRequest(ToolsBody):
    """OpenAI's fields, and some of vLLM's."""

    input: str | Objects
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = False
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_after_thought: bool | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Word = 0
    cache_salt: str | None = Field(default=None, min_length=1)
    request_id: str | None = Field(default=None, min_length=1, max_length=128)

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if not self.input:
            raise ValueError("input is empty: it needs at least one message")
        return self

    def chat(self) -> ChatRequest:
        """This request as a chat completion.

        Raises:
            ValueError: an item, a tool or a format that there is not here.
        """
        fields = {name: getattr(self, name) for name in SAME if getattr(self, name) is not None}
        fields["messages"] = messages_of(self.instructions, self.input)
        if self.max_output_tokens is not None:
            fields["max_tokens"] = self.max_output_tokens
        if self.tools:
            fields["tools"] = [_tool(tool) for _, tool in self.callable_tools()]
        if self.tool_choice is not None:
            self.check_choice(self.tool_choice)
            fields["tool_choice"] = _choice(self.tool_choice)
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _form(self.text.format)
        return chat_request(fields)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise ValueError(
            f'tool_choice must be none, auto, required or {{"type": "function", "name": ...}}, got {choice!r}'
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _form(form: Mapping[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def messages_of(instructions: str | None, given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages: a thought and calls go with the assistant's message that they belong to.

    Raises:
        ValueError: an item of a kind that there is not here; the message names it.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            _add_message(messages, index, item)
        elif kind == "reasoning":
            _assistant(messages)["reasoning_content"] = _thought(index, item)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            more = f": {STATELESS}" if kind == "item_reference" else ""
            raise ValueError(f"input[{index}] has type {kind!r}, which is not supported{more}")
    return messages


def _thought(index: int, item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise ValueError(f"input[{index}]: the content of a reasoning item must be a list of parts, got {parts!r}")
    return "\n".join(str(part.get("text", "")) for part in parts)


def _add_message(messages: list[dict[str, Any]], index: int, item: Mapping[str, Any]) -> None:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str):
        raise ValueError(f"input[{index}] needs a role")
    if role == "developer":  # the newer name, which few templates know
        role = "system"
    if role == "assistant":
        _assistant(messages)["content"] = content
    elif (
        role == "system"
        and messages
        and messages[-1]["role"] == "system"
        and _are_text(messages[-1]["content"], content)
    ):
        messages[-1]["content"] += f"\n\n{content}"
    else:
        messages.append({"role": role, "content": content})


def _are_text(*contents: Any) -> bool:
    return all(isinstance(content, str) for content in contents)


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being put together."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]
