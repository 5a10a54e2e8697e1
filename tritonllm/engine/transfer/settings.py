"""Makes a connector from the configuration, and refuses a wrong one before anything is loaded: also in the process that
only starts an engine, which does without the engine's own modules."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from tritonllm.config.checks import load_code
from tritonllm.config.engine import EngineConfig
from tritonllm.config.kv_transfer import DEVICE_BYTES, KVTransferConfig
from tritonllm.dist.device_copies import load_cuda
from tritonllm.engine.transfer.connector import KVConnector
from tritonllm.engine.transfer.file_store import FileStore, FileStoreSettings
from tritonllm.engine.transfer.ipc import DeviceReads
from tritonllm.engine.transfer.nixl import Reads
from tritonllm.engine.transfer.nixl_agent import load_nixl
from tritonllm.engine.transfer.peer import Peer, PeerSettings

Settings = TypeVar("Settings", FileStoreSettings, PeerSettings)


def check_connector(config: EngineConfig) -> None:
    """What can be known of the connector without an engine. The process that starts one asks this first: a user should
    not wait for a model to learn of a misspelled setting.

    Raises:
        ValueError: as :func:`make_connector`, or the engine has no device that the connector needs.
    """
    transfer, device = config.kv_transfer_config, config.model.device
    if transfer is None:
        return
    if transfer.on_device and device.startswith("cpu"):
        raise ValueError(
            f"kv_transfer_config: kv_connector={transfer.kv_connector!r} needs a CUDA device, and device={device!r} is "
            "none: take 'Peer', or device='cuda'"
        )
    _prepared(transfer)


def make_connector(config: KVTransferConfig) -> KVConnector:
    """The connector that a configuration names.

    Raises:
        ValueError: there is no such one, its package is not installed, its own settings are bad, or it cannot begin.
    """
    return _prepared(config)()


def _prepared(config: KVTransferConfig) -> Callable[[], KVConnector]:
    """What makes the connector; all that can be wrong before that was checked."""
    name, extra = config.kv_connector, dict(config.kv_connector_extra_config)
    extra.pop("timeout", None)
    if name == "FileStore":
        files = settings_of(FileStoreSettings, extra, name)
        files.check_folder()
        return lambda: FileStore(files)
    if name not in ("Peer", "Nixl", "CudaIpc"):
        return _prepared_code(name, extra)
    if name == "CudaIpc":
        extra = {"max_bytes": DEVICE_BYTES, **extra}
    settings = settings_of(PeerSettings, extra, name)
    settings.check_role(config)
    if name == "Peer":
        return lambda: Peer(config, settings)
    if name == "Nixl":
        agent = load_nixl()
        return lambda: Peer(config, settings, plane=Reads(agent))
    device = load_cuda()
    return lambda: Peer(config, settings, plane=DeviceReads(device))


def _prepared_code(name: str, extra: dict[str, Any]) -> Callable[[], KVConnector]:
    """Import a connector of the user's, and return the function that makes it with its settings.

    Raises:
        ValueError: a connector of the user's cannot be imported, or it does not take these settings.
    """
    make = load_code("kv_transfer_config: kv_connector=", name)
    if not callable(make):
        raise ValueError(f"kv_transfer_config: kv_connector={name!r} must be a class or a function, got {make!r}")
    try:
        inspect.signature(make).bind(**extra)
    except TypeError as error:
        raise ValueError(
            f"kv_transfer_config: kv_connector_extra_config: {name!r} does not take it ({error}), got {extra!r}"
        ) from error
    check = getattr(make, "check_settings", None)
    if check is not None:
        check(**extra)
    return partial(make, **extra)


def settings_of(kind: type[Settings], extra: dict[str, Any], connector: str) -> Settings:
    """A connector's own settings, checked.

    Raises:
        ValueError: one that it does not have, or a bad value.
    """
    known = [one.name for one in fields(kind)]
    for name in extra:
        if name not in known:
            raise ValueError(
                f"kv_transfer_config: kv_connector_extra_config: {name!r} is none of {connector}'s; there are "
                f"{', '.join(known)}, timeout"
            )
    return kind(**extra)
