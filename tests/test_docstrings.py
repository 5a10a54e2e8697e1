"""Docstrings of the package say what a thing is: the first line, each argument and attribute, and the result.

A docstring that begins with the name of a section says nothing of the thing itself, and a fragment (``of the step.``,
``whose.``, ``the same.``) leaves the reader to guess the noun. Only forms are looked for that are wrong wherever they
stand; that a sentence is true, nobody can check here.
"""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tritonllm"
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Examples?|Notes?)\s*:")
ENTRY = re.compile(r"([A-Za-z_*][\w*]*(?:, [A-Za-z_*][\w*]*)*):\s*(.*)")
# What follows a word that stands for a thing which was named before: an end, or what belongs to the thing.
_ALONE = r"(?=\s*$|[.,;:]|\s+(?:of|that|which|who|whose|at|as|for|from|with|in|on|by|to|once|again)\b)"
PLACEHOLDER = re.compile(
    rf"(?:whose|them|theirs|hers|they)\b|it\b|its\s*[.,;:]|(?:the same|those|these|this one's|that){_ALONE}",
    re.IGNORECASE,
)
FRAGMENT = re.compile(r"of\b(?!\s+(?:how|which|what)\b)", re.IGNORECASE)
# ``the engine's.``, ``[B] int64, whose.``: the thing that is owned, or the owner, is missing.
OWNED = re.compile(
    r"(?:(?:the|a|an|this|each|every)(?: [\w-]+){1,2}(?:'s|s')\s*[.,;:]|.*, whose\s*[.;:])", re.IGNORECASE
)


def _is_fragment(text: str) -> bool:
    return bool(PLACEHOLDER.match(text) or FRAGMENT.match(text) or OWNED.match(text))


def _entries(docstring: str) -> list[tuple[str, str]]:
    """Name and text of each entry of the sections ``Args`` and ``Attributes``."""
    entries: list[tuple[str, str]] = []
    inside, depth = False, None
    for line in docstring.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.strip() and not indent:
            inside, depth = line.strip() in ("Args:", "Attributes:"), None
        elif line.strip() and inside:
            depth = indent if depth is None else depth
            found = ENTRY.fullmatch(line.strip())
            if indent == depth and found is not None:
                entries.append((found[1], found[2]))
            elif entries:
                entries[-1] = entries[-1][0], f"{entries[-1][1]} {line.strip()}"
    return entries


def _faults(docstring: str) -> list[str]:
    """What is wrong with a docstring; empty if nothing is."""
    first = docstring.splitlines()[0]
    faults = []
    if SECTION.match(first):
        faults.append(f"begins with {first!r}: say first what it is")
    elif _is_fragment(first):
        faults.append(f"{first!r} is a fragment: name the thing")
    for result in re.findall(r"^(?:Returns|Yields):\n\s+(.*)", docstring, re.MULTILINE):
        if _is_fragment(result):
            faults.append(f"the result {result!r} is a fragment: name the thing")
    for name, text in _entries(docstring):
        bare = len(re.findall(r"[\w'-]+", text)) < 2 and "`" not in text
        if bare or _is_fragment(text) or re.match(r"that\b", text):
            faults.append(f"{name}: {text!r} is a fragment: name the thing")
    return faults


def test_each_docstring_says_what_the_thing_is() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                name = getattr(node, "name", "the module")
                where = f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 1)} {name}"
                found += [f"{where}: {fault}" for fault in _faults(docstring or " ")]
    assert found == []


@pytest.mark.parametrize(
    "docstring",
    [
        "Raises:\n    ValueError: it is too large.",
        "Args:\n    path: where the file is.",
        "Of a frame: its kind and its size.",
        "Them, in order of arrival.",
        "The same, without padding.",
        "Those that have ended.",
        "It is awake.",
        "A request.\n\nArgs:\n    request_id: whose.",
        "A request.\n\nArgs:\n    token_ids: them.",
        "A drafter.\n\nAttributes:\n    model: the same.",
        "A step.\n\nArgs:\n    rows: of the step.",
        "A rank.\n\nArgs:\n    config: the engine's, as the user gave it.",
        "A draw.\n\nArgs:\n    seats: ``[R]`` int32, whose.",
        "Preempt requests.\n\nReturns:\n    Them, the last one first.",
        "Threads.\n\nArgs:\n    count: threads.\n    wait: that they may take.",
    ],
)
def test_a_fragment_is_found(docstring: str) -> None:
    assert _faults(docstring)


@pytest.mark.parametrize(
    "docstring",
    [
        "The same place in the parameter, for a tensor without the first dimension.",
        "Those rows of ``logits[R, V]`` that tokens were drawn from.",
        "A trace.\n\nArgs:\n    steps: of how many steps the kernels are recorded.\n    dtype: ``int32``.",
        "Check a value.\n\nArgs:\n    name: see\n        :func:`check`.\n\nRaises:\n    ValueError: it is bad.",
    ],
)
def test_a_sentence_passes(docstring: str) -> None:
    assert _faults(docstring) == []
