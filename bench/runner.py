"""One case, checked and then timed; and the two ceilings of the machine, measured in the same run."""

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from autotune.problem import without_effects
from autotune.timing import Replay, median_us
from autotune.verify import Prepared, Verdict, compare, prepare, verify
from autotune.worker import Failed
from bench.baselines import Baseline
from bench.cases import CASES, Case

Timer = Callable[[Callable[[int], object], int], float]  # (call, sets) -> microseconds
SETTLING, SUSTAINED = 2.0, 1.0  # seconds of products before their rate counts, and while it does


def copy_gbs(device: torch.device) -> float:
    """Bytes read and written by a kernel that copies 4 GiB with the signs turned, in GB/s.

    A plain ``copy_`` becomes a memcpy node of the graph, which an H200 runs at 2772 GB/s: not a ceiling for kernels.
    """
    source = torch.empty(2**30, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda _: torch.neg(source, out=target), 1) / 1e3


def matmul_tflops(device: torch.device) -> float:
    """bfloat16 products of 8192 x 8192 matrices of random numbers one after the other, in TFLOP/s: the rate of the last
    :data:`SUSTAINED` seconds, after as many again as it takes until a GPU has come down to what its power allows."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    replay = Replay(lambda _: a @ b, 1, sample_ms=100)
    begin = time.monotonic()
    while time.monotonic() - begin < SETTLING:
        replay.us()
    found = []
    while time.monotonic() - begin < SETTLING + SUSTAINED:
        found.append(replay.us())
    return 2 * 8192**3 / statistics.mean(found) / 1e6


def checked(verdict: Verdict, what: str) -> Verdict:
    if not verdict.ok:
        raise Failed(f"{what}, output {verdict.output}: error {verdict.error:.3g} > {verdict.limit:.3g}")
    return verdict


def timed(ready: Prepared, timer: Timer) -> dict[str, Any]:
    """Check the kernel against the reference, then time it.

    Raises:
        Failed: the kernel's result is wrong.
    """
    verdict = checked(verify(ready.problem, ready.untouched, ready.expected), "tritonllm")
    us = timer(lambda i: ready.problem.run(ready.sets[i]), len(ready.sets))
    result = {"us": us, "error": verdict.error, "limit": verdict.limit}
    return result | {"bytes": ready.work.bytes, "flops": ready.work.flops, "sets": len(ready.sets)}


def measure(case: Case, device: torch.device, timer: Timer) -> dict[str, Any]:
    """Check the kernel and torch's operation against the reference, then time both.

    Raises:
        Failed: the kernel's result is wrong. (A wrong or failing baseline only loses its own time.)
    """
    ready = prepare(case.problem, device)
    result = {"group": case.group, "case": case.problem.name} | timed(ready, timer)
    if case.baseline is not None:
        result |= _measure_baseline(case, case.baseline, ready, timer)
    return result


def _measure_baseline(case: Case, baseline: Baseline, ready: Prepared, timer: Timer) -> dict[str, Any]:
    try:
        outputs = baseline(case.problem, [without_effects(case.problem, ready.untouched)])(0)
        if case.same_result:
            checked(compare(case.problem, outputs, ready.expected), "torch")
        return {"torch_us": timer(baseline(case.problem, ready.sets), len(ready.sets))}
    except (RuntimeError, Failed) as reason:
        return {"torch_failed": str(reason).strip().splitlines()[0][:200]}


def rates(result: dict[str, Any], copy: float, matmul: float) -> dict[str, Any]:
    """The result with what follows from it: rate, percent of the ceiling that binds, ratio to torch's time."""
    by_bytes, by_flops = result["bytes"] / copy / 1e3, result["flops"] / matmul / 1e6
    derived: dict[str, Any] = {"floor_us": max(by_bytes, by_flops)}
    if by_bytes >= by_flops:
        derived["gb_per_s"] = result["bytes"] / result["us"] / 1e3
    else:
        derived["tflop_per_s"] = result["flops"] / result["us"] / 1e6
    derived["percent"] = 100 * derived["floor_us"] / result["us"]
    if "torch_us" in result:
        derived["times_faster_than_torch"] = result["torch_us"] / result["us"]
    return result | derived


def machine(device: torch.device) -> dict[str, str]:
    """What numbers measured on ``device`` depend on."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


class Runner:
    """Runs cases on the GPU of this process: the handler of a :class:`autotune.worker.Worker`."""

    def __init__(self, device: torch.device | None = None, timer: Timer = median_us) -> None:
        self._device = device or torch.device("cuda", torch.cuda.current_device())
        self._timer = timer

    def machine(self) -> dict[str, str]:
        return machine(self._device)

    def ceilings(self) -> dict[str, float]:
        ceilings = {"copy_gb_per_s": copy_gbs(self._device), "matmul_tflop_per_s": matmul_tflops(self._device)}
        torch.cuda.empty_cache()
        return ceilings

    def measure(self, case: int) -> dict[str, Any]:
        try:
            return measure(CASES[case], self._device, self._timer)
        finally:
            torch.cuda.empty_cache()
