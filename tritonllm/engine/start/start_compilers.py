"""The compilers at an engine's start: of Triton kernels beside the loading of weights, and of whole steps by torch."""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from tritonllm.config.engine import NO_COMPILATION, EngineConfig
from tritonllm.engine.start.precompile import BackgroundCompiler
from tritonllm.models.fallback_decoder import TransformersDecoder
from tritonllm.models.interface import CausalLM, ModelFacts
from tritonllm.models.spec import ModelSpec

logger = logging.getLogger(__name__)


def background_compiler(
    spec: ModelFacts, config: EngineConfig, draft: ModelSpec | None
) -> AbstractContextManager[BackgroundCompiler | None]:
    """For a model whose kernels can be listed, if there may be a GPU."""
    if isinstance(spec, ModelSpec) and torch.version.cuda is not None and config.model.device != "cpu":
        return BackgroundCompiler(spec, config, draft)
    return nullcontext()


def compiled_if_asked(model: CausalLM, config: EngineConfig) -> CausalLM:
    """The model, with compiled steps if ``compilation_config`` says so.

    By default that is a model of transformers in CUDA graphs: one of OLMo-1B's shape takes 1.31 ms a token on an H200
    instead of 1.96. (A native model has hardly any small operations between its kernels.)

    Raises:
        ValueError: torch cannot compile it, and was asked to.
    """
    mode = config.compilation_config.mode
    gains = isinstance(model, TransformersDecoder) and model.supports_graphs and not config.enforce_eager
    gains = gains and config.parallel.world_size == 1  # the compiler does not know what ranks send each other
    if mode == NO_COMPILATION or (mode is None and not gains):
        return model
    try:
        return _compiled(model, config)
    except ValueError as error:
        if mode is not None:
            raise
        logger.warning("%s", error)
        return model


def _compiled(model: CausalLM, config: EngineConfig) -> CausalLM:
    from tritonllm.models.compiled import CompiledModel  # torch's compiler takes a second to import

    scheduler = config.scheduler
    return CompiledModel(
        model,
        config.compilation_config.backend,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )
