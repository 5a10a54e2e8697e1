"""How many examples a property test has."""

from hypothesis import settings

NORMAL = 25  # of a property test that does not say how many


def examples(number: int) -> int:
    """What `number` examples of a normal run are in this one: a third in `make test`, twelve times as many with the
    profile "thorough"."""
    return max(1, number * settings.default.max_examples // NORMAL)


def is_quick() -> bool:
    """Whether this is `make test`."""
    return settings.default.max_examples < NORMAL
