"""What shares an engine's blocks with others, once there is an engine."""

from collections.abc import Callable, Sequence

from tritonllm.config.engine import EngineConfig
from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.transfer.connector import KVConnector, Sizing, Slots
from tritonllm.engine.transfer.transfer import KVTransfer
from tritonllm.system.host_memory import slots_for


def check_blocks(config: EngineConfig, connector: KVConnector | None, size: int) -> None:
    """Whether blocks of ``size`` bytes fit where the configuration puts them, before weights are read.

    Raises:
        ValueError: they do not.
    """
    slots_for(config.cache.kv_offloading_size, size)
    if config.kv_transfer_config is not None and isinstance(connector, Sizing):
        connector.check_size(size)


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
