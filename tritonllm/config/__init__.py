"""What users set, as frozen dataclasses: model, cache, scheduler, ranks, speculation, transfer, sampling, pooling.

Imports no torch. :class:`EngineConfig` holds what an engine is made from; ``EngineArgs`` and the command line fill it.
"""

from tritonllm.config.engine import (
    PARTS,
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.config.parallel import ParallelConfig
from tritonllm.config.pooling_params import PoolerConfig
from tritonllm.config.speculative import SpeculativeConfig

__all__ = [
    "PARTS",
    "CacheConfig",
    "CompilationConfig",
    "EngineConfig",
    "KVTransferConfig",
    "ModelConfig",
    "ParallelConfig",
    "PoolerConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
]
