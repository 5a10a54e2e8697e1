"""Chips that are not there, for those who ask the table of variants."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from tritonllm.kernels.runtime import chip
from tritonllm.kernels.runtime.chip import Chip

CHIPS = (80, 89, 90, 100, 120, "gfx942", None)  # None: no GPU


@contextmanager
def chosen_for(arch: int | str | None) -> Iterator[None]:
    """Inside the block, variants are chosen as on such a chip, wherever the tensors are."""
    found = None if arch is None else Chip("cuda" if isinstance(arch, int) else "hip", arch, 132)
    with patch.object(chip, "chip_of", return_value=found):
        yield
