"""What several of these files begin with."""

from collections.abc import Iterator

import pytest
import torch
from support.imported_ranks import imported_ranks as imported


@pytest.fixture(scope="module")
def imported_ranks() -> Iterator[None]:
    """Ranks are forks of a process that has imported the engine; on a GPU they are spawned as ever."""
    if torch.cuda.is_available():
        yield
        return
    with imported():
        yield
