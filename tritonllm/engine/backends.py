"""Which ranks an engine has beside its own, by its configuration."""

from tritonllm.config import EngineConfig
from tritonllm.engine.executor import SpawnedRanks
from tritonllm.engine.launched import launched_ranks
from tritonllm.engine.ranks import Ranks
from tritonllm.engine.ray_ranks import RayRanks


def ranks_of(config: EngineConfig) -> Ranks:
    """As ``distributed_executor_backend`` says. Raises as :func:`launched_ranks` and :class:`RayRanks`."""
    if config.parallel.world_size == 1:
        return Ranks()
    if config.parallel.distributed_executor_backend == "external_launcher":
        return launched_ranks(config)
    if config.parallel.distributed_executor_backend == "ray":
        return RayRanks(config)
    return SpawnedRanks(config)
