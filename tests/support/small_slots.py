"""Slots of a few bytes, for tests of connectors that are engines of one process."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from support.fault_proxy import fault_proxy
from support.waiting import PATIENCE
from tritonllm.engine.transfer.peer import Peer

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


def saved(engine: Peer, numbers: Sequence[int] = ALL) -> dict[str, Any]:
    """Where its blocks are, once these slots are kept."""
    assert engine.save([KEYS[n] for n in numbers], numbers, lambda: True).result(PATIENCE) == len(numbers)
    return dict(engine.offer())


def check_harm(engines: Callable[..., Peer], timeout: float, kind: str, place: int) -> None:
    """What comes over a connection that is harmed at that byte is right, or does not come."""
    there = memory(100)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there, timeout=timeout)
    with fault_proxy(saved(producer)["remote_port"], kind, place) as proxy:
        params = {"remote_host": "127.0.0.1", "remote_port": proxy.port}
        came = consumer.load(KEYS, ALL, params).result(PATIENCE)
        for number in ALL:
            if came[number]:
                assert all((part[number] == number).all() for part in there)
        consumer.close()
        producer.close()
