"""What a lesson is made of: prose, tables, questions and exercises.

A lesson's steps come from a generator, so what they say is computed when the learner gets there, by the engine and the
kernels of this package. An answer is a value that such a run gave, never one that somebody typed in.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tritonllm.moved import renamed

# Perhaps with commas between thousands, and with a unit, which is not looked at.
NUMBER = re.compile(r"([-+]?(?=[\d.]*\d)(?:\d{1,3}(?:[,_]\d{3})+|\d*)(?:\.\d*)?)\s*[A-Za-z %.]*")


class NotAnAnswer(ValueError):
    """What was typed cannot be an answer of this kind. It counts as no try, and the message says what would do."""


@dataclass(frozen=True)
class Say:
    """Prose: paragraphs with blank lines between them. Lines that begin with four blanks stay as they are."""

    text: str


@dataclass(frozen=True)
class ValueTable:
    """A table of values."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Number:
    """An answer that is a number.

    Args:
        value: what the run gave.
        tolerance: how far off an answer may be.
        traps: what a learner who made a certain mistake would answer -> what the mistake is.
    """

    value: float
    tolerance: float = 0.0
    traps: Mapping[float, str] | Mapping[int, str] = field(default_factory=dict)

    def is_right(self, text: str) -> bool:
        """Whether an answer is this number, or near enough to it.

        Raises:
            NotAnAnswer: it is not a number.
        """
        return abs(self._number(text) - self.value) <= self.tolerance

    def trap(self, text: str) -> str | None:
        """What the mistake was, if it is a known one."""
        number = self._number(text)
        return next((why for value, why in self.traps.items() if abs(number - value) <= self.tolerance), None)

    def __str__(self) -> str:
        return f"{self.value:.3g}" if self.tolerance else f"{self.value:g}" if self.value < 1e6 else f"{self.value:.0f}"

    @staticmethod
    def _number(text: str) -> float:
        found = NUMBER.fullmatch(text.strip())
        if found is None:
            raise NotAnAnswer("The answer is a number, for example 3 or 0.5.")
        return float(found[1].replace(",", "").replace("_", ""))


@dataclass(frozen=True)
class MultipleChoice:
    """One of several answers, which the learner names by its letter.

    Args:
        options: what to choose from, in order: a, b, c, ...
        right: index of the one that the run gave.
        traps: index of a wrong one -> why it is wrong.
    """

    options: Sequence[str]
    right: int
    traps: Mapping[int, str] = field(default_factory=dict)

    def is_right(self, text: str) -> bool:
        """Whether an answer is the letter of the right choice.

        Raises:
            NotAnAnswer: it is none of the letters.
        """
        return self._index(text) == self.right

    def trap(self, text: str) -> str | None:
        return self.traps.get(self._index(text))

    def __str__(self) -> str:
        return f"{self.letters[self.right]}) {self.options[self.right]}"

    @property
    def letters(self) -> str:
        return "abcdefgh"[: len(self.options)]

    def _index(self, text: str) -> int:
        letter = text.strip().lower().rstrip(").")
        if len(letter) != 1 or letter not in self.letters:
            raise NotAnAnswer(f"Type one of the letters {', '.join(self.letters)}.")
        return self.letters.index(letter)


@dataclass(frozen=True)
class ShortText:
    """A short text; capitals and blanks around it do not matter."""

    accepted: Sequence[str]
    traps: Mapping[str, str] = field(default_factory=dict)

    def is_right(self, text: str) -> bool:
        """Whether an answer is one of the accepted texts.

        Raises:
            NotAnAnswer: it is empty.
        """
        return self._plain(text) in map(self._plain, self.accepted)

    def trap(self, text: str) -> str | None:
        return next((why for wrong, why in self.traps.items() if self._plain(wrong) == self._plain(text)), None)

    def __str__(self) -> str:
        return self.accepted[0]

    @staticmethod
    def _plain(text: str) -> str:
        plain = text.strip().strip("\"'`.").lower()
        if not plain:
            raise NotAnAnswer("The answer is a word or two.")
        return plain


Answer = Number | MultipleChoice | ShortText


@dataclass(frozen=True)
class LessonQuestion:
    """A question of a lesson.

    Args:
        question: what is asked; it needs the idea that was just explained.
        answer: the right answer, from a run.
        hints: shown one after the other, for ``?`` and after wrong answers.
        why: said when the answer is known, right or shown.
    """

    question: str
    answer: Answer
    hints: Sequence[str]
    why: str


@dataclass(frozen=True)
class Exercise:
    """A file with holes that the learner fills in; ``tritonllm tutorial check N FILE`` checks it."""

    text: str


Step = Say | ValueTable | LessonQuestion | Exercise


@dataclass(frozen=True)
class Lesson:
    """A lesson's place in the list; its steps are in ``lessons/<name>.py``, which is imported when it begins.

    Args:
        number: the number of the lesson, from 1.
        name: the name of the module.
        title: the title in the list.
        minutes: about how long it takes.
        paper: where the idea was published, in one line.
        has_exercise: whether ``solutions/<name>.py`` has an exercise in it.
        interpreted: whether it is a kernel, whose check runs in Triton's interpreter.
    """

    number: int
    name: str
    title: str
    minutes: int
    paper: str
    has_exercise: bool = False
    interpreted: bool = False

    def steps(self) -> Iterator[Step]:
        """Compute the steps one by one."""
        module = importlib.import_module(f"tritonllm.teach.tutorial.lessons.{self.name}")
        steps: Callable[[], Iterator[Step]] = module.steps
        return steps()


__getattr__ = renamed(
    __name__, {"Ask": "LessonQuestion", "Show": "ValueTable", "Choice": "MultipleChoice", "Words": "ShortText"}
)  # names that the documents gave
