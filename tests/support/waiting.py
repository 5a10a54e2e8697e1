"""How tests wait: as long as it takes, and no longer."""

import time
from collections.abc import Callable

# Seconds, of each wait for what comes: for what never does. Work of others beside a test makes it thirty times slower.
PATIENCE = 600.0


def eventually(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for the condition. The limit is for what never comes true; it says nothing about speed."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
