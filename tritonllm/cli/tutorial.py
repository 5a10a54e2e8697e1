"""``tritonllm tutorial``: lessons on the small model of this package that run, ask and check (docs/tutorial.md)."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritonllm.teach.tutorial import workshop
from tritonllm.teach.tutorial.lessons import LESSONS, find
from tritonllm.teach.tutorial.progress import ProgressFile, default_path
from tritonllm.teach.tutorial.screen import Screen, table_lines
from tritonllm.teach.tutorial.session import Session, state_of

FAILED = 1
EPILOG = """\
Without an action it continues where you left off. At a question, ? is a hint, s shows the answer, q quits.
Everything runs on the CPU with the small model of this package."""


def add_parser(commands: Any) -> list[argparse.ArgumentParser]:
    """``tutorial`` and its actions."""
    parser = commands.add_parser(
        "tutorial",
        help="learn how inference works, in ten lessons that run it",
        description="Lessons on how an inference engine works: the engine runs, you predict what it does.",
        epilog=EPILOG,
        usage="tritonllm tutorial [options] [ACTION]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=converse, wrong_usage=parser.error, model=None)
    parser.add_argument("--list", action="store_true", help="show the lessons, and which of them you have done")
    parser.add_argument("--lesson", type=int, metavar="N", help="go to the beginning of lesson N")
    parser.add_argument("--reset", action="store_true", help="forget your progress (the file is moved aside)")
    actions = parser.add_subparsers(metavar="ACTION")
    exercise = actions.add_parser(
        "exercise", help="write a lesson's exercise into this folder", usage="tritonllm tutorial exercise N"
    )
    exercise.set_defaults(run=write_exercise, wrong_usage=exercise.error)
    check = actions.add_parser("check", help="check an exercise", usage="tritonllm tutorial check N [FILE]")
    check.set_defaults(run=check_exercise, wrong_usage=check.error)
    for action in (exercise, check):
        action.add_argument("number", type=int, metavar="N", help="number of the lesson")
    check.add_argument("file", nargs="?", type=Path, metavar="FILE", help="your file (default: lessonN.py)")
    return [parser, exercise, check]


def converse(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    progress = ProgressFile(default_path())
    if args.reset + args.list + (args.lesson is not None) > 1:
        args.wrong_usage("--list, --lesson and --reset are apart: give one")
    if args.reset:
        kept = progress.reset()
        print("There was no progress to forget." if kept is None else f"Your progress is forgotten, and kept in {kept}")
        return 0
    if args.list:
        print(*listed(progress), sep="\n")
        return 0
    lesson = None
    if args.lesson is not None:
        try:
            lesson = find(args.lesson)
        except ValueError as error:
            args.wrong_usage(str(error))
    if sys.stdin is None:
        args.wrong_usage("stdin is closed, and your answers come from there; --list shows the lessons")
    Session(Screen(sys.stdout, sys.stdin), progress, Path.cwd()).run(lesson)
    return 0


def listed(progress: ProgressFile) -> list[str]:
    """The lines of the list of lessons, with how far the learner is.

    Raises:
        ValueError: the progress file holds something else.
    """
    reached = progress.read()
    rows = []
    for lesson in LESSONS:
        exercise = "exercise" if lesson.has_exercise else ""
        rows.append((lesson.number, lesson.title, lesson.minutes, exercise, state_of(reached.of(lesson.number))))
    return table_lines(("", "lesson", "minutes", "", "state"), rows)


def write_exercise(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        lesson = find(args.number)
        path = workshop.write(lesson, Path.cwd())
    except ValueError as error:
        args.wrong_usage(str(error))
    print(f"{path.name} is there. Fill its holes, then: tritonllm tutorial check {lesson.number}")
    return 0


def check_exercise(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        lesson = find(args.number)
        verdict = workshop.check(lesson, args.file or Path(workshop.file_name(lesson)))
    except ValueError as error:
        args.wrong_usage(str(error))
    print(verdict.message)
    if verdict.right:
        ProgressFile(default_path()).change(lesson.number, solved=True)
    return 0 if verdict.right else FAILED
