"""The assistant's next turn in a conversation: its prompt, how to sample it, and how to read it."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import SamplingParams, StructuredOutputsParams
from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.serve.api.answering import Service, unless_disconnected
from tritonllm.serve.api.beam_search import search_params
from tritonllm.serve.api.protocol import ChatRequest
from tritonllm.serve.parsing.pieces import AnswerReader, Arguments, FilteredReader, Piece, Reasoning, ToolCallBegin
from tritonllm.serve.parsing.source import SourceReader
from tritonllm.serve.parsing.tools import named, required

Schema = Mapping[str, Any]
_ANYTHING = {"type": "object"}


@dataclass(frozen=True)
class ChatTurn:
    """A chat completion as the engine is to run it, and how its answer is read.

    Args:
        prompt, params: what to run.
        new_reader: makes a reader for one answer.
        new_call_id: makes an id for a call, in the form that the model's template takes.
        ends_with_calls: ``finish_reason`` is ``tool_calls`` if there are any.
        tokenizer: knows the bytes of tokens; ``None`` if there is none.
    """

    prompt: Prompt
    params: SamplingParams | BeamSearchParams
    new_reader: Callable[[], AnswerReader]
    new_call_id: Callable[[], str]
    ends_with_calls: bool
    tokenizer: Any = None


async def prepare(
    service: Service, request: Request, body: ChatRequest, logprobs: int | None = None, *, must_fit: bool = True
) -> ChatTurn:
    """Render the messages of a chat completion, and find out how its answer is to be read.

    Args:
        request: the request, whose client may leave meanwhile.
        must_fit: whether a prompt that is far too long is refused by its beginning.

    Raises:
        APIError: the client has gone.
        ValueError: the body asks for what does not go together, or its messages cannot be rendered.
    """
    config, formats = service.config, service.formats
    functions = body.tool_names()
    form = forced_form(body, functions)
    options = body.options(
        config.chat_template, config.trust_request_chat_template, config.default_chat_template_kwargs
    )
    whole = must_fit and body.truncate_prompt_tokens is None
    rendered = service.llm.render_chat(body.messages, options, must_fit=whole)
    prompt: Any = await unless_disconnected(request, rendered)
    thinks = service.llm.inputs.knows_thoughts and formats.may_think(prompt["prompt"])
    more: dict[str, Any] = {}
    held = form or body.form()
    if held is not None:
        more["structured_outputs"] = held = replace(held, after_thought=held.after_thought or thinks)
        if not held.after_thought and service.llm.inputs.knows_thoughts:  # the template has said not to think
            more["thinking_token_budget"] = None
    if (form is None or thinks) and body.skip_special_tokens is None and formats.needs_special_tokens(bool(functions)):
        more["skip_special_tokens"] = False
    has_form = held is not None and not thinks
    if body.stop:
        may_hold = form is None or thinks
        thought = formats.thought(prompt["prompt"], list(functions), has_form=has_form) if may_hold else None
        more["stop_after_thought"] = _where_stops_count(body.stop_after_thought, thought, formats.reasoning is None)
    params: SamplingParams | BeamSearchParams
    if body.use_beam_search:
        if form is not None:
            raise ValueError("tool_choice: a beam search cannot be held to a call: leave out use_beam_search")
        params = search_params(body, body.new_tokens() or service.llm.max_model_len)
    else:
        params = body.sampling_params(service.llm.inputs.default_params, body.new_tokens(), logprobs, **more)
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt

    def new_reader() -> AnswerReader:
        chosen = body.named_tool()
        if form is not None:
            calls = SourceReader(required) if chosen is None else SourceReader(named, chosen)
            reader: AnswerReader = formats.thinking(prompt["prompt"], calls) if thinks else calls
        else:
            reader = formats.reader(prompt["prompt"], list(functions), has_form=has_form)
        return FilteredReader(reader, _wanted(body))

    ids = _nine_characters if formats.tools == "mistral" else _call_id
    ends_with_calls = not isinstance(body.tool_choice, dict)
    return ChatTurn(prompt, params, new_reader, ids, ends_with_calls, service.llm.inputs.tokenizer)


def _where_stops_count(asked: bool | None, thought: ThoughtFormat | None, by_tokenizer: bool) -> ThoughtFormat | bool:
    """Whether stop strings count behind the thought only, and where that is known, the format of the thought.

    Args:
        asked: whether they shall count behind the thought only; by default they do where thoughts are read.
        thought: the format of the thoughts that are read; ``None`` if none are.
        by_tokenizer: whether the tokenizer may know thoughts although none are read.
    """
    if asked is False or (thought is None and not by_tokenizer):
        return False
    return thought or bool(asked)


def _wanted(body: ChatRequest) -> Callable[[Piece], bool]:
    several = body.parallel_tool_calls is not False

    def keep(piece: Piece) -> bool:
        if isinstance(piece, ToolCallBegin | Arguments):
            return several or piece.index == 0
        return body.include_reasoning or not isinstance(piece, Reasoning)

    return keep


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _nine_characters() -> str:
    """What Mistral's templates insist on."""
    return secrets.token_hex(5)[:9]


def forced_form(body: ChatRequest, functions: Mapping[str, Schema]) -> StructuredOutputsParams | None:
    """The form of an answer that must be a call; ``None`` if it need not be.

    The answer is then the arguments of the named function, or a list of ``{"name", "parameters"}``.

    Raises:
        ValueError: two functions define different schemas under one name.
    """
    if not body.forced:
        return None
    chosen = body.named_tool()
    if chosen is not None:
        schema: Schema = functions[chosen].get("parameters") or _ANYTHING
    else:
        schema = _list_of_calls(functions, 1 if body.parallel_tool_calls is False else None)
    return StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)


def _list_of_calls(functions: Mapping[str, Schema], most: int | None) -> dict[str, Any]:
    definitions: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = []
    for name, function in functions.items():
        parameters = dict(function.get("parameters") or _ANYTHING)
        for key, known in definitions.items():  # references begin at the root, so the definitions must be there
            own_definitions = parameters.pop(key, {})
            if not isinstance(own_definitions, dict):
                raise ValueError(f"tools: {key} in the parameters of {name!r} must be an object")
            for own, schema in own_definitions.items():
                if known.setdefault(own, schema) != schema:
                    raise ValueError(f"tools: two functions have different schemas {key}/{own}: rename one of them")
        call = {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        calls.append(call)
    limits = {"minItems": 1} if most is None else {"minItems": 1, "maxItems": most}
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "items": items, **limits, **{key: known for key, known in definitions.items() if known}}
