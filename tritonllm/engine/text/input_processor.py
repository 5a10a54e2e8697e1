"""Checks a request and turns it into token ids, before anything in the engine changes."""

import copy
import zlib
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from tritonllm.config.prompts import (
    KNOWN_FORMS,
    Prompt,
    TokensPrompt,
    check_text,
    holds_tokens,
    is_array,
    is_empty,
    to_list,
)
from tritonllm.config.sampling_params import ALL, SamplingParams
from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.engine.data.control import (
    THOUGHTS,
    AfterThought,
    AtLeast,
    Control,
    ReadsOutput,
    ThinkingBudget,
    thought_tokens,
)
from tritonllm.engine.data.edits import check_edits
from tritonllm.engine.data.request import PACKED, Request
from tritonllm.engine.grammar.grammar import GrammarControl, Grammars
from tritonllm.engine.text.answer_text import AnswerText, ThoughtMarks
from tritonllm.engine.text.detokenizer import TokenTexts
from tritonllm.engine.text.text_pieces import TextPieces
from tritonllm.engine.text.tokenizer import bad_word_ids
from tritonllm.engine.transfer.params import TransferParams


@dataclass(frozen=True)
class TokenizedPrompt:
    """What :meth:`InputProcessor.tokenize` makes of a prompt, and takes as one that needs nothing more."""

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str | None
    packed: "array[int]"  # the same ids, of type PACKED
    token_types: list[int] | None = None  # as many
    bad_words: tuple[tuple[int, ...], ...] | None = None  # of the request, if it is known to whom makes this


class PromptTooLongError(ValueError):
    """The prompt has more tokens than the model's length lets it have."""


SURELY_QUICK = 1 << 16  # characters of a prompt, some ten milliseconds of the tokenizer's
_BANS = ("bad_words", "allowed_token_ids", "logit_bias", "logits_processors")  # parameters that may ban tokens
NO_MEDIA = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")  # vLLM's; they may be there, and empty


