"""The bodies of Anthropic's ``POST /v1/messages``, and the conversation that they hold."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from tritonllm.serve.api.fields import PROMPT
from tritonllm.serve.api.protocol import Body, ChatRequest, Objects, Strings, ToolsBody, Word, chat_request

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SAME = ("max_tokens", "stream", "temperature", "top_p", "top_k", "stop_after_thought")  # in chat completions
THINKING = ("enabled", "adaptive", "disabled")


class Thinking(Body):
    """Whether the model thinks, and how long."""

    path = "thinking."

    type: str
    budget_tokens: Word | None = None


class OutputConfig(Body):
    """How hard the model tries, and what its answer looks like."""

    path = "output_config."

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(ToolsBody):
    """``POST /v1/messages/count_tokens``."""

    refused = PROMPT
    tool_kind = "custom"

    model: str
    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def thinks(self) -> bool:
        """Thoughts were asked for.

        Raises:
            ValueError: the field has not Anthropic's form.
        """
        kind = "disabled" if self.thinking is None else self.thinking.type
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
            fields["tools"] = [_tool(index, tool) for index, tool in self.callable_tools()]
        if self.tool_choice is not None:
            self.check_choice(self.tool_choice)
            fields |= _choice(self.tool_choice)
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinks, "thinking": self.thinks}
        if self.output_config is not None and self.output_config.effort:
            fields["reasoning_effort"] = self.output_config.effort
        return fields


class MessagesRequest(CountRequest):
    """The body of ``POST /v1/messages``."""

    refused = Body.refused

    max_tokens: Word
    stream: bool | None = False
    stop_sequences: Strings | None = None
    stop_after_thought: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def chat(self, budget: bool) -> ChatRequest:
        """This request as a chat completion.

        Args:
            budget: whether a thought's length can be limited.

        Raises:
            ValueError: what there is not here.
        """
        fields = self.fields()
        for name in (*SAME, "structured_outputs"):
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        fields["include_reasoning"] = self.thinks
        form = None if self.output_config is None else self.output_config.format
        if form is not None:
            fields["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
        most = None if self.thinking is None else self.thinking.budget_tokens
        if most is not None and budget and self.thinks and form is None and self.structured_outputs is None:
            fields["thinking_token_budget"] = most
        return chat_request(fields)


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise ValueError(f"tools[{index}] must have name and input_schema")
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
    """Messages as OpenAI has them: the system's is one of them, and results of tools are of their own. Several of one
    role in a row are one turn.

    Raises:
        ValueError: a block of a kind that there is not here; the message names it.
    """
    turns: list[tuple[str, str, list[Mapping[str, Any]]]] = []  # where it begins, its role, its blocks
    if system:
        turns.append(("system", "system", _blocks("system", system)))
    for index, message in enumerate(given):
        where, role = f"messages[{index}]", message.get("role")
        if role not in ("user", "assistant", "system"):
            raise ValueError(f"{where}: role must be user or assistant, got {role!r}")
        blocks = _blocks(f"{where}: content", message.get("content"))
        if turns and turns[-1][1] == role:
            turns[-1][2].extend(blocks)
        else:
            turns.append((where, role, blocks))
    messages: list[dict[str, Any]] = []
    for where, role, blocks in turns:
        messages += _assistant(where, blocks) if role == "assistant" else _user(where, role, blocks)
    return messages


def _blocks(where: str, content: Any) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise ValueError(f"{where} must be text or a list of blocks, got {content!r}")
    return list(content)


def _text(where: str, content: Any) -> str:
    texts = []
    for block in () if content is None else _blocks(where, content):
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
    texts, thoughts = [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(block.get("thinking"))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            texts.append(block)
    if texts:
        message["content"] = _text(where, texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thought for thought in thoughts if isinstance(thought, str))
    return [message]
