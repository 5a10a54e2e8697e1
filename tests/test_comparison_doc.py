"""docs/comparison.md and docs/engine.md: what is said to be missing is refused, and every argument has its row."""

import ast
import re
from pathlib import Path

import pytest

from tritonllm.config.engine import EngineConfig

DOCS = Path(__file__).parents[1] / "docs"
COMPARISON = (DOCS / "comparison.md").read_text(encoding="utf-8")
LACKS = re.findall(r"^\| [^|]+ \| `(\w+)=([^`]+)` \| [^|]*\|$", COMPARISON, flags=re.MULTILINE)
ARGUMENTS = re.findall(
    r"^\| (`[^|]+`) \|([^|]*)\| [^|]+\|$", (DOCS / "engine.md").read_text(encoding="utf-8"), flags=re.MULTILINE
)


def test_rows_were_found():
    assert len(LACKS) >= 12


@pytest.mark.parametrize(("name", "value"), LACKS, ids=[name for name, _ in LACKS])
def test_what_is_missing_is_refused(name, value):
    """If this fails for something that works now, take its row out of the table, and out of the one above it."""
    with pytest.raises(ValueError, match=name):
        EngineConfig.from_kwargs(model="m", **{name: ast.literal_eval(value)})
    EngineConfig.from_kwargs(model="m")  # for the model and all else are good


def test_no_figure_is_repeated():
    assert not re.findall(r"\d[\d.,]*\s*(?:us|ms|tok/s|tokens/s|GB/s|x|%|times)\b", COMPARISON)


def test_every_argument_has_its_row():
    named = [name for cell, _ in ARGUMENTS for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == EngineConfig.known_kwargs()


def test_defaults_are_those_of_the_code():
    config = EngineConfig.from_kwargs(model="m")
    values = {}
    for part in (config, config.model, config.cache, config.scheduler, config.parallel):
        values |= vars(part)
    checked = 0
    for cell, default in ARGUMENTS:
        text = default.strip(" `").replace("2^28", str(2**28))
        try:
            expected = ast.literal_eval(text)
        except (SyntaxError, ValueError):  # words
            continue
        for name in re.findall(r"`(\w+)`", cell):
            if name != "pooler_config":
                assert values[name] == expected, name
                checked += 1
    assert checked > 15
