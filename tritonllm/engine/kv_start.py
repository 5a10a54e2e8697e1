"""Makes what shares an engine's blocks with others, from the configuration."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from tritonllm.dist.device_copies import load_cuda
from tritonllm.engine.kv_connector import KVConnector, Slots
from tritonllm.engine.kv_file_store import FileStore
from tritonllm.engine.kv_ipc import DeviceReads
from tritonllm.engine.kv_nixl import Reads
from tritonllm.engine.kv_nixl_agent import load_nixl
from tritonllm.engine.kv_peer import Peer
from tritonllm.engine.kv_transfer import KVTransfer
from tritonllm.engine.scheduler import Scheduler
from tritonllm.kv_transfer_config import DEVICE_BYTES, KVTransferConfig


def make_connector(config: KVTransferConfig) -> KVConnector:
    """The connector that a configuration names.

    Raises:
        ValueError: there is no such one, its package is not installed, or its own settings are bad.
    """
    name, extra = config.kv_connector, dict(config.kv_connector_extra_config)
    extra.pop("timeout", None)
    if name == "FileStore":
        return FileStore(**checked_settings(extra, FileStore.SETTINGS, name))
    if name == "Peer":
        return Peer(config, **checked_settings(extra, Peer.SETTINGS, name))
    if name == "Nixl":
        return Peer(config, **checked_settings(extra, Peer.SETTINGS, name), plane=Reads(load_nixl()))
    if name == "CudaIpc":
        settings = {"max_bytes": DEVICE_BYTES, **checked_settings(extra, Peer.SETTINGS, name)}
        return Peer(config, **settings, plane=DeviceReads(load_cuda()))
    module, _, attribute = name.partition(":")
    try:
        make = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"kv_transfer_config: kv_connector={name!r} cannot be imported: {error}") from error
    connector: KVConnector = make(**extra)
    return connector


def checked_settings(extra: dict[str, Any], known: Sequence[str], connector: str) -> dict[str, Any]:
    """A connector's own settings.

    Raises:
        ValueError: one that it does not have.
    """
    for name in extra:
        if name not in known:
            raise ValueError(
                f"kv_transfer_config: kv_connector_extra_config: {name!r} is none of {connector}'s; there are "
                f"{', '.join(known)}, timeout"
            )
    return extra


def make_transfer(
    config: KVTransferConfig | None,
    connector: KVConnector | None,
    scheduler: Scheduler,
    memory: Sequence[Slots],
    fingerprint: Callable[[], bytes],
) -> KVTransfer | None:
    """What moves blocks between this engine and others, if it was asked for.

    Args:
        memory: the slots of the scheduler's tier.

    Raises:
        ValueError: the connector cannot work on them.
    """
    tier, cache = scheduler.tier, scheduler.prefix_cache
    if config is None or connector is None or tier is None or cache is None:
        return None
    connector.register(memory)
    return KVTransfer(connector, config, tier, cache, fingerprint, config.timeout)
