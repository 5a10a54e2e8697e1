"""Ranks of a group as processes, one on each GPU; what hangs is ended, and its stage named."""

import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tritonllm.dist.connect import connect

Say = Callable[[str], None]


def _on_gpus(count: int) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")]


SOME_GPUS = [pytest.param(count, marks=_on_gpus(count)) for count in (2, 4)]  # numbers of ranks


def _run(rank: int, size: int, port: int, work: Callable[..., Any], arguments: tuple[Any, ...], told: Any) -> None:
    def say(stage: str) -> None:
        told.put((rank, "stage", stage))

    try:
        say("connecting")
        torch.cuda.set_device(rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        group = connect(store, rank, size, torch.device("cuda", rank), timeout=300.0)
        with torch.inference_mode():
            told.put((rank, "result", work(group, say, *arguments)))
    except BaseException:  # told to the test, which raises it
        told.put((rank, "error", traceback.format_exc()))
    told.close()
    told.join_thread()


def run_gpu_ranks(size: int, work: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """What ``work(group, say, *arguments)`` returns on each rank; it calls ``say`` with the name of what it begins.

    Raises:
        AssertionError: a rank failed, or there is no result in time.
    """
    spawn = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = spawn.Queue()
    processes = [
        spawn.Process(target=_run, args=(rank, size, store.port, work, arguments, told), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    stages = dict.fromkeys(range(size), "starting")
    until = time.monotonic() + timeout
    try:
        while len(results) < size:
            left = until - time.monotonic()
            assert left > 0, f"no result after {timeout:.0f} s; stages: {stages}"
            try:
                rank, kind, value = told.get(timeout=min(left, 1.0))
            except queue.Empty:
                dead = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode and rank not in results}
                assert not dead, f"ranks ended with {dead}; stages: {stages}"
                continue
            assert kind != "error", f"rank {rank}, {stages[rank]}:\n{value}"
            if kind == "stage":
                stages[rank] = value
            else:
                results[rank] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(size)]
