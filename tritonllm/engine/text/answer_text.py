"""Which text of an output is its answer, where the model thinks first: stop strings count there only. No torch.

Each token is told once, in its order, so it does not matter how many come in a step. The server reads thoughts out of
whole answers in the same formats (:mod:`tritonllm.serve.parsing.reasoning`); a test compares both.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.engine.data.control import THOUGHTS

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
LONGEST = max(map(len, ENDS))
PROMPT_TOKENS = 16  # at the prompt's end, in which a tag is looked for
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=[^\s<]")


class TextPart(NamedTuple):
    """Text of the answer from ``begin`` to ``end``; what is new of it begins at ``new``."""

    begin: int
    new: int
    end: int


class AnswerText(Protocol):
    """Follows the text of one output.

    Attributes:
        decided: how many characters are known to be thought or answer.
    """

    decided: int

    def take(self, text: str, token: int | None, ended: bool) -> list[TextPart]:
        """What is new of the answer.

        Args:
            text: the text of the whole output so far.
            token: the newest token id of the output, which may have no text; ``None`` if none has come.
            ended: whether the output has ended.
        """


class Tagged:
    """The answer behind a thought between two tags. Blanks around the tags are nobody's.

    Args:
        begin, end: the tags.
        tokens: the token ids of the two tags, which count as well where the text does not show them; ``None`` without.
        inside: whether the prompt has begun the thought.
    """

    def __init__(self, begin: str, end: str, tokens: tuple[int, int] | None, inside: bool) -> None:
        self._begin, self._end, self._inside = begin, end, inside
        self._tokens = tokens or (-1, -1)
        self._state = "before"
        self._at = 0  # where the thought, or the answer, begins; or up to where the thought's end was looked for
        self._seen = 0
        self.decided = 0

    def take(self, text: str, token: int | None, ended: bool) -> list[TextPart]:
        if self._state == "before":
            self._decide(text, token, ended)
        if self._state == "thought":
            self._look_for_end(text, token)
        if self._state == "gap":
            self._at = len(text) - len(text[self._at :].lstrip())
            self._state = "gap" if self._at == len(text) else "answer"
        self.decided = 0 if self._state == "before" else len(text)
        if self._state != "answer":
            return []
        new, self._seen = max(self._at, self._seen), len(text)
        return [TextPart(self._at, new, len(text))]

    def _decide(self, text: str, token: int | None, ended: bool) -> None:
        said = text.lstrip()
        if said.startswith(self._begin):
            self._state, self._at = "thought", len(text) - len(said) + len(self._begin)
        elif not said and token == self._tokens[0]:
            self._state, self._at = "thought", len(text)
        elif not self._begin.startswith(said) or ended:
            self._state = "thought" if self._inside else "answer"
        elif self._inside and token == self._tokens[1]:  # an empty one
            self._state = "thought"

    def _look_for_end(self, text: str, token: int | None) -> None:
        found = text.find(self._end, self._at)
        if found >= 0:
            self._state, self._at = "gap", found + len(self._end)
        elif token == self._tokens[1]:
            self._state, self._at = "gap", len(text)
        else:
            self._at = max(self._at, len(text) - len(self._end) + 1)


class Channels:
    """The answer in gpt-oss's harmony format: all messages but those of the channel ``analysis``."""

    def __init__(self) -> None:
        self._in_header = True
        self._thinks = False
        self._at = 0  # where the header, or the message, begins
        self._seen = 0  # up to where its end was looked for
        self._new = 0
        self.decided = 0

    def take(self, text: str, token: int | None, ended: bool) -> list[TextPart]:
        parts: list[TextPart] = []
        while self._read_header(text) if self._in_header else self._read_message(text, parts):
            pass
        if self._in_header:
            self.decided = self._at
            if ended and text[self._at :].strip():  # in no format
                parts.append(TextPart(self._at, self._at, len(text)))
        else:
            self.decided = len(text) if ended else len(text) - _beginning(text[max(self._at, len(text) - LONGEST) :])
            self._add(parts, self.decided)
        return parts

    def _read_header(self, text: str) -> bool:
        found = text.find(MESSAGE, self._seen)
        if found < 0:
            self._seen = max(self._at, len(text) - len(MESSAGE) + 1)
            return False
        header = text[self._at : found]
        name = _NAME.search(header)
        self._thinks = name is not None and name[1] == "analysis" and _RECIPIENT.search(header) is None
        self._in_header = False
        self._at = self._seen = self._new = found + len(MESSAGE)
        return True

    def _read_message(self, text: str, parts: list[TextPart]) -> bool:
        found = [(at, mark) for mark in ENDS if (at := text.find(mark, self._seen)) >= 0]
        if not found:
            self._seen = max(self._at, len(text) - LONGEST + 1)
            return False
        end, mark = min(found)
        self._add(parts, end)
        self._in_header = True
        self._at = self._seen = end + len(mark)
        return True

    def _add(self, parts: list[TextPart], end: int) -> None:
        if not self._thinks and end > self._new:
            parts.append(TextPart(self._at, self._new, end))
            self._new = end


def _beginning(text: str) -> int:
    """How many of the last characters may be the beginning of a message's end."""
    sizes = range(min(len(text), LONGEST - 1), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in ENDS)), 0)


class ThoughtMarks:
    """How the model of a tokenizer may write thoughts.

    Args:
        vocabulary: token ids by token, of the tokenizer.
    """

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        texts = {CHANNEL, *(tag for tags in THOUGHTS for tag in tags)}
        self._tokens = {text: vocabulary[text] for text in texts if text in vocabulary}
        self._tags = next((tags for tags in THOUGHTS if self._tokens.keys() >= set(tags)), THOUGHTS[0])

    def follow(self, form: ThoughtFormat, prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> AnswerText:
        """Returns an object that splits the text of one output into thought and answer.

        Args:
            form: how the output writes its thoughts, as the request says.
            prompt: the prompt's token ids, which may have begun a thought.
            decode: makes the text of tokens, special ones among it.
        """
        if form.kind == "channels" or (form.kind is None and form.begin is None and CHANNEL in self._tokens):
            return Channels()
        begin, end = (form.begin, form.end) if form.begin is not None and form.end is not None else self._tags
        tokens = (self._tokens[begin], self._tokens[end]) if self._tokens.keys() >= {begin, end} else None
        inside = form.inside
        if inside is None and tokens is not None:
            inside = next((token == tokens[0] for token in reversed(prompt) if token in tokens), False)
        elif inside is None:
            inside = decode(prompt[-PROMPT_TOKENS:]).rstrip().endswith(begin)
        return Tagged(begin, end, tokens, inside)
