"""The bodies of requests: OpenAI's fields, and vLLM's beside them. For others see :mod:`tritonllm.serve.api.fields`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType, NoneType
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from tritonllm.config.sampling_params import (
    ALL,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    OF_MODEL,
    OWN_FIELDS,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tritonllm.config.vllm_arguments import STRUCTURE_DEFAULTS
from tritonllm.engine.text.chat import ChatOptions
from tritonllm.serve.api.fields import GENERATION, PROMPT, TOOLS, Neutral, asks_for_nothing

MAX_N = 128  # as at OpenAI
MAX_PROMPTS = 2048  # of one request
MAX_MESSAGES = 8192
MAX_PARTS = 16384  # of all messages of a request together
MAX_TOOLS = 1024
MAX_IDS = 1 << 18  # tokens to detokenize: the tokenizer lets nobody else run for 0.1 s
MAX_FIELDS = 256  # of a body, and variables of a template
# Entries that a field may have, under its name in any body. They are counted before anything else is done.
MOST_ENTRIES = {
    "stop": MAX_STOPS,
    "stop_sequences": MAX_STOPS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "bad_words": MAX_BAD_WORDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "messages": MAX_MESSAGES,
    "system": MAX_PARTS,
    "tools": MAX_TOOLS,
    "tokens": MAX_IDS,
    "chat_template_kwargs": MAX_FIELDS,
    "metadata": MAX_FIELDS,
    **dict.fromkeys(("text_1", "text_2", "data_1", "data_2", "queries", "documents"), MAX_PROMPTS),
}
PROMPTS = ("prompt", "input")  # the tokens of one, several prompts, or messages


def _in_one_form(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a value that may have several forms, with one message that names all of them: of a union, pydantic says
    what is wrong with its first member only."""
    try:
        return check(value)
    except ValidationError as error:
        raise ValueError("must be a text, token ids, or a list of texts or of lists of token ids") from error


def check_counts(body: Mapping[str, Any]) -> None:
    """Refuse what has too many entries, before any of them is looked at.

    Raises:
        ValueError: the body, or one of its fields.
    """
    if len(body) > MAX_FIELDS:
        raise ValueError(f"the body has {len(body)} fields, more than {MAX_FIELDS}: leave some out")
    for name, given in body.items():
        most = _most(name, given) if isinstance(given, list | dict) else None
        if most is not None and len(given) > most:
            raise ValueError(f"{name} has {len(given)} entries, more than {most}: leave some out")


def _most(name: str, given: list[Any] | dict[str, Any]) -> int | None:
    """Entries that a field may have; ``None``: as many as a body holds."""
    if name not in PROMPTS:
        return MOST_ENTRIES.get(name)
    first = next(iter(given), None)
    if isinstance(first, int):  # one prompt's tokens, which the model's length limits
        return None
    return MAX_MESSAGES if isinstance(first, dict) else MAX_PROMPTS


# Of many wrong entries the first is told, and no others are looked at.
Strings = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Prompts = Annotated[str | Strings | Ids | Annotated[list[Ids], Field(fail_fast=True)], WrapValidator(_in_one_form)]
Word = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what the message to the engine holds
TokenCount = Annotated[int, Field(ge=1, lt=2**63)]


