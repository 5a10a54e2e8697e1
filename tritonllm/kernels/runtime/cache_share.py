"""How a processor divides its memory between shared memory and first-level cache, for kernels that mind.

On NVIDIA's GPUs both are one memory. Without a wish, a kernel runs with the division that it finds, if its shared
memory fits, and loads that are under way need room in the cache: behind a kernel that took nearly all as shared memory,
one that loads into registers is up to 1.6 times as slow. With a wish the processor is divided anew, for which it must
be empty, so kernels that take turns should not wish for what is far apart.
(CUDA C++ Programming Guide, "Shared Memory" of compute capability 9.0; cuFuncSetAttribute of the driver's interface.)
"""

import ctypes
import functools
import logging
import weakref
from typing import Any

logger = logging.getLogger(__name__)
_PREFERRED_SHARED_MEMORY_CARVEOUT = 9  # CUfunction_attribute
_told: weakref.WeakSet[Any] = weakref.WeakSet()  # kernels; a number of the driver may be another one's later


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def wish_for_shared_memory(kernel: Any, percent: int) -> None:
    """From its next launch on, the kernel runs where about so much of the memory is shared memory and the rest cache.

    It is told once. If the driver refuses, it is only slower, and the log says so.

    Args:
        kernel: what Triton's launch has returned: the compiled kernel, whatever its specialisation. One that was not
            loaded onto a GPU (compiled ahead of time) is left as it is.
        percent: 0 to 100, of the most that shared memory can be; rounded up to what the chip has.
    """
    function = getattr(kernel, "function", None)
    if not isinstance(function, int) or kernel in _told:
        return
    _told.add(kernel)
    status = _driver().cuFuncSetAttribute(
        ctypes.c_void_p(function), ctypes.c_int(_PREFERRED_SHARED_MEMORY_CARVEOUT), ctypes.c_int(percent)
    )
    if status:
        logger.warning("the CUDA driver does not divide shared memory and cache by %d%%: error %d", percent, status)
