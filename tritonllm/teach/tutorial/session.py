"""The conversation: show a lesson's steps, ask its questions, and remember how far the learner came."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tritonllm.teach.tutorial import workshop
from tritonllm.teach.tutorial.lesson import (
    Exercise,
    Lesson,
    LessonQuestion,
    MultipleChoice,
    NotAnAnswer,
    Say,
    Step,
    ValueTable,
)
from tritonllm.teach.tutorial.lessons import LESSONS
from tritonllm.teach.tutorial.progress import Progress, ProgressFile, Reached
from tritonllm.teach.tutorial.screen import Screen

HELP = "At a question: `?` is a hint, `s` shows the answer, `q` quits and keeps your progress."
AT_EXERCISE = "`w` writes the file here, `c` checks it, `s` shows the solution, `q` quits, Enter goes on."


class Quit(Exception):
    """The learner has had enough for now."""


class Session:
    """Leads a learner through lessons.

    Args:
        screen: the terminal.
        progress: the file that remembers how far the learner is.
        folder: the folder that exercises are written to.
    """

    def __init__(self, screen: Screen, progress: ProgressFile, folder: Path) -> None:
        self._screen, self._progress, self._folder = screen, progress, folder

    def run(self, lesson: Lesson | None) -> None:
        """Go through lessons until the last one ends or the learner quits.

        Args:
            lesson: begin with it, from its beginning; ``None``: continue.

        Raises:
            ValueError: the progress file holds something else.
        """
        progress = self._progress.read()
        start = 0
        if lesson is None:
            lesson = next_lesson(progress)
            if lesson is None:
                self._screen.say("You have finished all lessons. `tritonllm tutorial --lesson N` repeats one.")
                return
            start = progress.of(lesson.number).step
        self._screen.say(HELP)
        self._screen.line("The engine starts for the lesson's first page, which takes some seconds.")
        try:
            while True:
                self._go_through(lesson, start)
                if lesson.number == len(LESSONS):
                    self._screen.say("That was the last lesson. `tritonllm tutorial --list` shows what you have done.")
                    return
                lesson, start = LESSONS[lesson.number], 0
                self._enter(f"Enter goes on with lesson {lesson.number}, {lesson.title}; q quits: ")
        except Quit:
            self._screen.say("Your progress is kept. `tritonllm tutorial` continues here.")

    def _go_through(self, lesson: Lesson, start: int) -> None:
        """Show a lesson's steps from ``start`` on, and what is needed to understand that."""
        self._screen.heading(f"Lesson {lesson.number}: {lesson.title}")
        self._screen.line(f"About {lesson.minutes} minutes. {lesson.paper}.")
        steps, again = fast_forward(lesson, start)
        if start and not again:  # the lesson is another one than it was
            start = 0
        self._progress.change(lesson.number, step=start)
        before: Step | None = None
        for step in again:
            self._show(step)
            if isinstance(step, LessonQuestion):
                self._screen.say(f"{step.question} The answer was {step.answer}.")
            before = step
        for index, step in enumerate(steps, start):
            if isinstance(step, Say) and before is not None and self._screen.is_terminal:
                self._enter("\n[Enter] ")
            self._take(lesson, step)
            self._progress.change(lesson.number, step=index + 1)
            before = step
        self._progress.change(lesson.number, step=0, finished=True)
        self._screen.say(f"Lesson {lesson.number} is done.", "bold")

    def _take(self, lesson: Lesson, step: Step) -> None:
        self._show(step)
        if isinstance(step, LessonQuestion):
            self._question(step)
        elif isinstance(step, Exercise):
            self._exercise(lesson)

    def _show(self, step: Step) -> None:
        if isinstance(step, Say | Exercise):
            self._screen.say(step.text)
        elif isinstance(step, ValueTable):
            self._screen.table(step)

    def _question(self, ask: LessonQuestion) -> None:
        self._screen.say(ask.question, "bold")
        if isinstance(ask.answer, MultipleChoice):
            for letter, option in zip(ask.answer.letters, ask.answer.options, strict=True):
                self._screen.line(f"  {letter}) {option}")
        hints: Iterator[str] = iter(ask.hints)
        while True:
            typed = self._typed("> ")
            if typed == "s":
                self._screen.say(f"The answer is {ask.answer}.")
                break
            if typed == "?":
                self._screen.say(next(hints, None) or "There is no other hint; `s` shows the answer.")
                continue
            try:
                if ask.answer.is_right(typed):
                    self._screen.say("Right.", "green")
                    break
                known = ask.answer.trap(typed)
                self._screen.say("Not so. " + (known or next(hints, None) or "`s` shows the answer."), "yellow")
            except NotAnAnswer as error:
                self._screen.say(str(error))
        self._screen.say(ask.why)

    def _exercise(self, lesson: Lesson) -> None:
        path = self._folder / workshop.file_name(lesson)
        self._screen.say(AT_EXERCISE)
        while True:
            typed = self._typed("exercise> ")
            if not typed:
                return
            try:
                if typed == "w":
                    workshop.write(lesson, self._folder)
                    self._screen.say(f"Fill the holes in {path.name}, in any editor. Then type `c`.")
                elif typed == "c":
                    if self._check(lesson, path):
                        return
                elif typed == "s":
                    self._screen.line(workshop.solution_text(lesson), "cyan")
                else:
                    self._screen.say(AT_EXERCISE)
            except (ValueError, OSError) as error:
                self._screen.say(str(error), "yellow")

    def _check(self, lesson: Lesson, path: Path) -> bool:
        verdict = workshop.check(lesson, path)
        self._screen.line("")
        self._screen.line(verdict.message, "green" if verdict.right else "yellow")
        if verdict.right:
            self._progress.change(lesson.number, solved=True)
        return verdict.right

    def _enter(self, prompt: str) -> None:
        self._typed(prompt)

    def _typed(self, prompt: str) -> str:
        """The line that the learner types.

        Raises:
            Quit: it was ``q``, or nothing more will come.
        """
        try:
            typed = self._screen.ask(prompt).strip()
        except EOFError:
            self._quit()
        if typed in ("q", "quit"):
            self._quit()
        return typed

    @staticmethod
    def _quit() -> NoReturn:
        raise Quit


def next_lesson(progress: Progress) -> Lesson | None:
    """The lesson to continue: the one that is open, or the first that is not finished."""
    current = progress.current or 0
    if 1 <= current <= len(LESSONS) and progress.of(current).step:
        return LESSONS[current - 1]
    return next((lesson for lesson in LESSONS if not progress.of(lesson.number).finished), None)


def fast_forward(lesson: Lesson, start: int) -> tuple[Iterator[Step], list[Step]]:
    """The steps from ``start`` on, and those before them that belong to the same page: from its prose on.

    The steps before are computed again, which takes a second or two; if there are less, none is skipped.
    """
    steps = lesson.steps()
    page: list[Step] = []
    for _ in range(start):
        step = next(steps, None)
        if step is None:
            return lesson.steps(), []
        page = [step] if isinstance(step, Say) else [*page, step]
    return steps, page


def state_of(reached: Reached) -> str:
    """How far a lesson is, as the list of lessons shows it."""
    state = "done" if reached.finished else f"begun, step {reached.step}" if reached.step else ""
    return ", ".join(part for part in (state, "exercise solved" if reached.solved else "") if part)
