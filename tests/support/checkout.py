"""Where this checkout is, and the variables of programs that are to import its package and the tests' support."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's variables, with this checkout before any installed package, and one thread."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}
