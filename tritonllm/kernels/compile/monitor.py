"""How many kernels this process has prepared: compiled, or loaded from Triton's cache folder.

Either makes the request that needs the kernel wait (seconds, or milliseconds and a wait for the device), so an engine
that is ready should do neither; :class:`~tritonllm.engine.engine.EngineStats` shows what it did since.
"""

from typing import Any

from triton import knobs


class CompileMonitor:
    """Listens to Triton's compiler, beside whoever listened before.

    Attributes:
        compiled: kernels compiled.
        loaded: kernels found in the cache folder.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0
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
        if self._before is not None:
            self._before(cache_hit=cache_hit, **rest)


MONITOR = CompileMonitor()  # one for the process, as is what it counts
