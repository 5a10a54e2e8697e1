"""What configurations check of their values: each raises a ``ValueError`` that names the argument."""

import importlib
import json
import re
from collections.abc import Mapping
from typing import Any


def at_least(name: str, value: int | None, low: int) -> None:
    """A whole number, or ``None``."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")


def is_count(name: str, value: object) -> None:
    """A whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def is_a(name: str, value: object, kind: type) -> None:
    """Check that a value has exactly this type; a subclass is refused."""
    if type(value) is not kind:  # neither 1 for True nor "false" for False
        raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Check that a value is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def json_mapping(name: str, value: object, known: list[str] | None = None, forms: str = "a dict or its JSON") -> Any:
    """A dictionary, or its JSON as a command line gives it, as a mapping; with a list, of these keys only.

    Args:
        forms: what the value may be, for the message.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name} is no JSON ({error}): {value!r}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be {forms}, got {value!r}")
    for key in value:
        if known is not None and key not in known:
            raise ValueError(f"{name}: {key!r} is not supported; there are {', '.join(known)}")
    return value


def names_code(value: object) -> bool:
    """Whether it is a function, a class or ``"module:name"``."""
    return callable(value) or (isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value) is not None)


def load_code(argument: str, name: str) -> Any:
    """Import what a user names as ``"module:name"``, or ``"module.name"``.

    Args:
        argument: what the message has before the name.

    Raises:
        ValueError: there is no such module, or it has no such name.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument}{name!r} cannot be imported ({error}): use 'module:name'") from error
