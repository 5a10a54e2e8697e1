"""Lessons whose steps are computed once, and learners who type what a test says."""

import functools
import io
from dataclasses import dataclass

from tritonllm.teach.tutorial.lesson import Answer, Lesson, MultipleChoice, Number, Step
from tritonllm.teach.tutorial.lessons import LESSONS
from tritonllm.teach.tutorial.screen import Screen
from tritonllm.teach.tutorial.session import Session


@functools.cache
def steps_of(number: int) -> tuple[Step, ...]:
    """A lesson's steps; the engine runs once for all tests of a process."""
    return tuple(LESSONS[number - 1].steps())


@dataclass(frozen=True)
class Recorded(Lesson):
    """A lesson with steps that are there already."""

    recorded: tuple[Step, ...] = ()

    def steps(self):
        return iter(self.recorded)


def recorded(number: int, steps: tuple[Step, ...] | None = None) -> Recorded:
    """A lesson in its place, with its own steps or others."""
    lesson = LESSONS[number - 1]
    fields = {name: getattr(lesson, name) for name in Lesson.__dataclass_fields__}
    return Recorded(**fields, recorded=steps_of(number) if steps is None else steps)


def right_answer(answer: Answer) -> str:
    """What a learner types who knows it."""
    if isinstance(answer, Number):
        return repr(answer.value)
    return answer.letters[answer.right] if isinstance(answer, MultipleChoice) else answer.accepted[0]


def wrong_answers(answer: Answer) -> list[str]:
    """What others type: all known mistakes, or one that nobody thought of."""
    if isinstance(answer, Number):
        return [repr(value) for value in answer.traps] or [repr(answer.value + 10 * answer.tolerance + 1)]
    if isinstance(answer, MultipleChoice):
        return [letter for i, letter in enumerate(answer.letters) if i != answer.right]
    return list(answer.traps) or ["nonsense"]


def talk(progress, lesson, *typed: str, folder=None, end: str = "\n") -> str:
    """A session in which a learner types these lines and nothing more; what is on the screen then."""
    out = io.StringIO()
    Session(Screen(out, io.StringIO("\n".join(typed) + end)), progress, folder).run(lesson)
    return out.getvalue()
