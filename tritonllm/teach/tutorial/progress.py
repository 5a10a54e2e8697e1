"""How far a learner has come: a small JSON file that outlasts the session."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tritonllm import env
from tritonllm.system.whole_files import replace_text

VERSION = 1


@dataclass(frozen=True)
class Reached:
    """How far the learner is in one lesson.

    Attributes:
        step: how many of its steps are behind the learner.
        finished: whether the learner has once gone through to its end.
        solved: whether its exercise was checked and is right.
    """

    step: int = 0
    finished: bool = False
    solved: bool = False


@dataclass(frozen=True)
class Progress:
    """How far the learner is in all lessons.

    Attributes:
        lessons: how far each lesson is, by its number.
        current: the lesson that was open last.
    """

    lessons: dict[int, Reached]
    current: int | None = None

    def of(self, number: int) -> Reached:
        return self.lessons.get(number, Reached())


NOTHING = Progress({})


def default_path() -> Path:
    return env.state_folder() / "tutorial.json"


class ProgressFile:
    """Reads, changes and writes the file at once for each change, so that two terminals do not undo each other's.

    Args:
        path: where it is; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Progress:
        """Read the progress from the file; without a file nothing was done.

        Raises:
            ValueError: there is a file that holds something else. It stays as it is.
            OSError: it cannot be read.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return NOTHING
        except UnicodeDecodeError as error:
            raise self._unreadable(str(error)) from error
        except OSError as error:
            raise self._elsewhere(error) from error
        try:
            return _parse(json.loads(text))
        except KeyError as error:
            raise self._unreadable(f"it has no {error}") from error
        except (ValueError, TypeError, AttributeError) as error:  # not JSON, or JSON of something else
            raise self._unreadable(str(error)) from error

    def change(self, number: int, **changes: Any) -> None:
        """Set fields of :class:`Reached` of a lesson, which becomes the current one. Errors as of :meth:`read`."""
        progress = self.read()
        lessons = progress.lessons | {number: replace(progress.of(number), **changes)}
        self._write({"version": VERSION, "current": number, "lessons": {str(n): asdict(lessons[n]) for n in lessons}})

    def reset(self) -> Path | None:
        """Begin anew. What was there moves to a file beside it, which is returned."""
        if not self.path.exists():
            return None
        kept = self.path.with_name(self.path.name + ".old")
        os.replace(self.path, kept)
        return kept

    def _write(self, content: dict[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise self._elsewhere(error) from error

    def _elsewhere(self, error: OSError) -> OSError:
        return OSError(
            f"{self.path} cannot keep the tutorial's progress ({error.strerror}): set XDG_STATE_HOME to a folder "
            "that can be written"
        )

    def _unreadable(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} does not hold the tutorial's progress ({why}). It was left as it is: repair it, or begin "
            "anew with `tritonllm tutorial --reset`, which moves it aside"
        )


def _parse(content: Any) -> Progress:
    """The progress that a file's content describes.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is not what :meth:`ProgressFile.change` writes.
    """
    if content["version"] != VERSION:
        raise ValueError(f"version must be {VERSION}, got {content['version']!r}")
    lessons = {}
    for number, fields in content["lessons"].items():
        reached = Reached(**fields)
        if type(reached.step) is not int or reached.step < 0:
            raise ValueError(f"the step of lesson {number} must be a number of at least 0, got {reached.step!r}")
        lessons[int(number)] = reached
    current = content["current"]
    return Progress(lessons, current if current is None else int(current))
