"""The bodies of Anthropic's ``POST /v1/messages``, and the conversation that they hold."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from tritonllm.serve.protocol import Body, ChatRequest, Word, chat_request

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = ("enabled", "adaptive", "disabled")


class CountRequest(Body):
    """``POST /v1/messages/count_tokens``."""

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    # Of these any value will do: they steer Anthropic's own service, or say how to cache.
    cache_control: Any = None
    container: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None

    @property
    def thinks(self) -> bool:
        """Thoughts were asked for.

        Raises:
            ValueError: the field has not Anthropic's form.
        """
        kind = (self.thinking or {"type": "disabled"}).get("type")
        if kind not in THINKING:
            raise ValueError(f"thinking.type must be one of {', '.join(THINKING)}, got {kind!r}")
        return kind != "disabled"

    def fields(self) -> dict[str, Any]:
        """The conversation in the fields of a chat completion.

        Raises:
            ValueError: a block or a tool that there is not here.
        """
        messages = messages_of(self.system, self.messages)
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        last = messages[-1] if messages else {}  # an assistant's text is the beginning of the answer
        if last.get("role") == "assistant" and last["content"] and not last.get("tool_calls"):
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            fields["tools"] = [_tool(index, tool) for index, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields |= _choice(self.tool_choice)
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinks, "thinking": self.thinks}
        if effort := (self.output_config or {}).get("effort"):
            fields["reasoning_effort"] = effort
        return fields


class MessagesRequest(CountRequest):
    """``POST /v1/messages``."""

    max_tokens: Word
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def chat(self, budget: bool) -> ChatRequest:
        """The same as a chat completion.

        Args:
            budget: a thought's length can be limited.

        Raises:
            ValueError: what there is not here.
        """
        fields = self.fields()
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k", "structured_outputs"):
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        fields["include_reasoning"] = self.thinks
        form = (self.output_config or {}).get("format")
        if form is not None:
            if not isinstance(form, Mapping):
                raise ValueError(f"output_config.format must be an object, got {form!r}")
            fields["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
        most = (self.thinking or {}).get("budget_tokens")
        if most is not None and budget and self.thinks and form is None and self.structured_outputs is None:
            fields["thinking_token_budget"] = most
        return chat_request(fields)


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        raise ValueError(f"tools[{index}] must have name and input_schema: there are no tools of Anthropic's own here")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        chosen = CHOICES[kind]
    else:
        raise ValueError(f"tool_choice.type must be auto, any, tool or none, got {kind!r}")
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}


def messages_of(
    system: str | Sequence[Mapping[str, Any]] | None, given: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages as OpenAI has them: the system's is one of them, and results of tools are of their own.

    Raises:
        ValueError: a block of a kind that there is not here; the message names it.
    """
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": _text("system", system)})
    for index, message in enumerate(given):
        where, role, content = f"messages[{index}]", message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ValueError(f"{where}: role must be user or assistant, got {role!r}")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
            raise ValueError(f"{where}: content must be text or a list of blocks")
        else:
            messages += _assistant(where, content) if role == "assistant" else _user(where, role, content)
    return messages


def _text(where: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise ValueError(f"{where} must be text or a list of blocks, got {content!r}")
    texts = []
    for block in content:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ValueError(f"{where} has a block of type {block.get('type')!r}: only text is supported, leave it out")
        texts.append(block["text"])
    return "\n".join(texts)


def _user(where: str, role: str, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    results, texts = [], []
    for block in blocks:
        if block.get("type") == "tool_result":
            text = _text(f"{where}: tool_result", block.get("content"))
            content = f"Error: {text}" if block.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            texts.append(block)
    return [*results, {"role": role, "content": _text(where, texts)}] if texts else results


def _assistant(where: str, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts = []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            message["reasoning_content"] = block.get("thinking")
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            texts.append(block)
    if texts:
        message["content"] = _text(where, texts)
    return [message]
