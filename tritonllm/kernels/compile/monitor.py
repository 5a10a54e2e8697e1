"""How many kernels this process has prepared: compiled, or loaded from Triton's cache folder.

Either makes the request that needs the kernel wait (seconds, or milliseconds and a wait for the device), so an engine
that is ready should do neither; :class:`~tritonllm.engine.loop.engine.EngineStats` shows what it did since, and a
warning names each kernel that was compiled then.
"""

import logging
from typing import Any

from triton import knobs

logger = logging.getLogger(__name__)


class CompileMonitor:
    """Listens to Triton's compiler, beside whoever listened before.

    Attributes:
        compiled: how many kernels were compiled.
        loaded: how many kernels were found in the cache folder.
        serving: whether an engine is ready, so that a kernel that is compiled now makes a request wait.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0
        self.serving = False
        self._named: set[str] = set()
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._listen

    @property
    def prepared(self) -> int:
        return self.compiled + self.loaded

    def _listen(self, *, cache_hit: bool, **rest: Any) -> None:
        if cache_hit:
            self.loaded += 1
        else:
            self.compiled += 1
            self._warn(getattr(rest.get("src"), "name", "unknown"))
        if self._before is not None:
            self._before(cache_hit=cache_hit, **rest)

    def _warn(self, kernel: str) -> None:
        """Name a kernel that a request waited for, once."""
        if self.serving and kernel not in self._named:
            self._named.add(kernel)
            logger.warning(
                "kernel %s was compiled while serving, and a request waited for it: please report the model and the "
                "engine's options (docs/start.md)",
                kernel,
            )


MONITOR = CompileMonitor()  # one for the process, as is what it counts
