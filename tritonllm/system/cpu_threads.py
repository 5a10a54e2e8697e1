"""How many threads torch computes with on the CPU: the one rule, set once when an engine starts.

As many as torch has (the cores, or what the user set: OMP_NUM_THREADS, torch.set_num_threads), but no more than this
process may run on at once. torch knows the cores that a process is bound to, but not a container's quota of processor
time: with more threads than that, those that run wait at the end of every operation for those that may not. Two threads
whose second core is busy with something else show what that costs: SmolLM2-135M at 5 tokens/s and less instead of 22.

A tiny model has one thread: its products take microseconds, less than handing them to others. The demo model on two
busy cores: 4 tokens/s with two threads, and 60 with one.
"""

import os
from pathlib import Path

SINGLE_THREAD_BELOW = 512  # hidden size
CGROUP = Path("/sys/fs/cgroup")


def threads_for(hidden_size: int, have: int, granted: int) -> int:
    """Threads for a model of this size, of the ``have`` that torch has, in a process that is ``granted`` so many."""
    return 1 if hidden_size < SINGLE_THREAD_BELOW else max(1, min(have, granted))


def granted_cores(cgroup: Path = CGROUP) -> int:
    """Cores that this process may use at once: those it is bound to, and those its container's quota is worth."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return bound if quota is None else max(1, min(bound, int(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time that the group may use, of either version of cgroups; ``None`` without a limit."""
    try:
        if (cgroup / "cpu.max").is_file():
            limit, period = (cgroup / "cpu.max").read_text().split()
        else:
            limit, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if limit.strip() == "max" or int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError):
        return None  # no such files, or others than we know: no limit that we know of
