"""The kernel examples, and some of the engine's, run as they are, on the CPU too, and stay short."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("use_*.py"))


ENGINE = [
    Path(__file__).parents[1] / "examples" / name
    for name in ("beam_search.py", "embed.py", "host_cache.py", "shortest_first.py", "structured.py")
]


def test_examples_were_found():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("path", [*EXAMPLES, *ENGINE], ids=lambda path: path.stem)
def test_example(path, capsys):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
