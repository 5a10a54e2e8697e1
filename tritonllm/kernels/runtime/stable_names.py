"""Compiled kernels get the same name in the cache in every process.

Triton 3.6 hashes into a kernel's name the constants (``tl.constexpr`` at module level) that the functions which it
calls use, but only of functions that were hashed before. So the name would depend on which kernels a process compiled
earlier, and kernels that another process compiled ahead would be compiled again: 4 of 47 of Qwen3-0.6B in the opposite
order.
"""

from typing import Any

from triton.runtime.jit import DependenciesFinder


def hash_callees_first() -> None:
    """From now on, in this process, a function's callees are hashed before their constants are looked up."""
    own = DependenciesFinder._update_hash
    if hasattr(own, "triton_own"):
        return

    def update(self: Any, func: Any) -> None:
        _ = func.cache_key  # collects the constants
        own(self, func)

    update.triton_own = own  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = update
