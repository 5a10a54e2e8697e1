"""llguidance as what makes masks, in xgrammar's place (``structured_outputs_backend="guidance"``). No torch.

It compiles as it goes: a schema with long strings has its first mask in a millisecond, where xgrammar compiles for
seconds, and other masks take it a few times as long (``bench/grammar_backends.py``). Its own reader of JSON Schema
knows ``allOf``, several ``patternProperties``, and lengths beside a ``pattern``, and refuses what it does not know.

The package ``llguidance`` (Microsoft) follows Earley's parser with a lexer of regular expressions' derivatives.
"""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from tritonllm.config.sampling_params import StructuredOutputsParams
from tritonllm.engine.grammar.ebnf import LLAMA
from tritonllm.engine.grammar.expressions import is_endless, too_large
from tritonllm.engine.grammar.json_schema import read_schema, uncountable
from tritonllm.engine.grammar.refusals import NOT_KEPT, of_ebnf, of_lark, of_regex, of_value
from tritonllm.engine.grammar.schema_document import Document
from tritonllm.system.extras import install

_BLANKS = r"( |\n {0,32}|\n\t{0,8})?"  # between two tokens of JSON
_TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE = {"whitespace_pattern": _BLANKS}
_BOUNDS = ("exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum")
_CONTROLS = re.compile(r"\\(x|u00)[01][0-9a-fA-F]-|[\x00-\x1f]-")
_EBNF = re.compile(r"^\s*[\w.-]+\s*::=", re.MULTILINE)
_MIXED = ("$ref", "anyOf", "oneOf")


def check_installed() -> None:
    """Check that llguidance can be imported.

    Raises:
        ValueError: llguidance is not installed.
    """
    if find_spec("llguidance") is None:
        raise ValueError(
            f"structured_outputs_backend='guidance' needs llguidance, which is not installed: {install('guidance')}"
        )


def _llguidance() -> Any:
    check_installed()
    return import_module("llguidance")


def parse(wish: StructuredOutputsParams) -> str:
    """A grammar in llguidance's own form.

    Raises:
        ValueError: a schema, expression or grammar that is wrong, or cannot be kept; or llguidance is not installed.
    """
    package, (name, value) = _llguidance(), wish.wish
    if name in ("regex", "grammar", "choice"):
        large = too_large(name, value)
        if large is not None:
            raise ValueError(f"structured_outputs: {name} has {large}: make it smaller")
    given = {"json": _schema, "grammar": _lark}.get(name, lambda value: value)(value)
    try:
        text = _written(package.LLMatcher, name, given, wish.disable_any_whitespace)
        wrong = package.LLMatcher.validate_grammar(text)
    except (ValueError, RuntimeError) as error:  # the package's own
        wrong, text = str(error) or type(error).__name__, ""
    if wrong:
        raise {"regex": of_regex, "grammar": _of_grammar}.get(name, partial(of_value, name))(value, wrong)
    return str(text)


def _written(matcher: Any, name: str, given: Any, tight: bool) -> str:
    """A wish in llguidance's form.

    Args:
        matcher: the package's class.
    """
    if name == "regex":
        return str(matcher.grammar_from_regex(given))
    if name == "choice":
        given = f"start: {' | '.join(map(json.dumps, given))}"
    if name in ("choice", "grammar"):
        return str(matcher.grammar_from_lark(given))
    how = {**(_TIGHT if tight else _FREE), "coerce_one_of": True}
    schema = given if name == "json" else {"type": ["object", "array"]}
    return str(matcher.grammar_from_json_schema(json.dumps(schema), how))


def _lark(text: str) -> str:
    try:
        lark = str(import_module("llguidance.gbnf_to_lark").any_to_lark(text))
    except Exception as error:  # the package's own, of which some are plain ones
        raise of_ebnf(text, LLAMA, error) from error
    if lark != text and is_endless(text):
        raise ValueError("structured_outputs: grammar cannot be used: no text of its rule 'root' ever ends")
    return lark


def _of_grammar(text: str, wrong: str) -> ValueError:
    """The message for a grammar that llguidance refuses, which reads EBNF as Lark, where places are others."""
    return of_ebnf(text, LLAMA, RuntimeError(wrong)) if _EBNF.search(text) else of_lark(wrong)


def _schema(value: str | Mapping[str, Any]) -> Any:
    document = read_schema(value)
    schema = document.root
    found = uncountable(document) or next((_misread(part) for part, _ in document.parts if _misread(part)), None)
    if found is None and any("$id" in part for part, _ in document.parts if part is not schema):
        found = "an '$id' within it (references are looked up in the whole)"
    if found is not None:
        raise ValueError(f"structured_outputs: json has {found}, {NOT_KEPT}")
    return _closed(schema)


