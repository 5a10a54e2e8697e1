"""What those who ask an engine to sleep have to know. Imports no torch."""

from collections.abc import Sequence
from typing import Any


class AsleepError(RuntimeError):
    """The engine sleeps, or its weights are gone: it takes no requests."""


def check_rpc(method: str, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
    """Check the arguments of a ``collective_rpc`` call.

    Raises:
        ValueError: ``collective_rpc`` is asked for a method or an argument that there is not.
    """
    if method != "reload_weights":
        raise ValueError(
            f"collective_rpc: method must be 'reload_weights', or of an LLM with one engine a function, got {method!r}"
        )
    if len(args) > 1 or set(kwargs or {}) - {"model"} or (args and kwargs):
        raise ValueError("collective_rpc: reload_weights takes one argument, model")
