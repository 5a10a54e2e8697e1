"""LLM inference whose hot paths are Triton kernels that anyone can import.

``from tritonllm import LLM, SamplingParams`` is the engine, ``from tritonllm.kernels import rms_norm`` one kernel.
Importing this package imports nothing but the standard library: an attribute access imports the file that holds it.
Its loggers are ``tritonllm`` and those below it; a program that sets up no logging sees no message.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from tritonllm import moved
from tritonllm.system.starting import no_searches
from tritonllm.version import __version__

if TYPE_CHECKING:
    from tritonllm.config.beam_search_params import BeamSearchParams
    from tritonllm.config.pooling_params import PoolerConfig, PoolingParams
    from tritonllm.config.prompts import TextPrompt, TokensPrompt
    from tritonllm.config.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
    from tritonllm.engine.data.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from tritonllm.engine.loop.engine import LLMEngine
    from tritonllm.engine.start.arg_utils import EngineArgs
    from tritonllm.models.quantized_checkpoint import quantize_checkpoint
    from tritonllm.offline.llm import LLM
    from tritonllm.serve.engines.async_llm import AsyncEngineArgs, AsyncLLM

logging.getLogger(__name__).addHandler(logging.NullHandler())
moved.install()

_HOME = {
    "BeamSearchParams": "config.beam_search_params",
    "BeamSearchOutput": "engine.data.outputs",
    "BeamSearchSequence": "engine.data.outputs",
    "LLM": "offline.llm",
    "SamplingParams": "config.sampling_params",
    "RepetitionDetectionParams": "config.sampling_params",
    "StructuredOutputsParams": "config.sampling_params",
    "RequestOutput": "engine.data.outputs",
    "CompletionOutput": "engine.data.outputs",
    "PoolingParams": "config.pooling_params",
    "PoolerConfig": "config.pooling_params",
    "PoolingRequestOutput": "engine.data.outputs",
    "EmbeddingRequestOutput": "engine.data.outputs",
    "ClassificationRequestOutput": "engine.data.outputs",
    "ScoringRequestOutput": "engine.data.outputs",
    "EngineArgs": "engine.start.arg_utils",
    "LLMEngine": "engine.loop.engine",
    "TextPrompt": "config.prompts",
    "TokensPrompt": "config.prompts",
    "AsyncLLM": "serve.engines.async_llm",
    "AsyncEngineArgs": "serve.engines.async_llm",
    "quantize_checkpoint": "models.quantized_checkpoint",
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
    "quantize_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    with no_searches():
        module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
