"""Which tests of a part run: those of `make test` (``--quick``), or a fifth of what these leave out (``--fifth K``).

Left out of ``--quick`` are tests marked ``long``, but for those marked ``smoke`` as well, and of a test with several
parameters those cases that show no row of a `parametrize` which another case does not show; and property tests have a
third of their examples (:mod:`support.examples`). All of that is the rest; without either option everything runs.
"""

import zlib
from collections.abc import Hashable, Mapping, Sequence

import pytest
from hypothesis import is_hypothesis_test

FIFTHS = 5


def _function(item: pytest.Item) -> str:
    """A test without its parameters."""
    return item.nodeid.split("[")[0]


def covering(cases: Sequence[Mapping[str, Hashable]]) -> list[bool]:
    """Which cases to run so that each row of each parameter is in one of them: first those with the most new ones.

    Args:
        cases: for each, its row by the name of the parameter.
    """
    values = [set(case.items()) for case in cases]
    taken = [not of_case for of_case in values]
    seen: set[tuple[str, Hashable]] = set()
    for new in range(max(map(len, values), default=0), 0, -1):
        for number, of_case in enumerate(values):
            if len(of_case - seen) >= new:
                taken[number] = True
                seen |= of_case
    return taken


def _values(item: pytest.Item) -> dict[str, Hashable]:
    """A case's rows, one of each ``parametrize`` and parametrized fixture, by what tells it from the others there."""
    call = getattr(item, "callspec", None)
    params = dict(call.params) if call is not None else {}
    rows: dict[str, Hashable] = {}
    for marker in item.iter_markers("parametrize"):
        names = marker.kwargs["argnames"] if "argnames" in marker.kwargs else marker.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        rows[",".join(names)] = tuple(id(params.pop(name)) for name in names if name in params)
    return rows | {name: id(value) for name, value in params.items()}


def quick(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests that run in `make test`."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("long") is None or item.get_closest_marker("smoke") is not None:
            functions.setdefault(_function(item), []).append(item)
    chosen = set()
    for cases in functions.values():
        taken = covering([_values(case) for case in cases])
        chosen.update(case for case, take in zip(cases, taken, strict=True) if take)
    return chosen


def _does_more(item: pytest.Item) -> bool:
    """Whether a test has more examples, or compiles more launches, where all of it runs."""
    if "aot" in item.path.parts:
        return True
    return item.get_closest_marker("long") is not None or is_hypothesis_test(getattr(item, "obj", None))


def rest(items: list[pytest.Item], fifth: int) -> set[pytest.Item]:
    """One fifth of what `make test` leaves out or runs with fewer examples, by the names of their files: tests of one
    share what they start, and some go on from where the one before has left it.

    Args:
        fifth: 0 to 4.
    """
    ran = quick(items)
    left = [item for item in items if item not in ran or _does_more(item)]
    return {item for item in left if zlib.crc32(item.nodeid.split("::")[0].encode()) % FIFTHS == fifth}
