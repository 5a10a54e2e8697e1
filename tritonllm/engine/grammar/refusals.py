"""Why a library refuses a grammar, in words for who wrote it. No torch.

A library's own text is for its developers: it names lines of its sources, or another text than the user's. What is
repeated of it is a place, or a keyword of the user's.
"""

import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from tritonllm.engine.grammar.ebnf import Dialect, mistake, place, shown
from tritonllm.engine.grammar.expressions import ignored
from tritonllm.engine.grammar.grammar_rules import Rules
from tritonllm.engine.grammar.patterns import TooLarge, Unreadable, whole

logger = logging.getLogger(__name__)
NOT_KEPT = "which a grammar cannot keep an output to: drop it"
_HALF = re.compile(r"[\ud800-\udfff]")
_EXPECTED = """expected rules as in root ::= "text" [a-z]* (other | "x")"""
_EXPECTED_LARK = """expected rules as in start: "text" /[a-z]*/ (other | "x")"""
_XGRAMMARS_PLACE = re.compile(r"line (\d+), column (\d+): ")
_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_OF_LARK = (  # how llguidance begins -> what is wrong
    (re.compile(r'unknown name: "([\w.-]+)"'), "the rule or token {} is not defined"),
    (re.compile(r'duplicate (?:rule|token): "([\w.-]+)"'), "{} is defined a second time"),
    (
        re.compile(r'circular reference in token "([\w.-]+)"'),
        "the token {} holds itself: write a rule, in small letters",
    ),
    (re.compile("invalid regex"), "its regular expression cannot be followed"),
    (re.compile("range end must be"), "the second number of a repetition is the smaller one"),
    (re.compile("failed to compile JSON schema"), "its JSON schema cannot be kept"),
    (re.compile("Unknown common regex"), "what it imports is not known"),
)
_OF_SCHEMAS = (  # as above
    (re.compile(r"Unimplemented keys: \[\"([$\w]+)\""), f"has {{}}, {NOT_KEPT}"),
    (re.compile(r"Unknown format: (\S+)"), f"has 'format': {{}}, {NOT_KEPT}"),
    (re.compile("Unsatisfiable schema"), "is not a JSON schema that can be followed: no value is valid"),
    (re.compile("patternProperty regexes"), f"has 'patternProperties' of which a name may match two, {NOT_KEPT}"),
    (re.compile("Value for 'multipleOf'"), f"has 'multipleOf' of so many digits, {NOT_KEPT}"),
    (re.compile("Resource|Anchor"), "has a '$schema', '$id' or '$ref' that names nothing in it: drop it"),
)


def _refused(name: str, what: str) -> ValueError:
    return ValueError(f"structured_outputs: {name} {what}")


def of_ebnf(text: str, dialect: Dialect, error: Exception) -> ValueError:
    """The message for a grammar in EBNF that a library refuses.

    Args:
        dialect: the form of EBNF that the library reads.
        error: what the library raised.
    """
    if isinstance(error, RecursionError):
        return _refused("grammar", "cannot be used: its parentheses are nested too deep")
    found = mistake(text, dialect)
    if found is None:
        at = _place_of(text, error)
        found = None if at is None else place(text, at, _EXPECTED)
    return _refused("grammar", f"cannot be used: {_unexplained(error, _EXPECTED) if found is None else found}")


def _place_of(text: str, error: Exception) -> int | None:
    """The character at which a library gave up; ``None`` if it does not say."""
    position = getattr(error, "pos", None)
    if position is not None:
        return int(position.pos)
    # xgrammar cuts a character in two where it repeats it, so that its message cannot be decoded
    said = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    found = _XGRAMMARS_PLACE.search(said)
    lines = text.encode().split(b"\n")
    if found is None or int(found[1]) > len(lines):
        return None
    before = b"\n".join([*lines[: int(found[1]) - 1], lines[int(found[1]) - 1][: int(found[2]) - 1]])
    return len(before.decode(errors="replace"))


def _unexplained(error: Exception | str, what: str) -> str:
    logger.info("a grammar was refused: %s", ascii(str(error)))
    return what


def of_lark(wrong: str) -> ValueError:
    """The message for a grammar in Lark's form that a library refuses.

    Args:
        wrong: what llguidance says.
    """
    found = _LARK_PLACE.match(wrong)
    where, said = ("", wrong) if found is None else (f"line {found[1]}, column {found[2]}: ", wrong[found.end() :])
    return _refused(
        "grammar", f"cannot be used: {where}{_words(said, _OF_LARK) or _unexplained(wrong, _EXPECTED_LARK)}"
    )


def of_regex(regex: str, wrong: str) -> ValueError:
    """The message for a regular expression that a library refuses.

    Args:
        wrong: what the library says.
    """
    found = ignored(regex)
    if found is not None:
        return _refused("regex", f"has {found}, {NOT_KEPT}")
    try:
        whole(regex, Rules())
    except TooLarge:
        pass
    except Unreadable as error:
        return _refused("regex", f"cannot be used: it has {error}")
    return _refused("regex", _unexplained(wrong, "cannot be used: a part of it cannot be followed"))


def of_value(name: str, value: Any, wrong: str) -> ValueError:
    """The message for a JSON schema, or for choices, that a library refuses.

    Args:
        wrong: what the library says.
    """
    said = json.loads(value) if name == "json" and isinstance(value, str) else value
    if _HALF.search(json.dumps(said, ensure_ascii=False)):
        return _refused(name, f"has half of a surrogate pair, {NOT_KEPT}")
    if wrong.startswith("regex parse error"):
        return _refused(name, f"has a pattern that cannot be read, {NOT_KEPT}")
    return _refused(name, _words(wrong, _OF_SCHEMAS) or _unexplained(wrong, f"has a part {NOT_KEPT}"))


def _words(said: str, table: Sequence[tuple["re.Pattern[str]", str]]) -> str | None:
    for pattern, words in table:
        found = pattern.match(said)
        if found is not None:
            return words.format(*map(shown, found.groups()))
    return None
