"""What users set, as frozen dataclasses: model, cache, scheduler, ranks, speculation, transfer, sampling, pooling.

Imports no torch. :class:`EngineConfig` holds what an engine is made from; ``EngineArgs`` and the command line fill it.
The names here are those of the module ``tritonllm.config`` that there was: an access imports the file that holds one.
"""

import importlib
from typing import Any

_HOME = {
    "PARTS": "engine",
    "CacheConfig": "engine",
    "CompilationConfig": "engine",
    "EngineConfig": "engine",
    "ModelConfig": "engine",
    "SchedulerConfig": "engine",
    "KVTransferConfig": "kv_transfer",
    "ParallelConfig": "parallel",
    "PoolerConfig": "pooling_params",
    "SpeculativeConfig": "speculative",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
