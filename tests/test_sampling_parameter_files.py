"""A sampling parameter is declared in few places, which docs/design.md lists ("How to add a sampling parameter")."""

import ast
import re
from pathlib import Path

import tritonllm

PACKAGE = Path(tritonllm.__file__).parent
TABLE = re.compile(r"## How to add a sampling parameter\n(.*?)\n\n[^|\n]", re.DOTALL)


def listed():
    """The files and folders of the package in that table."""
    (table,) = TABLE.findall((PACKAGE.parent / "docs" / "design.md").read_text())
    names = re.findall(r"`([^`]+)` ?(?=[|,])", "\n".join(line.split("|")[1] + "|" for line in table.splitlines()[3:]))
    return {name for name in names if (PACKAGE / name).exists()}


def names_in(source):
    """What code names: variables, attributes, arguments, and texts that are a name. No comments, no docstrings."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name"):
            yield getattr(node, field, None)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("-", "_")


def test_min_p_is_named_where_the_document_says():
    """A parameter that everything has: a range, an option, a field of the API, a column, kernels."""
    found = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if "min_p" in names_in(path.read_text())
    }
    taught = {name for name in found if name.startswith("teach/")}  # lessons and pictures explain what there is
    kernels = {name for name in found if name.startswith("kernels/")}
    sampling = {name for name in kernels if name.startswith(("kernels/sampling/", "kernels/speculative/"))}
    assert kernels == sampling
    assert {*(found - taught - kernels), "kernels/sampling/"} == listed()
    assert len(listed()) <= 5
