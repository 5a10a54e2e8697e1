"""Parsers of one's own: Python files that name classes."""

import functools
import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonllm.serve.parsing.formats import ToolParser
from tritonllm.serve.parsing.pieces import AnswerReader
from tritonllm.serve.parsing.reasoning import Thoughts

NewReader = Callable[[str], AnswerReader]


@dataclass(frozen=True)
class Plugins:
    """Parsers of one's own by name, which count before those of the same name that are here.

    Args:
        tools: formats of calls.
        reasoning: formats of thoughts: their tags, or a class of readers that are made of the prompt's text.
    """

    tools: Mapping[str, ToolParser] = field(default_factory=dict)
    reasoning: Mapping[str, Thoughts | NewReader] = field(default_factory=dict)


@functools.cache
def load_plugins(tools: str | None, reasoning: str | None) -> Plugins:
    """Run the files, once in a process, and read which parsers they have.

    The file of ``tools`` has ``TOOL_PARSERS``, a dict from names to classes of readers
    (:class:`~tritonllm.serve.parsing.pieces.AnswerReader`), which are made of the tools that a request has: a mapping
    of names to what it says of each function. That of ``reasoning`` has ``REASONING_PARSERS``, from names to classes of
    readers, which are made of the prompt's text, or to :class:`~tritonllm.serve.parsing.reasoning.Thoughts`. A class
    may have ``markers``, texts whose tokens must not be left out of the answer where they are special.

    Args:
        tools, reasoning: paths of the files; it may be one for both.

    Raises:
        ValueError: a file cannot be run, or has no such dict; the message names the option.
    """
    calls = _named("--tool-parser-plugin", tools, "TOOL_PARSERS")
    thoughts = _named("--reasoning-parser-plugin", reasoning, "REASONING_PARSERS")
    return Plugins({name: _tool_parser(new) for name, new in calls.items()}, thoughts)


def _tool_parser(new: Callable[[Collection[str]], AnswerReader]) -> ToolParser:
    return ToolParser(new, tuple(getattr(new, "markers", ())))


def _named(option: str, path: str | None, variable: str) -> dict[str, Any]:
    if path is None:
        return {}
    spec = importlib.util.spec_from_file_location(f"tritonllm_{variable.lower()}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"{option} must be a Python file, as parser.py, got {path!r}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's, and may raise anything
        raise ValueError(f"{option}: {path} cannot be run: {type(error).__name__}: {error}") from error
    found = getattr(module, variable, None)
    if not isinstance(found, dict) or not all(isinstance(name, str) and name for name in found):
        raise ValueError(f"{option}: {path} must have {variable}, a dict from names to classes")
    for name, value in found.items():
        if not callable(value) and not isinstance(value, Thoughts):
            raise ValueError(f"{option}: {variable}[{name!r}] in {path} must be a class, got {value!r}")
    return found
