"""Triton and torch: which releases are supported, and what differs between them.

All differences that kernels see are here; :mod:`tritonllm.kernels.compile.extensions` has those of the C extensions
that Triton builds for itself, and ``tests/support/`` (``interpreter_patches.py``, ``faster_interpreter.py``) those of
its interpreter. Kernels are written for the oldest release, because their source decides whether a tuning table still
holds: a name that has moved since is put back where they look for it.
"""

import re
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.jit import DependenciesFinder

# Triton's releases, and the torch releases whose CUDA builds pin each. README.md says what was tested with which.
SUPPORTED = {"3.6": ("2.10", "2.11"), "3.7": ("2.12", "2.13"), "3.8": ("2.14",), "3.9": ("2.15",)}


def release_of(version: str) -> tuple[int, int]:
    """``"3.6.0+git1a2b"`` -> ``(3, 6)``.

    Raises:
        ValueError: not a version.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ValueError(f"version={version!r} does not begin like 3.6")
    return int(found[1]), int(found[2])


TRITON = release_of(triton.__version__)


def require_supported(triton_version: str, torch_version: str) -> None:
    """Check the releases of Triton and torch.

    Raises:
        ImportError: a release of Triton or torch that these kernels were not tested with.
    """
    torches = [name for names in SUPPORTED.values() for name in names]
    for package, version, names in (("Triton", triton_version, [*SUPPORTED]), ("torch", torch_version, torches)):
        if not release_of(names[0]) <= release_of(version) <= release_of(names[-1]):
            pairs = "; ".join(f"Triton {name} with torch {' or '.join(of)}" for name, of in SUPPORTED.items())
            raise ImportError(
                f"{package} {version} is installed, and tritonllm supports {package} {names[0]} to {names[-1]} "
                f"({pairs}): install one of these pairs, or a release of tritonllm for {package} {version}"
            )


def adapt() -> None:
    """Make this process's Triton the one that the kernels are written for; what it is already is left alone.

    Raises:
        ImportError: it is not supported.
    """
    require_supported(triton.__version__, torch.__version__)
    _hash_callees_first()
    _say_how_products_are_added()


def _hash_callees_first() -> None:
    """Compiled kernels get the same name in the cache in every process.

    Until 3.7, Triton hashes into a kernel's name the constants (``tl.constexpr`` at module level) that the functions
    which it calls use, but only of functions that were hashed before. So the name would depend on which kernels a
    process compiled earlier, and kernels that another process compiled ahead would be compiled again: 4 of 47 of
    Qwen3-0.6B in the opposite order.
    """
    own = DependenciesFinder._update_hash
    if TRITON >= (3, 8) or hasattr(own, "triton_own"):
        return

    def update(self: Any, func: Any) -> None:
        _ = func.cache_key  # collects the constants
        own(self, func)

    update.triton_own = own  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = update


def _say_how_products_are_added() -> None:
    """Products and sums are fused, as the tests of all releases assume, or as the user has set it.

    Triton 3.9 warns every process that leaves this to the default, which 3.10 will change.
    """
    if TRITON >= (3, 9):
        knobs.language.default_fp_fusion = knobs.language.default_fp_fusion


def keep_gluon_names() -> None:
    """Names of Gluon that the Hopper kernels use and that Triton 3.7, 3.8 or 3.9 spells in another way."""
    from triton.experimental.gluon import language as gl  # 50 ms, which other kernels need not wait for
    from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

    for owner, old, new in (
        (gl, "thread_barrier", "barrier"),
        (async_copy, "async_copy_global_to_shared", "async_load"),
        (tma, "async_copy_global_to_shared", "async_load"),
        (tma, "async_copy_shared_to_global", "async_store"),
        (gl.shared_memory_descriptor, "_reinterpret", "reinterpret"),
    ):
        if hasattr(owner, new):
            setattr(owner, old, getattr(owner, new))
