"""A static tree of drafts as a user writes it: vLLM's ``speculative_token_tree``.

Each node is a path of child numbers from the last token: ``(0,)`` is the likeliest next token, ``(1,)`` the second, and
``(0, 1)`` the second likeliest behind the first. Nodes are put in order level by level, so a parent comes before its
children, and the first nodes of a tree, however many, are a tree, too.
"""

import ast
from itertools import pairwise

Path = tuple[int, ...]
_EXAMPLE = "[(0,), (1,), (0, 0)]"


def parse_tree(name: str, value: object) -> tuple[Path, ...]:
    """The nodes, level by level and each level in the order of its paths.

    Args:
        name: the name of the option, for messages.
        value: a list of paths, or such a list as a string.

    Raises:
        ValueError: no tree: a path twice, one without its parent, or a child without those before it.
    """
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(f"{name} must be a list of paths, as {_EXAMPLE}, got {value!r}") from error
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} must be a list of paths, as {_EXAMPLE}, got {value!r}")
    paths = sorted((_parse_path(name, path) for path in value), key=lambda path: (len(path), path))
    for path, following in pairwise(paths):
        if path == following:
            raise ValueError(f"{name} has {path} twice: leave one of them out")
    there = set(paths)
    for path in paths:
        parent, child = path[:-1], path[-1]
        if parent and parent not in there:
            raise ValueError(f"{name} has {path} without its parent {parent}: add {parent}, or leave {path} out")
        if child and (*parent, child - 1) not in there:
            likelier = (*parent, child - 1)
            raise ValueError(f"{name} has {path} without the likelier {likelier}: add that, or leave {path} out")
    return tuple(paths)


def _parse_path(name: str, path: object) -> Path:
    good = isinstance(path, list | tuple) and len(path) > 0
    if not good or not all(type(child) is int and child >= 0 for child in path):  # type: ignore[attr-defined]
        raise ValueError(f"{name} has {path!r}, where a path is child numbers from 0 on, as (0,) or (0, 1)")
    return tuple(path)  # type: ignore[arg-type]


def parents_of(paths: tuple[Path, ...]) -> tuple[int, ...]:
    """For each node of :func:`parse_tree`, the index of its parent among them; -1 for those behind the last token."""
    places = {path: place for place, path in enumerate(paths)}
    return tuple(places[path[:-1]] if len(path) > 1 else -1 for path in paths)


def is_chain(parents: tuple[int, ...]) -> bool:
    """Whether each node follows the one before it."""
    return parents == tuple(range(-1, len(parents) - 1))
