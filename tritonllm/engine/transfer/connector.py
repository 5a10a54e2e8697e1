"""What a connector is: it takes blocks of keys and values out of an engine, to wherever others find them, and brings
them in. No torch.

A connector sees numbered slots of memory that the engine hands it once, and keys. It does not see requests, tokens or
tensors. The slots are those of the cache's tier in the host's memory (:mod:`tritonllm.engine.schedule.host_tier`),
which has the copies to the device and back already. For a connector between devices the tier lies in the device's
memory, and the slots are :class:`DeviceSlots`: addresses that the host cannot read.

A key names the contents of a block: the tokens up to its end, and the model that computed them
(:mod:`tritonllm.engine.transfer.transfer`). So equal keys mean equal bytes, whoever saved them, and in whatever order.

All calls come from the engine's thread and return at once; the work is done elsewhere, and the futures tell of its end.
Nothing that goes wrong may be raised: a block that cannot be had is a miss, and the engine computes it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

Params = Mapping[str, Any]  # what a request says of where its blocks are (vLLM's ``kv_transfer_params``)


class DeviceSlots(NamedTuple):
    """Slots in the memory of a GPU.

    Attributes:
        address: the address of the first slot, on the device.
        shape: slots, and the bytes of each; they lie one behind the other.
        device: the GPU's number in this process; ``None`` where the engine runs on the CPU.
        owner: the memory lives as long as this does.
    """

    address: int
    shape: tuple[int, int]
    device: int | None
    owner: Any


Slots = np.ndarray | DeviceSlots


class KVConnector(Protocol):
    """Where blocks go and come from."""

    def register(self, memory: Sequence[Slots]) -> None:
        """Work on this memory from now on; called once, before all else.

        Args:
            memory: uint8 ``[slots, bytes]`` arrays; a block is the rows of one slot in all of them, one after the
                other. Only a connector for which the tier lies in the device's memory
                (:attr:`~tritonllm.config.kv_transfer.KVTransferConfig.on_device`) gets :class:`DeviceSlots`.

        Raises:
            ValueError: it cannot work on this memory.
        """

    def lookup(self, keys: Sequence[bytes], params: Params) -> "Future[int]":
        """How many of the leading blocks with these keys :meth:`load` would bring. It may turn out to be fewer."""

    def load(self, keys: Sequence[bytes], slots: Sequence[int], params: Params) -> "Future[list[bool]]":
        """Write blocks into slots, of which nobody else makes use until the future is done.

        Returns:
            For each block whether it is there, whole and as it was saved. A slot whose block is not may hold anything.
        """

    def save(self, keys: Sequence[bytes], slots: Sequence[int], ready: Callable[[], bool]) -> "Future[int]":
        """Take blocks out of slots, which stay as they are until the future is done.

        Args:
            ready: waits until the blocks are in their slots; to be called in another thread than the engine's. False:
                they will not be, and there is nothing to save.

        Returns:
            How many were saved, not counting those that were there before.
        """

    def close(self) -> None:
        """End what is under way within some seconds; the futures need not be done after that."""


@runtime_checkable
class Offering(Protocol):
    """A connector at which others can ask for what this engine has saved."""

    def offer(self) -> Params:
        """What another engine's request has to say (its ``Params``) to find this engine's blocks."""


@runtime_checkable
class Sizing(Protocol):
    """A connector that says before the model is loaded whether it can take blocks of its size."""

    def check_size(self, size: int) -> None:
        """Check that the connector can keep blocks of this size.

        Args:
            size: bytes of a block, or a little less where a draft model keeps more than its layers.

        Raises:
            ValueError: it cannot.
        """


def arrays(memory: Sequence[Slots]) -> list[np.ndarray]:
    """Slots of the host's memory, for connectors that read and write it.

    Raises:
        ValueError: they lie in a device's.
    """
    found = [part for part in memory if isinstance(part, np.ndarray)]
    if len(found) < len(memory):
        raise ValueError("kv_transfer_config: this kv_connector needs slots in the host's memory, not in a device's")
    return found
