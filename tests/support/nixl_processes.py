"""Two processes with the connector ``Nixl``: one that saves, and one that loads from it, as the test tells them."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from support.waiting import PATIENCE
from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer.settings import make_connector

SLOTS, SIZE = 16, 1 << 20
KEYS = [bytes([n]) * 16 for n in range(SLOTS)]
ALL = list(range(SLOTS))


class Engine:
    """A connector in a process of its own, with slots of 1 MiB."""

    def __init__(self, role: str, fill: int, timeout: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=_run, args=(role, fill, timeout, other), daemon=True)
        self.process.start()
        other.close()

    def ask(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self.answer() if name != "begin" else None

    def answer(self) -> Any:
        assert self._pipe.poll(PATIENCE), "it hangs"
        return self._pipe.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)
        self._pipe.close()


@contextmanager
def engines(timeout: float) -> Iterator[tuple[Engine, Engine]]:
    """One that saves, whose slots have their numbers everywhere, and one that loads, whose slots have 100."""
    made = Engine("kv_producer", -1, timeout), Engine("kv_consumer", 100, timeout)
    try:
        yield made
    finally:
        for one in made:
            one.close()


def _read(reader: Any, slots: np.ndarray, seconds: float, metadata: bytes, address: int) -> str:
    try:
        reader.read(
            metadata, [(slots.ctypes.data, slots.nbytes)], [(address, slots.nbytes)], time.monotonic() + seconds
        )
    except OSError as error:
        return str(error)
    return "done"


def _run(role: str, fill: int, timeout: float, pipe: Connection) -> None:
    settings = {"peers": ["*"], "timeout": timeout, "max_bytes": SLOTS * SIZE}
    connector: Any = make_connector(
        KVTransferConfig(kv_connector="Nixl", kv_role=role, kv_connector_extra_config=settings)
    )
    slots = np.empty((SLOTS, SIZE), np.uint8)
    slots[:] = np.arange(SLOTS)[:, None] if fill < 0 else fill
    connector.register([slots])
    begun = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        if name == "begin":  # a load
            begun = connector.load(KEYS, ALL, *arguments)
        elif name == "end":
            pipe.send(begun.result(PATIENCE))
        elif name == "save":
            pipe.send(connector.save(KEYS, ALL, lambda: True).result(PATIENCE))
        elif name == "offer":
            pipe.send(connector.offer())
        elif name == "place":  # what a reader is told
            pipe.send((connector._plane._agent.metadata(), connector._plane._copies.ctypes.data))
        elif name == "read":  # without asking first
            pipe.send(_read(connector._plane._reader, slots, *arguments))
        elif name == "fill":
            slots[:] = arguments[0]
            pipe.send(None)
        else:  # what is in the slots: a number for each, or -1
            pipe.send([int(row[0]) if (row == row[0]).all() else -1 for row in slots])
