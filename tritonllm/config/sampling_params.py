"""How to continue one prompt. Names, defaults and meanings are vLLM's."""

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from tritonllm.config.repetition import ends_in_repetition
from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.config.vllm_arguments import (
    SAMPLING_DEFAULTS,
    STRUCTURE_DEFAULTS,
    VllmSampling,
    VllmStructure,
    is_neutral,
    refuse,
    require_neutral,
)

SAMPLING_EPS = 1e-5  # a temperature below this is greedy: the division by it would overflow
MAX_LOGPROBS = 1024
ALL = -1  # as a number of log-probabilities: those of the whole vocabulary
MAX_N = 16384
MAX_STOPS = 256  # stop strings: each new text is searched for each of them
MAX_STOP_CHARS = 1024  # of one of them
MAX_STOP_TOKEN_IDS = 4096
MAX_ALLOWED_TOKEN_IDS = 1 << 19  # and no more than the vocabulary has
MAX_LOGIT_BIAS = 1024  # tokens
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 1024  # of one of them
MAX_PROCESSORS = 256  # functions that change logits, at each token
MAX_EXTRA_SIZE = 1 << 18  # characters and values of extra_args
MAX_CHOICES = 10_000  # of structured outputs; 100,000 compile for 14 s
MAX_FORM_CHARS = 100_000  # of a regex, a grammar, or all choices together
MAX_SCHEMA_CHARS = 1 << 19  # of a JSON schema
_NEUTRAL_NAMES = {name for name, _ in SAMPLING_DEFAULTS}
_MOST = (  # of each field, and what of
    ("stop", MAX_STOPS, "strings"),
    ("bad_words", MAX_BAD_WORDS, "strings"),
    ("logit_bias", MAX_LOGIT_BIAS, "entries"),
)
OF_MODEL = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # for which a model may have defaults
INT32_MAX = 2**31 - 1  # the largest number that the kernels' parameters hold


class RequestOutputKind(enum.Enum):
    """What a step returns of a running request."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new since the last output
    FINAL_ONLY = 2  # nothing until it ends


def _limited(name: str, value: Sized, most: int, what: str = "entries") -> None:
    if len(value) > most:
        raise ValueError(f"{name} has {len(value)} {what}, more than {most}: leave some out")


def size_of(value: object, most: int) -> int:
    """About how many characters a value has as JSON: those of its texts, and one for each value. Not much beyond
    ``most`` is looked at."""
    size, waiting = 0, [value]
    while waiting and size <= most:
        part = waiting.pop()
        size += 1
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping | list | tuple):
            if len(part) > most:
                return most + 1
            waiting += part
            waiting += part.values() if isinstance(part, Mapping) else ()
    return size


def _token_ids(name: str, value: Collection[Any], most: int) -> list[int]:
    """Token ids as a list of Python's integers. 150,000 of them take 7 ms."""
    _limited(name, value, most)
    ids = list(value)
    if set(map(type, ids)) - {int}:
        ids = [_plain(i) for i in ids]
        for i in ids:
            _integer(f"{name} entries", i, 0)
    elif ids:
        _integer(f"{name} entries", min(ids), 0)
    return ids


