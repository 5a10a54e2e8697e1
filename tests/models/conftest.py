"""What several of these files begin with."""

import pytest

from tritonllm.models import weights
from tritonllm.models.tensor_files import read


@pytest.fixture
def elements_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each tensor has that was read from a file."""
    counts: list[int] = []

    def reading(*arguments):
        tensor = read(*arguments)
        counts.append(tensor.numel())
        return tensor

    monkeypatch.setattr(weights, "read", reading)
    return counts
