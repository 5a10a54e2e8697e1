"""What several of these files begin with."""

from collections.abc import Iterator

import pytest
from support.imported_processes import imported_processes


@pytest.fixture(scope="module")
def imported_ranks() -> Iterator[None]:
    """Ranks begin with all imports done."""
    with imported_processes():
        yield
