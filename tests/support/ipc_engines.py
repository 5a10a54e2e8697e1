"""Connectors ``CudaIpc`` in this process, with slots of a few bytes in memory that stands in for a GPU's."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from support.ipc_memory import Host, device_slots
from tritonllm.engine.kv_ipc import DeviceReads
from tritonllm.engine.kv_peer import Peer
from tritonllm.engine.kv_plane import Plane
from tritonllm.kv_transfer_config import KVTransferConfig

SLOTS = 7
SIZE = 29
KEYS = [bytes([n]) * 16 for n in range(SLOTS)]
ALL = list(range(SLOTS))


def memory(fill: int = 0) -> list[np.ndarray]:
    """7 slots, each with its number plus ``fill`` everywhere."""
    numbers = np.arange(SLOTS, dtype=np.uint8)[:, None] + np.uint8(fill)
    return [np.repeat(numbers, size, axis=1) for size in (24, 5)]


def loaded(slots: Sequence[np.ndarray]) -> list[int]:
    """The numbers in slots that hold one number only."""
    assert all((part == slots[0][:, :1]).all() for part in slots)
    return slots[0][:, 0].tolist()


@contextmanager
def ipc_engines(host: Host) -> Iterator[Callable[..., Peer]]:
    """``start(role, slots, ...)`` makes a connector; at the end all are closed, and neither a thread nor a piece of
    memory of theirs is left."""
    before, opened = set(threading.enumerate()), []

    def start(role: str, slots: Any = None, timeout: float = 200.0, plane: Plane | None = None, **extra: Any) -> Peer:
        config = KVTransferConfig(kv_connector="CudaIpc", kv_role=role, kv_connector_extra_config={"timeout": timeout})
        opened.append(Peer(config, **{"peers": ["127.0.0.1"], **extra}, plane=plane or DeviceReads(host.device)))
        arrays = memory() if slots is None else slots
        opened[-1].register(arrays if plane else device_slots(arrays))
        return opened[-1]

    yield start
    for connector in opened:
        connector.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), thread
    assert not host.owned and not host.opened and not host.running


def saved(engine: Peer, numbers: Sequence[int] = ALL) -> dict[str, Any]:
    """Where its blocks are, once these slots are kept."""
    assert engine.save([KEYS[n] for n in numbers], numbers, lambda: True).result(30) == len(numbers)
    return dict(engine.offer())


def once(host: Host, work: Callable[[], Any]) -> None:
    """Call ``work`` when the next copy begins."""

    def before_copy(spans: Any) -> None:
        host.before_copy = lambda spans: None
        work()

    host.before_copy = before_copy
