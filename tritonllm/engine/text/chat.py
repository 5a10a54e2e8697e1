"""A conversation as a prompt, by the tokenizer's chat template."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonllm.config.prompts import Prompt, check_text, is_empty
from tritonllm.engine.text.tokenizer import render_template

Message = Mapping[str, Any]
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")  # of OpenAI's two interfaces
CONTENT_FORMATS = ("auto", "string")
# arguments themselves
_OPTIONS = frozenset({"chat_template", "add_generation_prompt", "continue_final_message", "tools"})
# what the tokenizer's apply_chat_template and what it calls have other uses for, or set themselves
_TAKEN = frozenset(
    (
        *("self", "tokenizer", "conversation", "conversations", "messages", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt; names and meanings are vLLM's.

    Args:
        chat_template: a Jinja template to use instead of the tokenizer's.
        chat_template_content_format: ``string``, which ``auto`` is, too: templates see text, not parts.
        add_generation_prompt: end the prompt where the assistant's turn begins.
        continue_final_message: leave the last message open, to be continued.
        tools: functions that the template describes to the model, as JSON schemas.
        chat_template_kwargs: more variables of the template, such as Qwen3's ``enable_thinking``; none of the arguments
            above, and nothing that the tokenizer sets, such as ``messages``.
        mm_processor_kwargs: none; there are no images.

    Raises:
        ValueError: a bad value; the message names the argument.
    """

    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other: pass add_generation_prompt=False"
            )
        if self.chat_template_content_format not in CONTENT_FORMATS:
            raise ValueError(
                f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, got "
                f"{self.chat_template_content_format!r}"
            )
        if not is_empty(self.mm_processor_kwargs):
            raise ValueError("mm_processor_kwargs: images, sound and video are not supported, leave it out")
        if self.tools is not None and not (
            isinstance(self.tools, Sequence) and all(isinstance(tool, Mapping) for tool in self.tools)
        ):
            raise ValueError(f"tools must be a list of dicts, got {self.tools!r}")
        if self.chat_template_kwargs is not None and not isinstance(self.chat_template_kwargs, Mapping):
            raise ValueError(f"chat_template_kwargs must be a dict, got {self.chat_template_kwargs!r}")
        for name in self.chat_template_kwargs or ():
            if not isinstance(name, str):
                raise ValueError(f"chat_template_kwargs must have strings as keys, got {name!r}")
            if name in _OPTIONS:
                raise ValueError(f"chat_template_kwargs has {name!r}: give {name} beside it instead")
            if name in _TAKEN:
                raise ValueError(f"chat_template_kwargs has {name!r}, which no template can be given: leave it out")

    def variables(self) -> dict[str, Any]:
        """What the template and its caller are given."""
        return {
            **(self.chat_template_kwargs or {}),
            "chat_template": self.chat_template,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "tools": list(self.tools) if self.tools else None,
        }


def render(
    tokenizer: Any,
    conversation: Sequence[Message],
    options: ChatOptions,
    encode: Callable[[str], list[int]] | None = None,
) -> Prompt:
    """The prompt of one conversation.

    Args:
        encode: what makes tokens of a text in which special tokens stand already; by default the tokenizer.

    Raises:
        ValueError: no tokenizer, no chat template, a malformed conversation, or a template that fails on it.
    """
    if tokenizer is None:
        raise ValueError("chat needs a tokenizer: leave out skip_tokenizer_init, or pass token ids to generate")
    are_messages = isinstance(conversation, Sequence) and all(
        isinstance(m, Mapping) and "role" in m for m in conversation
    )
    if not are_messages or not conversation:
        raise ValueError("messages must be dicts with 'role' and 'content', at least one in a conversation")
    if options.chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("the model's tokenizer has no chat template: pass chat_template, or use generate")
    text = _first_rendered(tokenizer, [_plain(index, one) for index, one in enumerate(conversation)], options)
    check_text("messages", text)
    # the template writes the special tokens itself
    ids = tokenizer.encode(text, add_special_tokens=False) if encode is None else encode(text)
    return {"prompt": text, "prompt_token_ids": ids}


def _first_rendered(tokenizer: Any, messages: list[dict[str, Any]], options: ChatOptions) -> str:
    """The conversation by the template, which may take it only in a plainer form."""
    filled = [_filled(message) for message in messages]
    forms = [messages]
    for form in (filled, _in_turns(filled)):
        if form != forms[-1]:
            forms.append(form)
    errors = []
    for form in forms:
        try:
            return render_template(tokenizer, form, **options.variables())
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _filled(message: dict[str, Any]) -> dict[str, Any]:
    """A copy of a message for templates that join texts and go through a call's arguments: an assistant that calls a
    tool has the empty text as its content, and arguments that are no object become one."""
    filled = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        filled["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    return filled


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments", {}), Mapping):
        return call
    return {**call, "function": {**function, "arguments": {}}}


def _in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for templates that know one system message at the beginning and then turns that alternate: what the
    system says later is the user's text, and texts of one role in a row are one message."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = "system" if message["role"] == "developer" else message["role"]
        if role == "system" and any(turn["role"] != "system" for turn in turns):
            role = "user"
        last = turns[-1] if turns else {}
        alone = role not in ("system", "user", "assistant") or last.get("tool_calls") or message.get("tool_calls")
        if alone or last.get("role") != role:
            turns.append({**message, "role": role})
        else:
            joined = "\n\n".join(text for text in (last["content"], message["content"]) if text)
            turns[-1] = {**last, **message, "role": role, "content": joined}
    return turns


def _plain(index: int, message: Message) -> dict[str, Any]:
    """The message as templates expect it: content is text, and what a tool is called with a dict."""
    plain = dict(message)
    if not isinstance(message["role"], str):
        raise ValueError(f"messages[{index}]['role'] must be a string, got {message['role']!r}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        plain["content"] = "\n".join(_text(f"messages[{index}]", part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"messages[{index}]['content'] must be text or a list of parts, got {type(content).__name__}")
    thought = message.get("reasoning_content") or message.get("reasoning")  # older and newer name
    if thought is not None:
        plain |= {"reasoning_content": thought, "reasoning": thought}
    if message.get("tool_calls"):
        if thought is not None and not message.get("content"):
            plain["thinking"] = thought  # gpt-oss's template
        if not isinstance(message["tool_calls"], list | tuple):
            given = type(message["tool_calls"]).__name__
            raise ValueError(f"messages[{index}]['tool_calls'] must be a list of calls, got {given}")
        plain["tool_calls"] = [_call(f"messages[{index}]", call) for call in message["tool_calls"]]
    return plain


def _text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind not in TEXT_PARTS:
        raise ValueError(f"{where} has a part of type {kind!r}: only text is supported, leave out the others")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValueError(f"{where} has a part of type {kind!r} whose text is {text!r}: it must be a string")
    return text


def _call(where: str, call: Any) -> Any:
    """OpenAI's clients hold the arguments of a call as JSON, templates want them decoded. What a model has written that
    is no JSON stays as it is: its client sends it back."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except RecursionError as error:
        raise ValueError(f"{where} calls a tool with arguments that are nested too deep: {error}") from error
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
