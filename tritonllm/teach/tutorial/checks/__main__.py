"""``python -m tritonllm.teach.tutorial.checks NAME FILE``: check a learner's file. Exit status: see ``workshop.py``."""

import importlib
import importlib.util
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType

from tritonllm.teach.tutorial.holes import Unfilled, Wrong
from tritonllm.teach.tutorial.workshop import RIGHT, WRONG


def load(path: Path) -> ModuleType:
    """Import the file, whatever its name."""
    spec = importlib.util.spec_from_file_location("exercise", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["exercise"] = module
    spec.loader.exec_module(module)
    return module


def line_in(error: BaseException, path: Path) -> str:
    """Where in the learner's file an error came from: the innermost line of it, also of an error's cause."""
    found = ""
    seen: BaseException | None = error
    while seen is not None:
        for frame in traceback.extract_tb(seen.__traceback__):
            if frame.filename == str(path):
                found = f"line {frame.lineno}: `{frame.line}`"
        seen = seen.__cause__ or seen.__context__
    return found


def unfilled_in(error: BaseException | None) -> Unfilled | None:
    """Triton's interpreter wraps what a kernel raises."""
    while error is not None and not isinstance(error, Unfilled):
        error = error.__cause__ or error.__context__
    return error


def describe(error: BaseException, path: Path) -> str:
    """An error of the learner's file in a sentence or two."""
    hole = unfilled_in(error)
    if hole is not None:
        return f"This hole is not filled yet: {hole}\n{line_in(error, path)}".strip()
    if isinstance(error, SyntaxError):
        return f"Python cannot read the file: {error.msg} (line {error.lineno})."
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return f"It failed with {type(root).__name__}: {root}\n{line_in(error, path)}".strip()


def main(name: str, file: str) -> int:
    path = Path(file).resolve()
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of what the interpreter computes; the check will tell
    check = importlib.import_module(f"tritonllm.teach.tutorial.checks.{name}").check
    try:
        print(check(load(path)))
    except Wrong as error:
        print(error)
        return WRONG
    except (Exception, SystemExit) as error:  # the file is anybody's code
        print(describe(error, path))
        return WRONG
    return RIGHT


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
