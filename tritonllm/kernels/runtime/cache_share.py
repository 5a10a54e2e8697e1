"""How a processor divides its memory between shared memory and first-level cache, for kernels that mind.

On NVIDIA's GPUs both are one memory. Without a wish, a kernel runs with the division that it finds, if its shared
memory fits, and loads that are under way need room in the cache: behind a kernel that took nearly all as shared memory,
one that loads into registers is up to 1.6 times as slow. With a wish the processor is divided anew, for which it must
be empty, so kernels that take turns should not wish for what is far apart.
(CUDA C++ Programming Guide, "Shared Memory" of compute capability 9.0; cuFuncSetAttribute of the driver's interface.)
"""

import ctypes
import functools
from typing import Any

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # CUfunction_attribute


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _divide(function: int, percent: int) -> None:
    status = _driver().cuFuncSetAttribute(
        ctypes.c_void_p(function), ctypes.c_int(_PREFERRED_SHARED_MEMORY_CARVEOUT), ctypes.c_int(percent)
    )
    if status:
        raise RuntimeError(f"the CUDA driver does not divide shared memory and cache by {percent}%: error {status}")


def wish_for_shared_memory(kernel: Any, percent: int) -> None:
    """From its next launch on, the kernel runs where about so much of the memory is shared memory and the rest cache.

    Args:
        kernel: what Triton's launch has returned: the compiled kernel, whatever its specialisation. One that was not
            loaded onto a GPU (compiled ahead of time) is left as it is.
        percent: 0 to 100, of the most that shared memory can be; rounded up to what the chip has.

    Raises:
        RuntimeError: the driver refuses.
    """
    function = getattr(kernel, "function", None)
    if isinstance(function, int):
        _divide(function, percent)
