"""What several of these files begin with."""

from collections.abc import Iterator

import pytest
from support.engines import tiny_llm
from support.imported_processes import imported_processes
from support.wishes import SIZES

from tritonllm import LLM


@pytest.fixture(scope="module")
def imported_ranks() -> Iterator[None]:
    """Ranks begin with all imports done."""
    with imported_processes():
        yield


@pytest.fixture(scope="module")
def alone() -> LLM:
    """The tiny model in one process, to compare ranks with; files with another model have their own."""
    return tiny_llm(**SIZES)
