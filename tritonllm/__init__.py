"""LLM inference whose hot paths are Triton kernels that anyone can import.

``from tritonllm import LLM, SamplingParams`` is the engine, ``from tritonllm.kernels import rms_norm`` one kernel.
Importing this package imports nothing but the standard library: an attribute access imports the file that holds it.
Its loggers are ``tritonllm`` and those below it; a program that sets up no logging sees no message.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from tritonllm.starting import no_searches
from tritonllm.version import __version__

if TYPE_CHECKING:
    from tritonllm.beam_search_params import BeamSearchParams
    from tritonllm.engine.arg_utils import EngineArgs
    from tritonllm.engine.engine import LLMEngine
    from tritonllm.engine.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from tritonllm.inputs import TextPrompt, TokensPrompt
    from tritonllm.offline.llm import LLM
    from tritonllm.pooling_params import PoolerConfig, PoolingParams
    from tritonllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
    from tritonllm.serve.async_llm import AsyncEngineArgs, AsyncLLM

logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOME = {
    "BeamSearchParams": "beam_search_params",
    "BeamSearchOutput": "engine.outputs",
    "BeamSearchSequence": "engine.outputs",
    "LLM": "offline.llm",
    "SamplingParams": "sampling_params",
    "RepetitionDetectionParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
    "RequestOutput": "engine.outputs",
    "CompletionOutput": "engine.outputs",
    "PoolingParams": "pooling_params",
    "PoolerConfig": "pooling_params",
    "PoolingRequestOutput": "engine.outputs",
    "EmbeddingRequestOutput": "engine.outputs",
    "ClassificationRequestOutput": "engine.outputs",
    "ScoringRequestOutput": "engine.outputs",
    "EngineArgs": "engine.arg_utils",
    "LLMEngine": "engine.engine",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "AsyncLLM": "serve.async_llm",
    "AsyncEngineArgs": "serve.async_llm",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolerConfig",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    with no_searches():
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
