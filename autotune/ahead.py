"""Candidates compiled on a machine without a GPU, for a tuner that then only has to time them.

A search spends more time compiling than measuring, and a GPU waits meanwhile. ``--compile-only DIR`` fills a folder
with the kernels of all candidates and a list of what became of each; with ``--compiled DIR`` only what is not in it is
compiled.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from autotune import ops, table
from autotune.search import Caller, Compilers, Task
from autotune.worker import Failed
from tritonllm.kernels.runtime import tuning

LIST = "candidates.jsonl"


def _identity(op: str, kernel_hash: str, arch: int, key: tuning.Key, config: Mapping[str, Any]) -> str:
    return json.dumps([op, kernel_hash, arch, key, config], sort_keys=True)


def write_list(folder: Path, tasks: Iterable[Task], arch: int) -> Iterator[tuple[Task, int]]:
    """Wait for the compilations of each task and list them; yields the task and how many of them failed."""
    with (folder / LIST).open("a") as lines:
        for task in tasks:
            about = {"op": task.tunable.op, "kernel_hash": table.hash_of(task.tunable), "arch": arch, "key": task.key}
            failures = 0
            for config, compiled in task.compiled:
                try:
                    compiled.result()
                    failed = None
                except Failed as reason:
                    failed, failures = str(reason), failures + 1
                lines.write(json.dumps(about | {"config": config, "failed": failed}) + "\n")
            yield task, failures


class CompiledAhead(Compilers):
    """Compilers that answer at once for what a folder lists, unless the kernels have changed since.

    Raises:
        ValueError: the folder has no list.
    """

    def __init__(self, folder: Path, count: int, make: Callable[[], Caller]) -> None:
        path = folder / LIST
        if not path.is_file():
            raise ValueError(f"--compiled {folder}: it has no {LIST}; make it with --compile-only")
        super().__init__(count, make)
        self._failed: dict[str, str | None] = {}
        for line in path.read_text().splitlines():
            known = json.loads(line)
            failed = known.pop("failed")
            self._failed[_identity(**known)] = failed
        self._hashes: dict[str, str] = {}

    def submit(self, method: str, **args: Any) -> "Future[Any]":
        if method != "compile":
            return super().submit(method, **args)
        op = args["op"]
        if op not in self._hashes:
            self._hashes[op] = table.hash_of(ops.load(op))
        identity = _identity(op, self._hashes[op], args["arch"], args["key"], args["config"])
        if identity not in self._failed:
            return super().submit(method, **args)
        answer: Future[Any] = Future()
        if (reason := self._failed[identity]) is None:
            answer.set_result(None)
        else:
            answer.set_exception(Failed(reason))
        return answer
