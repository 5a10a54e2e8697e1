"""JSON files that hold one object."""

import json
from pathlib import Path
from typing import Any

from tritonllm.system.whole_files import replace_text


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of bytes that are no UTF-8
        raise ValueError(f"{path}: this is no JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: it must hold a JSON object, got {type(value).__name__}")
    return value


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object to a file as a whole: whoever reads it sees the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(path, json.dumps(value) + "\n")


def whole_numbers(where: str, value: Any) -> tuple[int, ...]:
    """Check that a value is a list of integers that are 0 or more, and return them.

    Raises:
        ValueError: it is no list of integers that are 0 or more, at least one; ``where`` begins the message.
    """
    fits = isinstance(value, list) and value and all(type(number) is int and number >= 0 for number in value)
    if not fits:
        raise ValueError(f"{where} must be a list of integers of at least 0, got {str(value)[:60]}")
    return tuple(value)
