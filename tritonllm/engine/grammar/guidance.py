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
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from tritonllm.config.sampling_params import StructuredOutputsParams
from tritonllm.engine.grammar.expressions import is_endless, too_large
from tritonllm.engine.grammar.json_schema import read_schema, uncountable
from tritonllm.engine.grammar.schema_document import Document
from tritonllm.system.extras import install

_BLANKS = r"( |\n {0,32}|\n\t{0,8})?"  # between two tokens of JSON
_TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE = {"whitespace_pattern": _BLANKS}
_BOUNDS = ("exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum")
_CONTROLS = re.compile(r"\\(x|u00)[01][0-9a-fA-F]-|[\x00-\x1f]-")
_MIXED = ("$ref", "anyOf", "oneOf")


def check_installed() -> None:
    """
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
    if name in ("json", "json_object"):
        schema = _schema(value) if name == "json" else {"type": ["object", "array"]}
        how = {**(_TIGHT if wish.disable_any_whitespace else _FREE), "coerce_one_of": True}
        text = package.LLMatcher.grammar_from_json_schema(json.dumps(schema), how)
    elif name == "regex":
        text = package.LLMatcher.grammar_from_regex(value)
    elif name == "choice":
        text = package.LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, value))}")
    else:
        text = _grammar(package, value)
    wrong = package.LLMatcher.validate_grammar(text)
    if wrong:
        raise ValueError(f"structured_outputs: {name} cannot be used: {' '.join(wrong.split())}")
    return str(text)


def _grammar(package: Any, text: str) -> str:
    if "::=" in text and is_endless(text):
        raise ValueError("structured_outputs: grammar cannot be used: no text of its rule 'root' ever ends")
    try:
        lark = import_module("llguidance.gbnf_to_lark").any_to_lark(text)
    except Exception as error:  # the package's own, of which some are plain ones
        raise ValueError(f"structured_outputs: grammar cannot be used: {' '.join(str(error).split())}") from error
    return str(package.LLMatcher.grammar_from_lark(lark))


def _schema(value: str | Mapping[str, Any]) -> Any:
    document = read_schema(value)
    schema = document.root
    found = uncountable(document) or next((_misread(part) for part, _ in document.parts if _misread(part)), None)
    if found is None and any("$id" in part for part, _ in document.parts if part is not schema):
        found = "an '$id' within it (references are looked up in the whole)"
    if found is not None:
        raise ValueError(f"structured_outputs: json has {found}, which a grammar cannot keep an output to: drop it")
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
    """The same, without members that no keyword names, where that can be said of each object alone."""
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
        tokenizer: of transformers, a fast one.
        vocab: size of the model's vocabulary.
        ends: tokens that may end an output.
    """

    def __init__(self, tokenizer: Any, vocab: int, ends: list[int]) -> None:
        self._package, self._ends = _llguidance(), ends
        make = import_module("llguidance.hf").from_tokenizer
        self._tokenizer = make(tokenizer, n_vocab=vocab, eos_token=ends)
        self._words = -(-vocab // 32)

    def compile_grammar(self, grammar: str) -> "GuidanceGrammar":
        """
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
        """
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
