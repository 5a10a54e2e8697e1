"""What configurations check of their values: each raises a ``ValueError`` that names the argument."""

import re


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


def names_code(value: object) -> bool:
    """Whether it is a function, a class or ``"module:name"``."""
    return callable(value) or (isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value) is not None)
