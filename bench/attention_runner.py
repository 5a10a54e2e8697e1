"""One attention case, ours or a peer's, checked and then timed: the handler of a :class:`autotune.worker.Worker`."""

from typing import Any

import torch

from autotune.timing import median_us
from autotune.verify import Prepared, compare, prepare
from autotune.worker import Failed
from bench.attention_cases import ROWS, SWEEP
from bench.attention_peers import PEERS
from bench.runner import Runner, Timer, checked, timed

CASES = [*ROWS, *SWEEP]


def peer_timed(name: str, ready: Prepared, timer: Timer) -> dict[str, Any]:
    """Check a peer against the reference, then time it.

    Raises:
        Failed: its result is wrong, or it cannot solve the problem.
        torch.AcceleratorError: it broke the CUDA context, with which nothing more can be measured.
    """
    try:
        call = PEERS[name].prepare(ready.problem, ready.sets)
        verdict = checked(compare(ready.problem, call(0), ready.expected), name)
        return {"us": timer(call, len(ready.sets)), "error": verdict.error}
    except torch.AcceleratorError:
        raise
    except (ImportError, RuntimeError, TypeError) as reason:  # no such kernel, no memory, another version's arguments
        raise Failed(f"{type(reason).__name__}: {reason}".splitlines()[0][:200]) from reason


class AttentionRunner(Runner):
    """Keeps the last case's inputs and reference, for the peers that follow."""

    def __init__(self, device: torch.device | None = None, timer: Timer = median_us) -> None:
        super().__init__(device, timer)
        self._ready: dict[int, Prepared] = {}

    def memory_gb(self) -> float:
        return torch.cuda.get_device_properties(self._device).total_memory / 1e9

    def _prepared(self, case: int) -> Prepared:
        if case not in self._ready:
            self._ready.clear()
            self._ready[case] = prepare(CASES[case], self._device)
        return self._ready[case]

    def measure(self, case: int) -> dict[str, Any]:
        try:
            return timed(self._prepared(case), self._timer)
        finally:
            torch.cuda.empty_cache()

    def peer(self, case: int, name: str) -> dict[str, Any]:
        try:
            return peer_timed(name, self._prepared(case), self._timer)
        finally:
            torch.cuda.empty_cache()
