"""Which ranks an engine has beside its own, by its configuration."""

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.lockstep import ExpertPlace
from tritonllm.engine.ranks.executor import SpawnedRanks
from tritonllm.engine.ranks.launched import launched_ranks
from tritonllm.engine.ranks.ray_ranks import RayRanks
from tritonllm.engine.ranks.shared_experts import SharedExpertRanks
from tritonllm.engine.start.ranks import Ranks


def ranks_of(config: EngineConfig, place: ExpertPlace | None = None) -> Ranks:
    """The other ranks, started as ``distributed_executor_backend`` says; or the engines that share experts with one
    that has a ``place`` among them. Raises as :func:`launched_ranks` and :class:`RayRanks`."""
    if place is not None:
        return SharedExpertRanks(config, place)
    if config.parallel.world_size == 1:
        return Ranks()
    if config.parallel.distributed_executor_backend == "external_launcher":
        return launched_ranks(config)
    if config.parallel.distributed_executor_backend == "ray":
        return RayRanks(config)
    return SpawnedRanks(config)