class Body(BaseModel):
    """A number is not taken for a string, nor a string for a number.

    Attributes:
        path: the path in front of the names of its fields, if it is a field itself.
        refused: fields that it lacks and that would change the answer.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    path: ClassVar[str] = ""
    refused: ClassVar[Neutral] = MappingProxyType({**PROMPT, **GENERATION})

    @classmethod
    def _null_is_default(cls, name: str) -> bool:
        """Clients send ``null`` for what they do not set; where that is no value of the field, it means the default."""
        field = cls.model_fields.get(name)
        return field is not None and not field.is_required() and NoneType not in get_args(field.annotation)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_neutral(cls, data: Any) -> Any:
        """Drop the fields that ask for nothing.

        Raises:
            ValueError: one asks for what is not here, or has too many entries.
        """
        if not isinstance(data, dict):
            return data
        check_counts(data)
        return {
            name: value
            for name, value in data.items()
            if not (
                value is None and cls._null_is_default(name)
                if name in cls.model_fields
                else asks_for_nothing(f"{cls.path}{name}", value, cls.refused)
            )
        }

    def ignored(self) -> Iterator[str]:
        """The fields that change nothing, with their paths."""
        for name in self.model_extra or ():
            yield f"{self.path}{name}"
        for name in self.model_fields_set & type(self).model_fields.keys():
            if isinstance(value := getattr(self, name), Body):
                yield from value.ignored()


def _structured(given: dict[str, Any]) -> StructuredOutputsParams:
    neutral = {name for name, _ in STRUCTURE_DEFAULTS}
    known = [field.name for field in fields(StructuredOutputsParams) if field.name not in neutral]
    if unknown := sorted(given.keys() - known - neutral):
        raise ValueError(f"structured_outputs must have some of {', '.join(known)}, got {unknown[0]!r}")
    try:
        return StructuredOutputsParams(**given)
    except ValueError as error:
        raise ValueError(f"structured_outputs: {error}") from error


ALLOWED = "allowed_tools"  # a type of tool_choice


class ToolsBody(Body):
    """A body with tools, of which some may be of kinds that there are not here: these are left out.

    Attributes:
        tool_kind: the type of the tools that can be called; those without a type are of it.
    """

    tool_kind: ClassVar[str] = "function"

    tools: Objects | None = None

    def callable_tools(self) -> list[tuple[int, dict[str, Any]]]:
        """The tools that can be called, with their places in the list.

        Raises:
            ValueError: a tool has a type that is no text.
        """
        return [(index, tool) for index, tool, kind in self._kinds() if kind == self.tool_kind]

    def ignored(self) -> Iterator[str]:
        yield from super().ignored()
        for _, _, kind in self._kinds():
            if kind != self.tool_kind:
                yield f"{TOOLS}{kind}"

    def check_choice(self, choice: Any) -> None:
        """Check that a choice names no tool that is left out.

        Raises:
            ValueError: the tool that must be called is one of those that are left out.
        """
        chosen = {*_names_chosen(choice)}
        for _, tool, kind in self._kinds():
            found = [name for name in _names_of(tool) if name in chosen] if kind != self.tool_kind else []
            if found:
                raise ValueError(f"tool_choice names {found[0]!r}, a tool of type {kind!r}: there are none here")

    def _kinds(self) -> Iterator[tuple[int, dict[str, Any], str]]:
        for index, tool in enumerate(self.tools or ()):
            kind = tool.get("type", self.tool_kind)
            if not isinstance(kind, str):
                raise ValueError(f"tools[{index}].type must be text, got {kind!r}")
            yield index, tool, kind


def _function(tool: Any) -> Mapping[str, Any]:
    """What a tool, or a choice of one, says of its function."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _names_chosen(choice: Any) -> Iterator[str]:
    """By which the tools of a choice may be known."""
    if not isinstance(choice, Mapping):
        return
    if choice.get("type") != ALLOWED:
        yield from _names_of(choice)
        return
    given = choice.get(ALLOWED, choice)  # the Responses API has it in the choice itself
    tools = given.get("tools") if isinstance(given, Mapping) else None
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, Mapping):
            yield from _names_of(tool)


def _names_of(tool: Mapping[str, Any]) -> list[str]:
    """The names by which a tool, or a choice of one, may be known: its name, in any place where an API has it, and its
    type."""
    kind = tool.get("type")
    within = tool.get(kind) if isinstance(kind, str) else None
    names = (tool.get("name"), within.get("name") if isinstance(within, dict) else None, kind)
    return [name for name in names if isinstance(name, str)]


