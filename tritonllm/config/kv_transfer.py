"""Where an engine's cached blocks go beyond its own memory, and come from: what a user can choose."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonllm.config.checks import json_mapping, names_code, one_of

CONNECTORS = ("FileStore", "Peer", "Nixl", "CudaIpc")
ON_DEVICE = ("CudaIpc",)  # connectors for which the cache's second tier lies in the GPU's memory
DEVICE_BYTES = 4 << 30  # of the copies that an engine keeps for others there, unless ``max_bytes`` says otherwise
TIMEOUT = 10.0
ROLES = ("kv_both", "kv_producer", "kv_consumer")


@dataclass(frozen=True, kw_only=True)
class KVTransferConfig:
    """Blocks of keys and values that several engines share (docs/kv-transfer.md). Names are vLLM's.

    Args:
        kv_connector: ``FileStore`` keeps blocks as files of a folder; ``Peer`` brings them from the engine that a
            request names, ``Nixl`` by reads out of its memory, ``CudaIpc`` out of its GPU's memory;
            ``"module:name"`` makes a connector of your own (:class:`tritonllm.engine.transfer.connector.KVConnector`).
        kv_role: ``kv_producer`` saves blocks, ``kv_consumer`` loads them, ``kv_both`` does both.
        kv_connector_extra_config: the connector's own settings; of any connector ``timeout``, the seconds that a
            request waits at most for blocks before it is computed without them.
    """

    kv_connector: str
    kv_role: str = "kv_both"
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name, known = "kv_transfer_config: ", ", ".join(CONNECTORS)
        if not isinstance(self.kv_connector, str) or not (
            self.kv_connector in CONNECTORS or names_code(self.kv_connector)
        ):
            raise ValueError(f"{name}kv_connector must be one of {known} or 'module:name', got {self.kv_connector!r}")
        one_of(name + "kv_role", self.kv_role, ROLES)
        extra = self.kv_connector_extra_config
        if not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra):
            raise ValueError(f"{name}kv_connector_extra_config must be a dict of settings, got {extra!r}")
        seconds = extra.get("timeout", TIMEOUT)
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
            raise ValueError(f"{name}timeout must be a number of seconds above 0, got {seconds!r}")

    def check_engines(self, count: int) -> None:
        """Check that the configuration is possible with so many engines on one machine.

        Raises:
            ValueError: so many engines of one machine (``data_parallel_size``) would all serve their blocks at one
                port.
        """
        port = self.kv_connector_extra_config.get("port")
        if count > 1 and port and self.saves and self.kv_connector in CONNECTORS:
            raise ValueError(
                f"kv_transfer_config: port={port!r} with data_parallel_size={count}: each engine needs its own; leave "
                "port at 0"
            )

    @property
    def timeout(self) -> float:
        seconds: float = self.kv_connector_extra_config.get("timeout", TIMEOUT)
        return seconds

    @property
    def saves(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def asks_named(self) -> bool:
        """Blocks are brought from the engine that a request names; so they may be by a connector of your own."""
        return self.loads and self.kv_connector != "FileStore"

    @property
    def on_device(self) -> bool:
        """Blocks come and go through the GPU's memory; ``kv_offloading_size`` is of that then."""
        return self.kv_connector in ON_DEVICE

    @property
    def kept_device_bytes(self) -> int:
        """How many bytes of the GPU's memory copies take that are kept for others; 0 where there are none."""
        if not (self.on_device and self.saves):
            return 0
        size: int = self.kv_connector_extra_config.get("max_bytes", DEVICE_BYTES)
        return size

    @classmethod
    def of(cls, value: object) -> "KVTransferConfig":
        """Make the configuration from vLLM's dictionary, or its JSON as a command line gives it.

        Raises:
            ValueError: anything else.
        """
        if isinstance(value, cls):
            return value
        known = [one.name for one in dataclasses.fields(cls)]
        given = json_mapping("kv_transfer_config", value, known, "a dict, its JSON, or None")
        if "kv_connector" not in given:
            raise ValueError("kv_transfer_config: kv_connector is missing, for example {'kv_connector': 'FileStore'}")
        return cls(**given)
