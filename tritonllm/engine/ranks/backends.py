"""Which ranks an engine has beside its own, by its configuration."""

import logging

from tritonllm import env
from tritonllm.config.engine import EngineConfig
from tritonllm.dist.lockstep import ExpertPlace
from tritonllm.engine.ranks.executor import SpawnedRanks
from tritonllm.engine.ranks.launched import launched_ranks
from tritonllm.engine.ranks.ray_ranks import RayRanks
from tritonllm.engine.ranks.shared_experts import SharedExpertRanks
from tritonllm.engine.start.ranks import Ranks

logger = logging.getLogger(__name__)


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
    launched = env.launched() if config.parallel.distributed_executor_backend is None else None
    if launched is not None and launched.size == config.parallel.world_size:
        logger.warning(
            "a launcher has started %d processes (WORLD_SIZE), and each of them starts an engine of %d ranks: with "
            "distributed_executor_backend='external_launcher' the processes are the ranks of one engine; 'mp' leaves "
            "this warning out",
            launched.size,
            launched.size,
        )
    return SpawnedRanks(config)
