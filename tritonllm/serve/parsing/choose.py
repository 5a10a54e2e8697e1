"""Which reader an answer needs: by name, or by the model's chat template where that is clear. Names are vLLM's."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.serve.parsing.pieces import AnswerReader, Plain, ReaderChain
from tritonllm.serve.parsing.reasoning import END, START, harmony, think
from tritonllm.serve.parsing.source import SourceReader
from tritonllm.serve.parsing.tools import deepseek, hermes, llama3_json, mistral

# Name -> what begins a call. A token of that text is a special one in some vocabularies and must not be left out.
TOOL_PARSERS = {
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "openai": "<|channel|>",
}
REASONING_PARSERS = {
    "qwen3": START,
    "deepseek_r1": START,
    "deepseek_v3": START,
    "openai_gptoss": "<|channel|>",
}
NONE = "none"


def check_names(tools: str | None, reasoning: str | None) -> None:
    """Check the names of parsers that the user has chosen.

    Raises:
        ValueError: an unknown parser.
    """
    for option, name, known in (
        ("tool-call-parser", tools, TOOL_PARSERS),
        ("reasoning-parser", reasoning, REASONING_PARSERS),
    ):
        if name not in (None, NONE, *known):
            raise ValueError(f"--{option} must be one of {', '.join(known)} or none, got {name!r}")


_SIMPLE = {"hermes": hermes, "mistral": mistral, "deepseek_v3": deepseek, "deepseek_v31": deepseek}


def tool_parser_of(template: str) -> str | None:
    """The parser for calls as the template shows them to the model; ``None`` if that is not clear."""
    if "<|channel|>" in template:
        return "openai"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3"
    if "<tool_call>" in template and "arguments" in template and "<function=" not in template:
        return "hermes"
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return "llama3_json"
    return None


def reasoning_parser_of(template: str) -> str | None:
    """The parser for thoughts as the template shows them; ``None`` if that is not clear."""
    if "<|channel|>" in template:
        return "openai_gptoss"
    return "qwen3" if END in template else None


@dataclass(frozen=True)
class Formats:
    """What a server reads out of answers.

    Args:
        tools: one of :data:`TOOL_PARSERS`, or ``None``.
        reasoning: one of :data:`REASONING_PARSERS`, or ``None``.
        special: texts of the vocabulary's special tokens.
    """

    tools: str | None
    reasoning: str | None
    special: frozenset[str] = frozenset()

    def reader(self, prompt: str, tools: Collection[str], *, has_form: bool = False) -> AnswerReader:
        """A reader of one answer.

        Args:
            prompt: the text that the answer follows; a thought may have begun at its end.
            tools: names of those that may be called; none: calls are not looked for.
            has_form: a grammar holds the answer to a form from its first token on: it does not go on with a thought.
        """
        if self._in_channels(tools):
            return SourceReader(harmony)
        calls: AnswerReader = Plain()
        if tools and self.tools == "llama3_json":
            calls = SourceReader(llama3_json, tools)
        elif tools and self.tools is not None:
            calls = SourceReader(_SIMPLE[self.tools])
        if self.reasoning is None:
            return calls
        return ReaderChain(SourceReader(think, not has_form and self._is_inside(prompt.rstrip())), calls)

    def thought(self, prompt: str, tools: Collection[str], *, has_form: bool = False) -> ThoughtFormat | None:
        """How the thoughts are written that :meth:`reader` reads out of an answer; ``None`` if there are none.

        Args:
            prompt, tools, has_form: as for :meth:`reader`.
        """
        if self._in_channels(tools):
            return None if has_form else ThoughtFormat(kind="channels")
        if self.reasoning is None:
            return None
        return ThoughtFormat(
            kind="tags", begin=START, end=END, inside=not has_form and self._is_inside(prompt.rstrip())
        )

    def _in_channels(self, tools: Collection[str]) -> bool:
        return self.reasoning == "openai_gptoss" or (self.tools == "openai" and bool(tools))

    def may_think(self, prompt: str) -> bool:
        """Whether an answer to this prompt may begin with a thought between tags."""
        between_tags = self.reasoning is not None and REASONING_PARSERS[self.reasoning] == START
        return between_tags and not prompt.rstrip().endswith(END)

    def thinking(self, prompt: str, then: AnswerReader) -> AnswerReader:
        """A reader of a thought, if there is one, and of what follows it.

        Args:
            prompt: the text that the answer follows; a thought may have begun at its end.
            then: reads what follows.
        """
        return ReaderChain(SourceReader(think, self._is_inside(prompt.rstrip())), then)

    def _is_inside(self, prompt: str) -> bool:
        if self.reasoning == "deepseek_r1":  # its first templates leave the tag to the model, which may leave it out
            return not prompt.endswith(END)
        return prompt.endswith(START)

    def needs_special_tokens(self, tools: bool) -> bool:
        """Whether special tokens must be in the text that is read."""
        markers = {REASONING_PARSERS.get(self.reasoning or "")}
        if tools:
            markers.add(TOOL_PARSERS.get(self.tools or ""))
        return bool(markers & self.special)


def choose(tokenizer: Any, template: str | None, tools: str | None, reasoning: str | None) -> Formats:
    """Choose how calls of tools and thoughts are read out of a model's answers.

    Args:
        tokenizer: a tokenizer of transformers, or ``None``.
        template: the server's own chat template, if it has one.
        tools, reasoning: names of parsers, ``"none"``, or ``None`` to go by the template.
    """
    own = getattr(tokenizer, "chat_template", None)
    shown = template or (own if isinstance(own, str) else "")
    tools = tool_parser_of(shown) if tools is None else tools
    reasoning = reasoning_parser_of(shown) if reasoning is None else reasoning
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return Formats(
        None if tools == NONE else tools,
        None if reasoning == NONE else reasoning,
        frozenset(str(token) for token in added.values() if token.special),
    )
