"""docs/decoding.md has every sampling parameter, and each names tests that exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from tritonllm.config.sampling_params import SamplingParams, StructuredOutputsParams
from tritonllm.config.vllm_arguments import SAMPLING_DEFAULTS, STRUCTURE_DEFAULTS

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| `(tests/[\w/]+\.py)`, `(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "decoding.md").read_text(encoding="utf-8"))
NEUTRAL = {name for name, _ in (*SAMPLING_DEFAULTS, *STRUCTURE_DEFAULTS)}


def names_of(kind):
    return {field.name for field in dataclasses.fields(kind)} - NEUTRAL


def test_every_parameter_has_its_row():
    named = [name for name, *_ in ROWS]
    assert len(named) == len(set(named))
    assert set(named) == names_of(SamplingParams) | names_of(StructuredOutputsParams)


@pytest.mark.parametrize(("name", "meaning", "path", "test"), ROWS, ids=lambda value: value[:24])
def test_a_row_names_a_test(name, meaning, path, test):
    source = (ROOT / path).read_text(encoding="utf-8")
    body = re.search(rf"^def {test}\(.*?(?=^def |^@|\Z)", source, re.MULTILINE | re.DOTALL)
    assert body is not None, f"{path} has no {test}"
    assert len(meaning) > 10