def _misread(part: Mapping[str, Any]) -> str | None:
    """What llguidance 1.9.1 lets pass though it is not valid; ``None`` if nothing is known."""
    bounds = [name for name in _BOUNDS if name in part]
    if len(bounds) > 1 and part.get("type") != "integer" and any(name.startswith("exclusive") for name in bounds):
        return f"{bounds[0]!r} beside {bounds[1]!r} of numbers"  # above 0 and below 0.5 it takes 0
    values = json.dumps([part.get("const"), part.get("enum")])
    if any(abs(int(digits)) >= 2**63 for digits in re.findall(r"(?<![\w.])-?\d{19,1000}(?![\w.])", values)):
        return "integers beyond 64 bits"  # which it rounds
    for pattern in (part.get("pattern", ""), *part.get("patternProperties", ())):
        if _CONTROLS.search(pattern):  # with [\x00-\x1f] it takes a quote
            return "a pattern with ranges of control characters"
    return None


def _closed(schema: Any) -> Any:
    """A copy of the schema that allows no members but those that a keyword names, where that can be said of each object
    alone; else the schema itself."""
    parts = [part for part, _ in Document(schema).parts]
    if any("allOf" in part or ("properties" in part and any(name in part for name in _MIXED)) for part in parts):
        return schema
    closed = deepcopy(schema)
    for part, _ in Document(closed).parts:
        if ("properties" in part or part.get("patternProperties")) and "unevaluatedProperties" not in part:
            part.setdefault("additionalProperties", False)  # type: ignore[attr-defined]
        if "prefixItems" in part and "unevaluatedItems" not in part:
            part.setdefault("items", False)  # type: ignore[attr-defined]
    return closed


class GuidanceCompiler:
    """Makes grammars ready for one model.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab: size of the model's vocabulary.
        ends: tokens that may end an output.
    """

    def __init__(self, tokenizer: Any, vocab: int, ends: list[int]) -> None:
        self._package, self._ends = _llguidance(), ends
        make = import_module("llguidance.hf").from_tokenizer
        self._tokenizer = make(tokenizer, n_vocab=vocab, eos_token=ends)
        self._words = -(-vocab // 32)

    def compile_grammar(self, grammar: str) -> "GuidanceGrammar":
        """Compile a grammar in llguidance's format.

        Raises:
            ValueError: it is too large.
        """
        matcher = self._package.LLMatcher(self._tokenizer, grammar, log_level=0)
        made = GuidanceGrammar(matcher, self._ends, self._words)
        made.new_matcher().fill_next_token_bitmask(np.empty((1, self._words), dtype=np.int32))
        return made


class GuidanceGrammar:
    """A grammar of which outputs can be followed."""

    def __init__(self, matcher: Any, ends: list[int], words: int) -> None:
        self._matcher, self._ends, self._words = matcher, ends, words

    def new_matcher(self) -> "GuidanceMatcher":
        return GuidanceMatcher(self._matcher.deep_copy(), self._ends, self._words)


class GuidanceMatcher:
    """Follows one output. Its methods are those of xgrammar's ``GrammarMatcher`` that are used here."""

    def __init__(self, matcher: Any, ends: list[int], words: int) -> None:
        self._matcher, self._ends, self._ended = matcher, frozenset(ends), False
        self._end_words = np.zeros(words, dtype=np.uint32)
        for token in ends:
            self._end_words[token // 32] |= np.uint32(1 << token % 32)

    def accept_token(self, token: int) -> bool:
        if token in self._ends:
            self._ended = self._may_end()
            return self._ended
        return not self._matcher.is_stopped() and bool(self._matcher.consume_token(token))

    def is_terminated(self) -> bool:
        return self._ended

    def fill_next_token_bitmask(self, mask: np.ndarray, index: int = 0) -> None:
        """Write the mask of the tokens that may come next into ``mask[index]`` (int32, one bit for each token).

        Raises:
            RuntimeError: llguidance has failed, or a limit of its own was reached.
        """
        row = mask[index].view(np.uint32)
        if self._matcher.is_stopped() and not self._matcher.is_error():
            row[:] = self._end_words
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())
        if self._may_end():
            row |= self._end_words
        else:
            row &= ~self._end_words

    def _may_end(self) -> bool:
        return not self._matcher.is_error() and bool(self._matcher.is_accepting())
