"""Exercises: write the file with holes, and check what a learner made of it in a process of its own."""

import os
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from tritonllm import env
from tritonllm.teach.tutorial.holes import filled, with_holes
from tritonllm.teach.tutorial.lesson import Lesson
from tritonllm.teach.tutorial.lessons import LESSONS

SECONDS = 60.0  # a check takes 3 to 10
RIGHT, WRONG = 10, 11  # exit status of `python -m tritonllm.teach.tutorial.checks`; no process ends so by chance


class ExerciseVerdict(NamedTuple):
    """What the check of an exercise has found.

    Attributes:
        right: whether the exercise is solved.
        message: what was found, for the learner; with what the file itself printed before.
    """

    right: bool
    message: str


def file_name(lesson: Lesson) -> str:
    return f"lesson{lesson.number}.py"


def exercise_text(lesson: Lesson) -> str:
    """The file with holes.

    Raises:
        ValueError: the lesson has none.
    """
    return with_holes(_text(lesson))


def solution_text(lesson: Lesson) -> str:
    """The text of a lesson's exercise, filled in; errors as of :func:`exercise_text`."""
    return filled(_text(lesson))


def write(lesson: Lesson, folder: Path) -> Path:
    """Write the exercise into a folder.

    Raises:
        ValueError: the lesson has none, or the file is there.
    """
    text, path = exercise_text(lesson), folder / file_name(lesson)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ValueError(f"{path.name} is there already, perhaps with your work: move it away, or check it") from error
    return path


def check(lesson: Lesson, path: Path, seconds: float = SECONDS) -> ExerciseVerdict:
    """Run the check of an exercise on a learner's file.

    Args:
        seconds: after how many seconds the check is ended.

    Raises:
        ValueError: the lesson has no exercise, or there is no such file.
    """
    exercise_text(lesson)
    if not path.is_file():
        raise ValueError(
            f"FILE: there is no {path}; `tritonllm tutorial exercise {lesson.number}` writes {file_name(lesson)}"
        )
    command = [sys.executable, "-m", "tritonllm.teach.tutorial.checks", lesson.name, str(path)]
    process = subprocess.Popen(
        *(command,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env.of_interpreted_process() if lesson.interpreted else None,
        start_new_session=True,  # so that what it starts can be ended with it
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return ExerciseVerdict(False, f"The check was ended after {seconds:g} s. Is there a loop that never ends?")
    finally:  # Ctrl-C too
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode not in (RIGHT, WRONG):
        output += f"\nThe process of the check ended with status {process.returncode}."
    return ExerciseVerdict(process.returncode == RIGHT, output.strip())


def _text(lesson: Lesson) -> str:
    if not lesson.has_exercise:
        having = ", ".join(str(other.number) for other in LESSONS if other.has_exercise)
        raise ValueError(f"lesson {lesson.number} has no exercise; these have one: {having}")
    return (files("tritonllm.teach.tutorial") / "solutions" / f"{lesson.name}.py").read_text(encoding="utf-8")