def derive_seed(seed: int, index: int) -> int:
    """A seed for the ``index``-th member of a family, unlike its neighbours' (splitmix64, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def _pack(ids: Sequence[int], limit: int) -> "array[int] | None":
    """Token ids as numbers of type ``PACKED``; ``None`` unless all are integers from 0 to ``limit - 1``. It takes 13 ns
    each, where a loop takes 120 (W4 has half a million)."""
    try:
        packed = array(PACKED, ids)
    except (TypeError, OverflowError):  # negative ones, too
        return None
    return packed if not packed or np.frombuffer(packed, dtype=np.uint32).max() < limit else None


class InputProcessor:
    """Makes the requests of the engine from prompts and parameters: checks them, tokenizes, and fills in defaults.

    Args:
        tokenizer: a transformers tokenizer, or ``None`` for token ids only.
        vocab_size: the size of the model's vocabulary.
        max_model_len: most tokens of prompt and output together.
        eos_token_ids: tokens that end an output.
        seed: the engine's seed, for requests without one.
        default_params: the sampling parameters of requests that bring none.
        takes_extra_args: whether there are logits processors, which may read ``extra_args``.
        max_logprobs: the most log-probabilities a position that requests may ask for; -1: the vocabulary's.
        transfer_params: checks what requests say of other engines; by default those of an engine that asks none.
        structured_outputs_backend: what makes masks of structured outputs.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        seed: int,
        default_params: SamplingParams | None = None,
        *,
        takes_extra_args: bool = False,
        max_logprobs: int = ALL,
        transfer_params: TransferParams | None = None,
        structured_outputs_backend: str = "auto",
    ) -> None:
        self._takes_extra_args, self._max_logprobs = takes_extra_args, max_logprobs
        self._transfer_params = transfer_params or TransferParams(None)
        self.tokenizer, self.words = tokenizer, TokenTexts(tokenizer)
        self._pieces = None if tokenizer is None else TextPieces(tokenizer)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self._seed = seed
        backend = structured_outputs_backend
        self._grammars = None if tokenizer is None else Grammars(tokenizer, vocab_size, eos_token_ids, backend)
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        self._thought, self._marks = thought_tokens(vocabulary), ThoughtMarks(vocabulary)
        self.default_params = default_params or SamplingParams()
        self._last_words: tuple[tuple[str, ...], tuple[tuple[int, ...], ...]] = (), ()

    def copied(self) -> "InputProcessor":
        """A copy with a tokenizer of its own, for another thread."""
        copied = copy.copy(self)
        copied.tokenizer = copy.deepcopy(self.tokenizer)
        copied._pieces = None if self._pieces is None else self._pieces.copied(copied.tokenizer)
        return copied

    @property
    def knows_thoughts(self) -> bool:
        """``thinking_token_budget`` can be given: the tokenizer has tokens that begin and end a thought."""
        return self._thought is not None

    def tokenize(
        self,
        prompt: Prompt | TokenizedPrompt,
        truncate: int | None = None,
        *,
        continued: bool = True,
        separated: bool = False,
    ) -> TokenizedPrompt:
        """Token ids of a prompt in any of its forms.

        Args:
            truncate: keep so many of the last ones; -1: as many as may be, with one new token.
            continued: whether there must be room for one new token.
            separated: the last token is a separator: keep it and the first ones.

        Raises:
            ValueError: an unknown form, an empty or too long prompt (:class:`PromptTooLongError`), a token id outside
                the vocabulary.
        """
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        most = self.max_model_len - continued
        types = None
        if isinstance(prompt, Mapping) and "token_type_ids" in prompt:
            prompt, types = self._split_types(prompt)
        text, ids, salt = self._parts(prompt)
        for name, value in (("prompt", text), ("cache_salt", salt)):
            if value is not None:
                check_text(name, value)
        given = ids is not None  # perhaps with integers that are not Python's own
        if ids is None:
            assert text is not None  # one of both is there
            ids = self.encode(text) if truncate is not None else self.encode_prompt(text, continued=continued)
        if truncate is not None:
            count = most if truncate == -1 else truncate
            if len(ids) > count:
                kept = [*range(count - 1), -1] if separated else range(-count, 0)
                ids, types = [ids[i] for i in kept], None if types is None else [types[i] for i in kept]
        if not ids:
            raise ValueError("prompt is empty: it needs at least one token")
        if len(ids) > most:
            raise self._too_long(f"{len(ids)}", continued)
        packed = self.check_ids(ids)
        return TokenizedPrompt(text, packed.tolist() if given else ids, salt, packed, types)

    def encode_prompt(self, text: str, add_special_tokens: bool = True, *, continued: bool = True) -> list[int]:
        """:meth:`encode` a text that must fit, and refuse it by its beginning if that alone has twice as many tokens as
        may be: to encode 15 MB takes 17 s, in which a server encodes nobody else's prompt.

        Raises:
            PromptTooLongError: it is far too long (not if it is only too long).
            ValueError: as :meth:`encode`.
        """
        most = self.max_model_len - continued
        beginning = text[: SURELY_QUICK + 8 * most]
        if len(beginning) < len(text):
            count = len(self.encode(beginning, add_special_tokens, keep=False))
            if count > 2 * most:  # where the text is cut counts for less
                raise self._too_long(f"more than {count}", continued)
        return self.encode(text, add_special_tokens)

    def _too_long(self, count: str, continued: bool) -> PromptTooLongError:
        new = "with at least one new token " if continued else ""
        return PromptTooLongError(
            f"prompt has {count} tokens, but {new}it must fit max_model_len={self.max_model_len}: shorten it, or raise "
            "max_model_len"
        )

    def encode(self, text: str, add_special_tokens: bool = True, *, keep: bool = True) -> list[int]:
        """Token ids of a text, however long.

        Args:
            keep: what is new of it (:mod:`tritonllm.engine.text.text_pieces`).

        Raises:
            ValueError: no tokenizer, or half of a surrogate pair in the text.
        """
        check_text("prompt", text)
        if self._pieces is None:
            raise ValueError("prompt is text, but the engine has no tokenizer: pass token ids")
        return self._pieces.encode(text, add_special_tokens, keep=keep)

    def pair(
        self, first: Prompt, second: Prompt, *, with_types: bool = False, names: tuple[str, str] = ("data", "data")
    ) -> TokensPrompt:
        """Two texts as the one prompt of a cross-encoder, with the tokenizer's separators.

        Args:
            with_types: say which token is of which text, if the tokenizer does.
            names: what errors call the two.

        Raises:
            ValueError: no texts, or no tokenizer.
        """
        if not isinstance(first, str) or not isinstance(second, str):
            raise ValueError(f"a cross-encoder reads two texts, got {type(first).__name__} and {type(second).__name__}")
        for name, text in zip(names, (first, second), strict=True):
            check_text(name, text)
        if self.tokenizer is None:
            raise ValueError(
                "a cross-encoder reads two texts, but the engine has no tokenizer: leave out skip_tokenizer_init"
            )
        encoded = self.tokenizer(first, second)
        pair: TokensPrompt = {"prompt_token_ids": encoded["input_ids"]}
        if with_types and "token_type_ids" in encoded:
            pair["token_type_ids"] = encoded["token_type_ids"]
        return pair

    def check_ids(self, ids: list[int], name: str = "prompt_token_ids") -> "array[int]":
        """Check token ids, and return them packed.

        Raises:
            ValueError: one is not of the vocabulary.
        """
        packed = _pack(ids, self.vocab_size)
        if packed is None:
            wrong = next(i for i in ids if _pack([i], self.vocab_size) is None)
            raise ValueError(f"{name} must be integers from 0 to {self.vocab_size - 1}, got {wrong!r}")
        return packed

    @staticmethod
    def _split_types(prompt: Mapping[str, Any]) -> tuple[Prompt, list[int] | None]:
        given, ids = prompt["token_type_ids"], prompt.get("prompt_token_ids")
        types = None
        if holds_tokens(given):
            listed: list[Any] = to_list(given)
            types = [kind.tolist() if is_array(kind) else kind for kind in listed]
        if given is not None and (types is None or not holds_tokens(ids) or len(types) != len(to_list(ids))):
            raise ValueError("prompt['token_type_ids'] must have one entry for each of prompt['prompt_token_ids']")
        return {key: value for key, value in prompt.items() if key != "token_type_ids"}, types  # type: ignore[return-value]

    @staticmethod
    def _parts(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
        if isinstance(prompt, str):
            return prompt, None, None
        if isinstance(prompt, Mapping):
            parts: dict[str, Any] = dict(prompt)
            text, ids, salt = (parts.pop(key, None) for key in ("prompt", "prompt_token_ids", "cache_salt"))
            parts = {key: value for key, value in parts.items() if key not in NO_MEDIA or not is_empty(value)}
            if parts or (text is None and ids is None):
                raise ValueError(f"prompt must be {KNOWN_FORMS}, got a dict with {sorted(map(str, prompt))}")
            if text is not None and not isinstance(text, str):
                raise ValueError(f"prompt['prompt'] must be a string, got {type(text).__name__}")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise ValueError(f"prompt['cache_salt'] must be a string that is not empty, got {salt!r:.100}")
            if ids is None:
                return text, None, salt
            if not holds_tokens(ids):
                raise ValueError(f"prompt['prompt_token_ids'] must be a list of integers, got {type(ids).__name__}")
            return text, to_list(ids), salt
        if holds_tokens(prompt):
            return None, to_list(prompt), None
        raise ValueError(f"prompt must be {KNOWN_FORMS}, got {type(prompt).__name__}")

    def check_logprobs(self, name: str, count: int | None) -> None:
        """Check how many log-probabilities a position a request asks for.

        Raises:
            ValueError: more than ``max_logprobs``; the message begins with the request's name for it.
        """
        most, asked = self._max_logprobs, self.vocab_size if count == ALL else count or 0
        if most != ALL and asked > most:
            raise ValueError(
                f"{name}={count} is more than max_logprobs={most}: ask for fewer, or start the engine with "
                f"max_logprobs={count}"
            )

    def take_params(self, params: SamplingParams | None, *, of_user: bool = True) -> SamplingParams:
        """A copy that the user cannot change, checked; of the defaults, if there are none.

        Args:
            of_user: the user chose them, and is held to ``max_logprobs``. A beam search needs some more.

        Raises:
            ValueError: a bad value, text features without a tokenizer, or token ids outside the vocabulary.
        """
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        params = params.checked()
        for name in ("logprobs", "prompt_logprobs") if of_user else ():
            self.check_logprobs(name, getattr(params, name))
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise ValueError("stop and bad_words are text, but the engine has no tokenizer: use token ids")
        if params.thinking_token_budget is not None and self._thought is None:
            known = ", ".join(end for _, end in THOUGHTS)
            raise ValueError(f"thinking_token_budget needs a tokenizer with an end-of-thought token ({known})")
        extra = params.extra_args or {}
        self._transfer_params.check(extra.get("kv_transfer_params"))
        if extra.keys() - {"kv_transfer_params"} and not self._takes_extra_args:
            raise ValueError("extra_args are for logits processors: register some with LLM(logits_processors=[...])")
        for name, words in (("stop", params.stop_strings), ("bad_words", params.bad_words or ())):
            for word in words:
                check_text(name, word)
        if (params.truncate_prompt_tokens or 0) >= self.max_model_len:
            raise ValueError(
                f"truncate_prompt_tokens={params.truncate_prompt_tokens} and one new token must fit "
                f"max_model_len={self.max_model_len}: use at most {self.max_model_len - 1}, or -1"
            )
        if len(params.allowed_token_ids or ()) > self.vocab_size:
            count = len(params.allowed_token_ids or ())
            raise ValueError(f"allowed_token_ids has {count} entries, more than the vocabulary ({self.vocab_size})")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            token = max(getattr(params, name) or (), default=-1)
            if token >= self.vocab_size:
                raise ValueError(f"{name} has token {token}, but the vocabulary ends at {self.vocab_size - 1}")
        return params

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of the request's bad words. Those of the last request are known: its other prompts, and often
        the next requests, have the same."""
        words = tuple(params.bad_words or ())
        known, ids = self._last_words
        if words != known:
            ids = bad_word_ids(self.tokenizer, words)
            self._last_words = words, ids
        return ids

    def parse(self, params: SamplingParams) -> Future[Any] | None:
        """What to wait for outside of the steps before a request with ``params`` is added; ``None``: for nothing."""
        wish = params.structured_outputs
        return None if wish is None or self._grammars is None else self._grammars.parse(wish)

    def grammar(self, params: SamplingParams) -> Future[Any] | None:
        """What the output must look like, compiled or still to be.

        Raises:
            ValueError: it is wrong, or the model cannot follow it.
        """
        wish = params.structured_outputs
        if wish is None:
            return None
        if self._grammars is None or not self.eos_token_ids:
            raise ValueError("structured_outputs need a tokenizer and an end-of-sequence token, which this model lacks")
        return self._grammars.compile(wish)

    def _controls(
        self, prompt: TokenizedPrompt, params: SamplingParams, grammar: Future[Any] | None
    ) -> tuple[Control, ...]:
        """The controls of one continuation, which decide the tokens that may come next."""
        controls: list[Control] = []
        if grammar is not None:
            assert params.structured_outputs is not None  # whose grammar it is
            given = [name for name in _BANS if getattr(params, name)]
            control: Control = GrammarControl(grammar, self.vocab_size, given)
            if params.structured_outputs.after_thought and self._thought is not None:
                control = AfterThought(control, *self._thought, prompt.token_ids, self.vocab_size)
            if params.min_tokens:
                ends = {*self.eos_token_ids, *(params.stop_token_ids or ())}
                control = AtLeast(control, params.min_tokens, ends, self.vocab_size)
            controls.append(control)
        if params.logits_processors:
            controls.append(ReadsOutput())
        budget = params.thinking_token_budget
        if budget is not None:
            assert self._thought is not None  # checked with the parameters
            controls.append(ThinkingBudget(budget, *self._thought, prompt.token_ids, self.vocab_size))
        return tuple(controls)

    def answer_text(self, prompt: TokenizedPrompt, params: SamplingParams) -> AnswerText | None:
        """What tells where stop strings count in an output; ``None``: everywhere, or there are none."""
        form = params.stop_after_thought
        if not isinstance(form, ThoughtFormat) or not params.stop_strings or self.tokenizer is None:
            return None
        return self._marks.follow(form, prompt.token_ids, self.tokenizer.decode)

    def requests(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        priority: int,
        arrival: int,
        grammar: Future[Any] | None = None,
    ) -> list[Request]:
        """The scheduler's requests: one for each of the ``n`` continuations, which share the prompt's blocks.

        Raises:
            ValueError: more edits of the logits than the engine has room for.
        """
        room = self.max_model_len - len(prompt.token_ids)
        new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        first = params.seed if params.seed is not None else derive_seed(self._seed, zlib.crc32(request_id.encode()))
        words = self.bad_words(params) if prompt.bad_words is None else prompt.bad_words
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                eos_token_ids=self.eos_token_ids,
                max_total_tokens=len(prompt.token_ids) + new_tokens,
                priority=priority,
                arrival=arrival,
                cache_salt=prompt.cache_salt,
                seed=first if index == 0 else derive_seed(first, index),
                bad_words=words,
                controls=self._controls(prompt, params, grammar),
                packed_prompt=prompt.packed,
            )
            for index in range(params.n)
        ]
        check_edits(requests[0])
        if params.n > 1:
            siblings = tuple(requests)
            for request in requests:
                request.siblings = siblings
        return requests