class StreamOptions(Body):
    path = "stream_options."

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(Body):
    """What both kinds of completion have; ``None`` leaves a field to the model's default."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Word | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_after_thought: bool | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Strings | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(default=None, ge=ALL)
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    repetition_detection: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = None
    return_token_ids: bool | None = None
    priority: Word = 0
    cache_salt: str | None = Field(default=None, min_length=1)
    request_id: str | None = Field(default=None, min_length=1, max_length=128)
    kv_transfer_params: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot be streamed: leave out stream")
        if self.stream and self.use_beam_search:
            raise ValueError("use_beam_search cannot be streamed, since its end decides: leave out stream")
        if self.kv_transfer_params is not None and self.use_beam_search:
            raise ValueError("kv_transfer_params and use_beam_search do not go together: leave one out")
        if not self.use_beam_search and self.length_penalty not in (None, 1):
            raise ValueError("length_penalty compares the answers of a beam search: add use_beam_search=true")
        return self

    def sampling_params(
        self, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None, **more: Any
    ) -> SamplingParams:
        """The sampling parameters that the body asks for, over the model's defaults.

        Args:
            max_tokens: ``None`` for as many as the model's length leaves.

        Raises:
            ValueError: a value outside its range.
        """
        inherited = {name: getattr(defaults, name) for name in OF_MODEL}
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        form = {"structured_outputs": self.form(), "repetition_detection": self._repetition()}
        if self.kv_transfer_params is not None:
            more["extra_args"] = {"kv_transfer_params": self.kv_transfer_params}
        values = {
            **inherited,
            **given,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "output_kind": kind,
            **form,
            **more,
        }
        return SamplingParams.from_optional(**values)

    def _repetition(self) -> RepetitionDetectionParams | None:
        if self.repetition_detection is None:
            return None
        known = [field.name for field in fields(RepetitionDetectionParams)]
        if unknown := sorted(self.repetition_detection.keys() - known):
            raise ValueError(f"repetition_detection must have some of {', '.join(known)}, got {unknown[0]!r}")
        try:
            return RepetitionDetectionParams(**self.repetition_detection)
        except ValueError as error:
            raise ValueError(f"repetition_detection: {error}") from error

    def form(self) -> StructuredOutputsParams | None:
        """What the output must look like, by OpenAI's field, then without free whitespace, or by vLLM's.

        Raises:
            ValueError: an unknown kind, or both fields.
        """
        wanted = self.response_format or {"type": "text"}
        kind = wanted.get("type")
        if kind == "text":
            return None if self.structured_outputs is None else _structured(self.structured_outputs)
        if self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs both give the answer's form: leave one out")
        if kind == "json_object":
            return StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
        schema = wanted.get("json_schema")
        if kind != "json_schema" or not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
            raise ValueError(
                'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
                f'"json_schema": {{"name": ..., "schema": {{...}}}}}}, got {wanted!r}'
            )
        return StructuredOutputsParams(json=schema["schema"], disable_any_whitespace=True)


_MADE = {"max_tokens", "structured_outputs", "repetition_detection"}  # that a body has in another form
SAMPLING_FIELDS = tuple(f.name for f in OWN_FIELDS if f.name in SamplingBody.model_fields and f.name not in _MADE)


class CompletionRequest(SamplingBody):
    """The body of ``POST /v1/completions``."""

    prompt: Prompts
    max_tokens: Word | None = 16
    logprobs: int | None = Field(default=None, ge=ALL)
    echo: bool | None = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if not self.prompt:
            raise ValueError("prompt is empty: it needs at least one token")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo=true, which answers with the prompt alone")
        if self.max_tokens == 0 and self.use_beam_search:
            raise ValueError("max_tokens must be at least 1 with use_beam_search, got 0")
        if self.echo and self.logprobs is not None and self.stream:
            raise ValueError("echo with logprobs cannot be streamed: leave out stream")
        return self

    def prompts(self) -> Sequence[str | list[int]]:
        """One or several, each text or token ids."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class GenerateRequest(CompletionRequest):
    """The body of ``POST /generate``: one prompt, with which the answer's texts begin. What these cannot show is an
    error."""

    echo: Literal[True] = True
    stream_options: None = None
    logprobs: None = None
    prompt_logprobs: None = None
    return_token_ids: Literal[False] | None = None
    kv_transfer_params: None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if len(self.prompts()) > 1:
            raise ValueError("prompt must be one text, or its token ids: /v1/completions takes several")
        return self