def _number(name: str, value: object, low: float, high: float, hint: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:  # NaN compares false
        raise ValueError(f"{name} must be {hint}, got {value!r}")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {limits}, got {value!r}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _plain(value: Any) -> Any:
    """NumPy's numbers, and others that register as numbers, as Python's own; anything else as it is."""
    if isinstance(value, bool) or type(value) in (int, float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _plain_bias(token: Any, bias: Any) -> tuple[Any, Any]:
    """A JSON object's key as an integer, and the bias within its range; what is neither stays, to be refused."""
    token = int(token) if isinstance(token, str) and token.isdecimal() else token
    return token, next((limit for limit in (-100.0, 100.0) if isinstance(bias, int | float) and bias / limit > 1), bias)


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """Ends an output that says the same thing again and again; ``finish_reason`` is then ``"repetition"``.

    Args:
        max_pattern_size: the longest n-gram that is looked for, in tokens; 0 looks for none.
        min_pattern_size: the shortest n-gram that is looked for; 0 counts as 1.
        min_count: how many times in a row an n-gram must stand at the output's end; at least 2.

    Raises:
        ValueError: a value outside its range; the message names it.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        _integer("max_pattern_size", self.max_pattern_size, 0, INT32_MAX)
        _integer("min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        if self.max_pattern_size:
            _integer("min_count", self.min_count, 2, INT32_MAX)

    def found(self, tokens: Sequence[int], length: int) -> bool:
        """Whether the first ``length`` tokens end with such a repetition."""
        least = max(self.min_pattern_size, 1)
        return bool(self.max_pattern_size) and ends_in_repetition(
            tokens, length, least, self.max_pattern_size, self.min_count
        )


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams(VllmStructure):
    """What an output must look like. Exactly one of the first five says it. Needs the extra ``structured``. The fields
    that vLLM has beside these take their neutral values only.

    Args:
        json: a JSON schema, as text or as a dict.
        regex: a regular expression that the whole output matches.
        choice: strings, of which the output is one.
        grammar: a grammar in EBNF, as xgrammar reads it; it begins with the rule ``root``.
        json_object: whether the output is any JSON object or array.
        disable_any_whitespace: JSON with one space after commas and colons, and none elsewhere. Without it a model may
            break lines and indent them, by at most four blanks or a tab for each level.
        after_thought: the model may think first, as it likes: what it writes behind its thought has the form. A model
            whose tokenizer has no tokens for thoughts does not think.

    Raises:
        ValueError: none or several of them, or one of a wrong type or too large. Whether a schema, expression or
            grammar is a right one is checked when a request is added.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    after_thought: bool = False

    def __post_init__(self) -> None:
        require_neutral({name: getattr(self, name) for name, _ in STRUCTURE_DEFAULTS}, STRUCTURE_DEFAULTS)
        given = [name for name in _WISHES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(_WISHES)}, got {' and '.join(given) or 'none'}")
        for name, kinds in (("json", str | Mapping), ("regex", str), ("grammar", str), ("json_object", bool)):
            value = getattr(self, name)
            if not isinstance(value, kinds | None):
                raise ValueError(f"{name} must be {getattr(kinds, '__name__', 'a string or a dict')}, got {value!r}")
        self._check_size()
        choice = self.choice
        if choice is None:
            return
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
            raise ValueError(f"choice must be a list of strings, got {choice!r:.1000}")
        if not all(isinstance(one, str) and one for one in choice):
            raise ValueError(f"choice must be of strings, none of them empty, got {choice!r}")

    def _check_size(self) -> None:
        choice = self.choice if isinstance(self.choice, Sized) else ()
        _limited("choice", choice, MAX_CHOICES, "strings")
        for name, value, most in (
            ("json", self.json, MAX_SCHEMA_CHARS),
            ("regex", self.regex, MAX_FORM_CHARS),
            ("grammar", self.grammar, MAX_FORM_CHARS),
            ("choice", choice if isinstance(choice, str) else "".join(filter(_is_text, choice)), MAX_FORM_CHARS),
        ):
            if (len(value) if isinstance(value, str) else size_of(value, most)) > most:
                raise ValueError(f"{name} has more than {most} characters: make it smaller")

    @property
    def wish(self) -> tuple[str, Any]:
        """The name of the one that was given, and its value."""
        return next((name, value) for name in _WISHES if (value := getattr(self, name)) not in (None, False))

    @property
    def key(self) -> tuple[str, bool, str, bool]:
        """Equal for equal wishes, and hashable. A schema that is a dict is another one than its ``repr`` as text."""
        name, value = self.wish
        is_text = isinstance(value, str)
        return name, is_text, value if is_text else repr(value), self.disable_any_whitespace


_WISHES = ("json", "regex", "choice", "grammar", "json_object")
GuidedDecodingParams = StructuredOutputsParams  # vLLM's older name


@dataclass(slots=True)
class SamplingParams(VllmSampling):
    """Parameters of one request. They are checked when made, and again when a request is added, which keeps a copy:
    change them as you like. The fields that vLLM has beside these take their neutral values only.

    Args:
        n: how many completions to generate for the prompt.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: drop tokens less likely than this times the most likely one, in [0, 1].
        seed: makes the request's samples reproducible, whatever else runs beside it.
        presence_penalty: subtracted from the logit of every token generated so far, in [-2, 2].
        frequency_penalty: subtracted from the logit of a token for each time that it was generated, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output, > 0.
        max_tokens: most tokens to generate; ``None``: until the model's length is reached.
        min_tokens: no end of sequence or stop token before this many tokens.
        stop: strings that end the output, which ends before them; at most 256, of at most 1,024 characters each.
        stop_after_thought: stop strings count behind the model's thought only. ``True``, or a
            :class:`~tritonllm.config.thought_format.ThoughtFormat` (or a dict of its fields) where the tokenizer does
            not tell how the model writes thoughts. Tokens that end the output end a thought, too.
        stop_token_ids: tokens that end the output; at most 4,096.
        include_stop_str_in_output: leave the stop string in the text, and the text of a token that ends the output.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: how many of the most likely tokens to report at each position (the chosen one is always reported);
            -1: all of the vocabulary.
        prompt_logprobs: how many of the most likely tokens to report for each prompt token after the first, as
            ``logprobs``.
        logit_bias: added to the logits of these token ids; at most 1,024.
        allowed_token_ids: if given, only these can be generated; at most as many as the vocabulary has.
        bad_words: token sequences whose last token may not complete them; at most 1,024 strings, of at most 1,024
            characters each, tokenized by the engine.
        detokenize: produce text, not only token ids.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: separate special tokens by spaces in the text.
        output_kind: what each step returns of this request.
        truncate_prompt_tokens: use only so many of the prompt's last tokens; -1: as many as the model's length lets
            one new token follow.
        repetition_detection: ends an output that repeats itself.
        thinking_token_budget: most tokens of a thought (between ``<think>`` and ``</think>``, or what the model's
            tokenizer has for them), whose end is then forced.
        logits_processors: functions ``(output_token_ids, logits[V]) -> logits[V]``, or with ``prompt_token_ids``
            before them, called one after the other at each token. The request is then not planned ahead; the ``n``
            continuations share the functions.
        structured_outputs: what the output must look like.
        guided_decoding: ``structured_outputs`` under vLLM's older name.
        extra_args: values for batch processors (:class:`tritonllm.engine.step.processors.BatchLogitsProcessor`);
            ``kv_transfer_params`` in it is for the connector that shares the cache (docs/kv-transfer.md).

    Raises:
        ValueError: a value outside its range; the message names the parameter.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    _: KW_ONLY
    stop: str | Sequence[str] | None = None
    stop_after_thought: bool | ThoughtFormat | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    thinking_token_budget: int | None = None
    logits_processors: Sequence[Callable[..., Any]] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in NUMBERS:
            setattr(self, name, _plain(getattr(self, name)))
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 1e6, "a number of at least 0")
        _integer("top_k", self.top_k, -1, INT32_MAX)
        _number("top_p", self.top_p, math.ulp(0.0), 1.0, "in (0, 1]")
        _number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "in [-2, 2]")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "in [-2, 2]")
        _number("repetition_penalty", self.repetition_penalty, math.ulp(0.0), 1e6, "greater than 0")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), ALL, MAX_LOGPROBS)
        self._check_more()
        for name, default in SAMPLING_DEFAULTS:
            value = getattr(self, name)
            if value is not default and not is_neutral(name, value, default):
                refuse(name, value)
        self._normalise_sequences()

    def _check_more(self) -> None:
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if not self.truncate_prompt_tokens:
                raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for the model's length, got 0")
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, 0, INT32_MAX)
        functions = self.logits_processors
        if functions is not None:
            if isinstance(functions, list | tuple):
                _limited("logits_processors", functions, MAX_PROCESSORS)
            if not isinstance(functions, list | tuple) or not all(map(callable, functions)):
                raise ValueError(f"logits_processors must be a list of functions, got {functions!r}")
            self.logits_processors = list(functions)
        self._check_structure()
        self._check_thought()
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise ValueError(f"extra_args must be a dict, got {self.extra_args!r}")
        if self.extra_args and size_of(self.extra_args, MAX_EXTRA_SIZE) > MAX_EXTRA_SIZE:
            raise ValueError(f"extra_args have more than {MAX_EXTRA_SIZE} values and characters: leave some out")
        if isinstance(self.repetition_detection, Mapping):
            try:
                self.repetition_detection = RepetitionDetectionParams(**self.repetition_detection)
            except (TypeError, ValueError) as error:
                raise ValueError(f"repetition_detection: {error}") from error
        if not isinstance(self.repetition_detection, RepetitionDetectionParams | None):
            given = type(self.repetition_detection).__name__
            raise ValueError(f"repetition_detection must be RepetitionDetectionParams, got {given}")

    def _check_thought(self) -> None:
        form = self.stop_after_thought
        if isinstance(form, Mapping):
            try:
                form = ThoughtFormat(**form)
            except (TypeError, ValueError) as error:
                raise ValueError(f"stop_after_thought: {error}") from error
        if not isinstance(form, bool | ThoughtFormat | None):
            raise ValueError(f"stop_after_thought must be true, false or a ThoughtFormat, got {form!r}")
        self.stop_after_thought = ThoughtFormat() if form is True else form or None

    def _check_structure(self) -> None:
        for name in ("structured_outputs", "guided_decoding"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                try:
                    value = StructuredOutputsParams(**value) if value else None
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{name}: {error}") from error
                setattr(self, name, value)
            if not isinstance(value, StructuredOutputsParams | None):
                raise ValueError(f"{name} must be StructuredOutputsParams, got {type(value).__name__}")
        if self.guided_decoding is not None:
            if self.structured_outputs not in (None, self.guided_decoding):
                raise ValueError("guided_decoding is the older name of structured_outputs: give one")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if self.structured_outputs is None:
            return
        if self.ignore_eos:
            raise ValueError("structured_outputs end where their grammar ends: leave ignore_eos out")
        if self.thinking_token_budget is not None and not self.structured_outputs.after_thought:
            raise ValueError(
                "structured_outputs hold from the first token on: leave thinking_token_budget out, or add after_thought"
            )

    def _normalise_sequences(self) -> None:
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Collection) or (isinstance(value, str) and name != "stop")):
                raise ValueError(f"{name} must be a list, got {value!r:.1000}")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must be a dict from token id to bias, got {self.logit_bias!r:.1000}")
        for name, most, what in _MOST:
            if (given := getattr(self, name)) is not None and not isinstance(given, str):
                _limited(name, given, most, what)
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be a string or strings, none of them empty, got {self.stop!r}")
        if stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True; use stop_token_ids instead")
        self.stop = stop
        self.bad_words = list(self.bad_words or ())
        if not all(isinstance(s, str) and s for s in self.bad_words):
            raise ValueError(f"bad_words must be strings, none of them empty, got {self.bad_words!r}")
        for name, words, most in (("stop", stop, MAX_STOP_CHARS), ("bad_words", self.bad_words, MAX_BAD_WORD_CHARS)):
            if (longest := max(map(len, words), default=0)) > most:
                raise ValueError(f"{name} has a string of {longest} characters, more than {most}: shorten it")
        self.stop_token_ids = _token_ids(
            "stop_token_ids", () if self.stop_token_ids is None else self.stop_token_ids, MAX_STOP_TOKEN_IDS
        )
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must not be empty; leave it out to allow all tokens")
        if self.logit_bias:
            self.logit_bias = {_plain(token): _plain(bias) for token, bias in self.logit_bias.items()}
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias keys", token, 0)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0, "in [-100, 100]")

    @classmethod
    def from_optional(cls, **kwargs: Any) -> "SamplingParams":
        """Where ``None`` means the default (``max_tokens`` aside), as in vLLM; biases' keys may be strings.

        Raises:
            ValueError: a value outside its range.
        """
        given = {name: value for name, value in kwargs.items() if value is not None or name == "max_tokens"}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            _limited("logit_bias", bias, MAX_LOGIT_BIAS)
            given["logit_bias"] = dict(_plain_bias(*item) for item in bias.items())
        return cls(**given)

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one but its logits processors."""
        return deepcopy(self, {id(processor): processor for processor in self.logits_processors or ()})

    def checked(self) -> "SamplingParams":
        """A copy whose values are checked, for the engine to keep.

        Raises:
            ValueError: a value that was assigned is outside its range.
        """
        copy = replace(self)
        if copy.logit_bias is not None:
            copy.logit_bias = dict(copy.logit_bias)
        return copy

    def __hash__(self) -> int:
        """Equal ones are one key of a dict. Do not change one that is a key."""
        return hash((self.n, self.temperature, self.top_k, self.top_p, self.seed, self.max_tokens))

    def __repr__(self) -> str:
        shown = (field.name for field in fields(self) if field.name not in _NEUTRAL_NAMES)
        return f"SamplingParams({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    @property
    def limited(self) -> bool:
        """Whether a draw takes a part of the vocabulary only."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def stop_strings(self) -> Sequence[str]:
        return self.stop or ()


OWN_FIELDS = tuple(f for f in fields(SamplingParams) if f.name not in _NEUTRAL_NAMES)  # those that mean something here
NUMBERS = tuple(f.name for f in OWN_FIELDS if f.type in (int, float, int | None))
