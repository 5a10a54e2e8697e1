"""Which reader an answer needs: by name, or by the model's chat template where that is clear. Names are vLLM's."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.engine.data.control import THOUGHTS
from tritonllm.serve.parsing.formats import (
    CHANNEL,
    REASONING_PARSERS,
    SHOWN_THOUGHTS,
    SHOWN_TOOLS,
    TOOL_PARSERS,
    Shown,
    ToolParser,
)
from tritonllm.serve.parsing.pieces import AnswerReader, Plain, ReaderChain
from tritonllm.serve.parsing.plugins import NewReader, Plugins
from tritonllm.serve.parsing.reasoning import Thoughts, harmony, think
from tritonllm.serve.parsing.source import SourceReader

NONE, AUTO = "none", "auto"
logger = logging.getLogger(__name__)


def check_names(tools: str | None, reasoning: str | None, own: Plugins | None = None) -> None:
    """Check the names of parsers that the user has chosen.

    Args:
        own: parsers of the user's own.

    Raises:
        ValueError: an unknown parser.
    """
    own = own or Plugins()
    known: Mapping[str, Any]
    for option, name, known in (
        ("tool-call-parser", tools, {**TOOL_PARSERS, **own.tools}),
        ("reasoning-parser", reasoning, {**REASONING_PARSERS, **own.reasoning}),
    ):
        if name not in (None, NONE, AUTO, *known):
            raise ValueError(f"--{option} must be one of {', '.join(known)}, auto or none, got {name!r}")


def tool_parser_of(template: str) -> str | None:
    """The parser for calls as the template shows them to the model; ``None`` if that is not clear."""
    return _by_template("tool-call-parser", None, SHOWN_TOOLS, template, ())


def reasoning_parser_of(template: str) -> str | None:
    """The parser for thoughts as the template shows them; ``None`` if that is not clear."""
    return _by_template("reasoning-parser", None, SHOWN_THOUGHTS, template, ())


def _by_template(
    option: str, name: str | None, formats: Iterable[Shown], template: str, known: Collection[str]
) -> str | None:
    """The parser of that name; with ``auto``, or without a name, what the template shows."""
    if name not in (None, AUTO):
        return None if name == NONE else name
    found = next((one for one in formats if one.fits(template)), None)
    if found is not None:
        texts = " and ".join(repr(text) for text in found.all_of)
        logger.info("--%s is %s: the chat template has %s", option, found.name, texts)
        return found.name
    if name == AUTO:
        raise ValueError(
            f"--{option} auto: {'the chat template' if template else 'there is no chat template, which'} does not tell "
            f"which: give one of {', '.join(known)}, or none"
        )
    return None


@dataclass(frozen=True)
class Formats:
    """What a server reads out of answers.

    Args:
        tools: the name of a format of calls, or ``None``.
        reasoning: the name of a format of thoughts, or ``None``.
        special: texts of the vocabulary's special tokens.
        own: parsers of the user's own.
    """

    tools: str | None
    reasoning: str | None
    special: frozenset[str] = frozenset()
    own: Plugins = field(default_factory=Plugins)

    def reader(self, prompt: str, tools: Collection[str], *, has_form: bool = False) -> AnswerReader:
        """A reader of one answer.

        Args:
            prompt: the text that the answer follows; a thought may have begun at its end.
            tools: names of those that may be called; a mapping has beside each what the request says of it. None: calls
                are not looked for.
            has_form: a grammar holds the answer to a form from its first token on: it does not go on with a thought.
        """
        if self._in_channels(tools):
            return SourceReader(harmony)
        parser = self._tool_parser()
        calls = parser.new(tools) if tools and parser is not None else Plain()
        thoughts = self._thoughts()
        if thoughts is None:
            return calls
        if isinstance(thoughts, Thoughts):
            inside = not has_form and thoughts.is_inside(prompt)
            return ReaderChain(SourceReader(think, thoughts, inside), calls)
        return calls if has_form else ReaderChain(thoughts(prompt), calls)

    def thought(self, prompt: str, tools: Collection[str], *, has_form: bool = False) -> ThoughtFormat | None:
        """How the thoughts are written that :meth:`reader` reads out of an answer; ``None`` if there are none, or if
        that is known to a class of the user's own only.

        Args:
            prompt, tools, has_form: as for :meth:`reader`.
        """
        if self._in_channels(tools):
            return None if has_form else ThoughtFormat(kind="channels")
        thoughts = self._thoughts()
        if not isinstance(thoughts, Thoughts):
            return None
        inside = not has_form and thoughts.is_inside(prompt)
        return ThoughtFormat(kind="tags", begin=thoughts.begin, end=thoughts.end, inside=inside)

    def _tool_parser(self) -> ToolParser | None:
        return None if self.tools is None else self.own.tools.get(self.tools) or TOOL_PARSERS[self.tools]

    def _thoughts(self) -> Thoughts | NewReader | None:
        if self.reasoning is None:
            return None
        return self.own.reasoning.get(self.reasoning) or REASONING_PARSERS[self.reasoning]

    def _in_channels(self, tools: Collection[str]) -> bool:
        thoughts = self.reasoning is not None and self._thoughts() is None
        return thoughts or (bool(tools) and self._tool_parser() is TOOL_PARSERS["openai"])

    def may_think(self, prompt: str) -> bool:
        """Whether an answer to this prompt may begin with a thought between tags that are tokens of some models."""
        thoughts = self._thoughts()
        if not isinstance(thoughts, Thoughts) or (thoughts.begin, thoughts.end) not in THOUGHTS:
            return False
        return not prompt.rstrip().endswith(thoughts.end)

    def thinking(self, prompt: str, then: AnswerReader) -> AnswerReader:
        """A reader of a thought, if there is one, and of what follows it.

        Args:
            prompt: the text that the answer follows, for which :meth:`may_think`; a thought may have begun at its end.
            then: reads what follows.
        """
        thoughts = self._thoughts()
        assert isinstance(thoughts, Thoughts)
        return ReaderChain(SourceReader(think, thoughts, thoughts.is_inside(prompt)), then)

    def needs_special_tokens(self, tools: bool) -> bool:
        """Whether special tokens must be in the text that is read."""
        markers = set[str]()
        thoughts, parser = self._thoughts(), self._tool_parser()
        if isinstance(thoughts, Thoughts):
            markers |= {thoughts.begin, thoughts.end, *thoughts.calls}
        elif self.reasoning is not None and thoughts is None:
            markers.add(CHANNEL)
        else:
            markers |= set(getattr(thoughts, "markers", ()))
        if tools and parser is not None:
            markers |= set(parser.markers)
        return bool(markers & self.special)


def choose(
    tokenizer: Any, template: str | None, tools: str | None, reasoning: str | None, own: Plugins | None = None
) -> Formats:
    """Choose how calls of tools and thoughts are read out of a model's answers.

    Args:
        tokenizer: a tokenizer of transformers, or ``None``.
        template: the server's own chat template, if it has one.
        tools, reasoning: names of parsers, ``"none"``, or ``None`` or ``"auto"`` to go by the template.
        own: parsers of the user's own.

    Raises:
        ValueError: ``"auto"``, and the template does not tell.
    """
    own = own or Plugins()
    given = getattr(tokenizer, "chat_template", None)
    shown = template or (given if isinstance(given, str) else "")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return Formats(
        _by_template("tool-call-parser", tools, SHOWN_TOOLS, shown, {**TOOL_PARSERS, **own.tools}),
        _by_template("reasoning-parser", reasoning, SHOWN_THOUGHTS, shown, {**REASONING_PARSERS, **own.reasoning}),
        frozenset(str(token) for token in added.values() if token.special),
        own,
    )