class ChatRequest(SamplingBody, ToolsBody):
    """``POST /v1/chat/completions``."""

    messages: Objects = Field(min_length=1)
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=ALL)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        contents = (message.get("content") for message in self.messages)
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if parts > MAX_PARTS:
            raise ValueError(f"messages have {parts} parts of contents, more than {MAX_PARTS}: join some")
        self.tool_names()
        if self.forced and self.form() is not None:
            raise ValueError("tool_choice and response_format both say what the answer looks like: give one of them")
        return self

    def tool_names(self) -> dict[str, Mapping[str, Any]]:
        """The functions that may be called, by name; none with ``tool_choice="none"``.

        Raises:
            ValueError: a tool that is no function, or a choice that is not among them.
        """
        functions: dict[str, Mapping[str, Any]] = {}
        for index, tool in self.callable_tools():
            function = tool.get("function")
            if not isinstance(function, dict):
                raise ValueError(
                    f'tools[{index}] must be {{"type": "function", "function": {{"name": ..., "parameters": {{...}}}}}}'
                )
            if not isinstance(function.get("name"), str) or not function["name"]:
                raise ValueError(f"tools[{index}]: function.name must be a string that is not empty")
            if not isinstance(function.get("parameters"), dict | None):
                given = type(function["parameters"]).__name__
                raise ValueError(f"tools[{index}]: function.parameters must be a JSON schema, an object, got {given}")
            functions[function["name"]] = function
        self.check_choice(self.tool_choice)
        if self.forced and not functions:
            raise ValueError("tool_choice asks for a call, but there are no tools: add tools, or leave it out")
        chosen, allowed = self.named_tool(), self.allowed_tools()
        for name in [*([] if chosen is None else [chosen]), *(allowed or ())]:
            if name not in functions:
                raise ValueError(f"tool_choice names the function {name!r}, which is not one of tools")
        if allowed is not None:
            return {name: function for name, function in functions.items() if name in allowed}
        return {} if self.tool_choice == "none" else functions

    @property
    def forced(self) -> bool:
        """A call must be made."""
        mode = self._allowed().get("mode") if self._allows_some else self.tool_choice
        return mode == "required" or (isinstance(self.tool_choice, dict) and not self._allows_some)

    @property
    def _allows_some(self) -> bool:
        return isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == ALLOWED

    def _allowed(self) -> Mapping[str, Any]:
        given = self.tool_choice.get(ALLOWED) if isinstance(self.tool_choice, dict) else None
        return given if isinstance(given, dict) else {}

    def allowed_tools(self) -> list[str] | None:
        """The functions that may be called, where that is not all; each once.

        Raises:
            ValueError: a choice of some that has not OpenAI's form.
        """
        if not self._allows_some:
            return None
        given = self._allowed()
        tools = given.get("tools")
        functions = [_function(tool) for tool in tools] if isinstance(tools, list) else []
        names = [function.get("name") for function in functions]
        if given.get("mode") not in ("auto", "required") or not names or not all(isinstance(one, str) for one in names):
            raise ValueError(
                f'tool_choice of type {ALLOWED} must have "mode", auto or required, and "tools", a list of functions '
                "by name that is not empty"
            )
        return list(dict.fromkeys(map(str, names)))

    def named_tool(self) -> str | None:
        """The function that must be called.

        Raises:
            ValueError: a choice that has not OpenAI's form.
        """
        if not isinstance(self.tool_choice, dict) or self._allows_some:
            return None
        name = _function(self.tool_choice).get("name")
        if not isinstance(name, str):
            raise ValueError(
                'tool_choice must be none, auto, required, {"type": "function", "function": {"name": ...}} or '
                f'{{"type": "{ALLOWED}", "{ALLOWED}": {{"mode": ..., "tools": [...]}}}}, got {self.tool_choice!r}'
            )
        return name

    def new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def options(
        self, chat_template: str | None, trust_template: bool, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> ChatOptions:
        """The chat options that the body asks for.

        Args:
            chat_template: the server's own template; ``None`` if it has none.
            trust_template: a request may bring its own.
            defaults: the template's variables where the request does not bring these.

        Raises:
            ValueError: options that exclude each other, or a template that may not be brought.
        """
        if self.chat_template is not None and not trust_template:
            raise ValueError("chat_template: this server takes none from requests (--trust-request-chat-template)")
        variables = {**defaults, **(self.chat_template_kwargs or {})}
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return ChatOptions(
            chat_template=self.chat_template or chat_template,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=self._shown_tools(),
            chat_template_kwargs=variables,
        )

    def _shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template describes to the model."""
        if self.tool_choice == "none":
            return None
        allowed = self.allowed_tools()
        return [tool for _, tool in self.callable_tools() if allowed is None or _function(tool)["name"] in allowed]


def chat_request(fields: dict[str, Any]) -> ChatRequest:
    """The body of a chat completion that says the same as one of another API.

    Raises:
        ValueError: the first thing that is wrong with it.
    """
    try:
        return ChatRequest(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{place}: {message}" if place else message) from error


class TokenizeRequest(ToolsBody):
    """``POST /tokenize``: text, or a conversation."""

    refused = PROMPT

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt and messages are two ways to say what to tokenize: give one of them")
        return self


class DetokenizeRequest(Body):
    """The body of ``POST /detokenize``."""

    refused = PROMPT

    model: str | None = None
    tokens: Ids
