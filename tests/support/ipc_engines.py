"""Connectors ``CudaIpc`` in this process, with slots of a few bytes in memory that stands in for a GPU's."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support.ipc_memory import Host, device_slots
from support.small_slots import memory
from support.waiting import PATIENCE
from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer.ipc import DeviceReads
from tritonllm.engine.transfer.peer import Peer, PeerSettings
from tritonllm.engine.transfer.plane import Plane


@contextmanager
def ipc_engines(host: Host) -> Iterator[Callable[..., Peer]]:
    """``start(role, slots, ...)`` makes a connector; at the end all are closed, and neither a thread nor a piece of
    memory of theirs is left."""
    before, opened = set(threading.enumerate()), []

    def start(
        role: str, slots: Any = None, timeout: float = PATIENCE, plane: Plane | None = None, **extra: Any
    ) -> Peer:
        config = KVTransferConfig(kv_connector="CudaIpc", kv_role=role, kv_connector_extra_config={"timeout": timeout})
        settings = PeerSettings(**{"peers": ["127.0.0.1"], **extra})
        opened.append(Peer(config, settings, plane or DeviceReads(host.device)))
        arrays = memory() if slots is None else slots
        opened[-1].register(arrays if plane else device_slots(arrays))
        return opened[-1]

    yield start
    for connector in opened:
        connector.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread
    assert not host.owned and not host.opened and not host.running


def once(host: Host, work: Callable[[], Any]) -> None:
    """Call ``work`` when the next copy begins."""

    def before_copy(spans: Any) -> None:
        host.before_copy = lambda spans: None
        work()

    host.before_copy = before_copy
