"""The assistant's next turn in a conversation: its prompt, how to sample it, and how to read it."""

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from fastapi import Request

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import MAX_SCHEMA_CHARS, SamplingParams, StructuredOutputsParams, size_of
from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.engine.grammar.schema_document import has_references, moved
from tritonllm.serve.api.answering import Service, unless_disconnected
from tritonllm.serve.api.beam_search import search_params
from tritonllm.serve.api.protocol import ChatRequest
from tritonllm.serve.parsing.pieces import (
    AnswerReader,
    Arguments,
    FilteredReader,
    Only,
    Piece,
    Reasoning,
    ToolCallBegin,
)
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
        new_call_id: makes an id for a call of a function, in the form that the model's template takes.
        ends_with_calls: ``finish_reason`` is ``tool_calls`` if there are any.
        tokenizer: knows the bytes of tokens; ``None`` if there is none.
    """

    prompt: Prompt
    params: SamplingParams | BeamSearchParams
    new_reader: Callable[[], AnswerReader]
    new_call_id: Callable[[str], str]
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
    form = await asyncio.to_thread(forced_form, body, functions) if body.forced else None  # schemas may be long
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
        thought = formats.thought(prompt["prompt"], functions, has_form=has_form) if may_hold else None
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
            reader = formats.reader(prompt["prompt"], functions, has_form=has_form)
        if body.allowed_tools() is not None:
            reader = Only(reader, functions)
        return FilteredReader(reader, _wanted(body))

    ids = _new_call_ids(formats.tools, body)
    ends_with_calls = body.named_tool() is None
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


def _new_call_ids(parser: str | None, body: ChatRequest) -> Callable[[str], str]:
    """What makes ids: of nine characters, on which Mistral's templates insist, or with the function and the number of
    the call in the conversation, which Kimi K2's show to the model."""
    if parser == "mistral":
        return lambda name: secrets.token_hex(5)[:9]
    if parser == "kimi_k2":
        calls = [message.get("tool_calls") for message in body.messages]
        numbers = count(sum(len(some) for some in calls if isinstance(some, list)))
        return lambda name: f"functions.{name}:{next(numbers)}"
    return lambda name: f"call_{secrets.token_hex(12)}"


def forced_form(body: ChatRequest, functions: Mapping[str, Schema]) -> StructuredOutputsParams | None:
    """The form of an answer that must be a call; ``None`` if it need not be.

    The answer is then the arguments of the named function, or a list of ``{"name", "parameters"}``.

    Raises:
        ValueError: the parameters of a function refer to what is not in them, are nested too deep or too long.
    """
    if not body.forced:
        return None
    chosen = body.named_tool()
    given = [function.get("parameters") for name, function in functions.items() if chosen in (None, name)]
    if size_of(given, MAX_SCHEMA_CHARS) > MAX_SCHEMA_CHARS:
        raise ValueError(f"tools: their parameters have more than {MAX_SCHEMA_CHARS} characters: make them smaller")
    if chosen is not None:
        schema: Schema = _parameters(chosen, functions[chosen], "")
    else:
        schema = _list_of_calls(functions, 1 if body.parallel_tool_calls is False else None)
    return StructuredOutputsParams(json=json.dumps(schema), disable_any_whitespace=True)


def _parameters(name: str, function: Schema, place: str) -> dict[str, Any]:
    """What a function takes, as a schema that can stand at this place of another.

    Raises:
        ValueError: see :func:`forced_form`.
    """
    try:
        return moved(function.get("parameters") or _ANYTHING, place)
    except LookupError as error:
        raise ValueError(
            f"tools: '$ref' in the parameters of {name!r} must name a schema that is in them, got {error.args[0]!r}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"tools: the parameters of {name!r} are nested too deep") from error


def _list_of_calls(functions: Mapping[str, Schema], most: int | None) -> dict[str, Any]:
    """Parameters with references are a definition of their own, in which these stay: others may have equal names."""
    definitions = dict[str, Any]()
    calls = []
    for number, (name, function) in enumerate(functions.items()):
        parameters = _parameters(name, function, f"/$defs/{number}")
        if has_references(parameters):
            definitions[str(number)], parameters = parameters, {"$ref": f"#/$defs/{number}"}
        call = {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        calls.append(call)
    limits = {"minItems": 1} if most is None else {"minItems": 1, "maxItems": most}
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "items": items, **limits, "$defs": definitions}
