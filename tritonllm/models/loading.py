"""From a checkpoint's folder to a model: one of our families, or transformers behind our attention."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from tritonllm.config.parallel import ParallelConfig
from tritonllm.dist.exchange import NO_EXCHANGE, Exchange
from tritonllm.dist.group import ALONE, Group
from tritonllm.layers.linear import Linear
from tritonllm.layers.parameters import deferred
from tritonllm.models import checkpoint, families
from tritonllm.models.decoder import Decoder
from tritonllm.models.expert_checks import check_shared
from tritonllm.models.fallback import fallback_spec, fallback_stages, load_fallback
from tritonllm.models.fallback_decoder import FallbackSpec, TransformersDecoder
from tritonllm.models.fallback_weights import LiveWriter
from tritonllm.models.families import is_supported, spec_from_config
from tritonllm.models.formats.registry import stored_format
from tritonllm.models.gguf.header import is_gguf
from tritonllm.models.interface import CausalLM
from tritonllm.models.local_spec import check, check_context
from tritonllm.models.quantization import check_quantization, narrowing, quantize_layers
from tritonllm.models.spec import ModelSpec
from tritonllm.models.stages import Stage, stages_of
from tritonllm.models.weights import WeightWriter, dummy_weights, load_weights, parameter_shapes

logger = logging.getLogger(__name__)
PACKED_FROM = 512  # hidden size: a smaller model's weights stay in the CPU's caches, however they lie


def pack_weights(model: Decoder) -> None:
    """Lay the weights out as the CPU's products read them."""
    for module in model.modules():
        if isinstance(module, Linear) or (model.stage.first and model.spec.logits and module is model.lm_head):
            module.pack()


class Writer(Protocol):
    """Overwrites weights of a model one by one: :class:`~tritonllm.models.weights.WeightWriter`, whose docstrings say
    what the methods do, and its like."""

    @property
    def complete(self) -> bool: ...

    def forget(self) -> None: ...

    def check(self, name: str, tensor: torch.Tensor) -> None: ...

    def write(self, name: str, tensor: torch.Tensor) -> None: ...


def weight_writer(model: Decoder | TransformersDecoder, *, allow_nan: bool) -> Writer:
    """What overwrites a model's weights.

    Raises:
        ValueError: the weights lie packed, as those of larger models do on the CPU.
    """
    if isinstance(model, TransformersDecoder):
        return LiveWriter(model.weights, allow_nan=allow_nan)
    return WeightWriter(model, allow_nan=allow_nan)


def stage_model(folder: Path, like: Decoder, *, load_format: str, seed: int, allow_nan: bool) -> Decoder:
    """A second model on the host with the weights of ``folder``, laid out like ``like``; options as of loading.

    Raises:
        ValueError: weights that do not match ``like.spec``; the message names a tensor.
    """
    parameter = next(like.parameters())
    sizes: dict[str, Any] = {"dtype": like.dtype, "device": torch.device("cpu"), "max_model_len": 1}
    ranks: dict[str, Any] = {"group": like.group, "context": like.context, "stage": like.stage}
    staged = Decoder(like.whole, **sizes, **ranks, exchange=like.exchange)
    if load_format == "dummy":
        dummy_weights(staged, seed)
    else:
        load_weights(staged, folder, load_format=load_format, allow_nan=allow_nan)
    if parameter.is_cpu and like.spec.hidden_size >= PACKED_FROM:
        pack_weights(staged)
    return staged


def read_spec(
    folder: Path, *, trust_remote_code: bool = False, as_classifier: bool = False, model_impl: str = "auto"
) -> ModelSpec | FallbackSpec:
    """What ``config.json`` describes.

    Args:
        folder: the folder of the checkpoint.
        trust_remote_code: run Python code of the checkpoint, for architectures that transformers does not know.
        as_classifier: whether the files of a causal model have a classifier in the place of its output projection.
        model_impl: as in :class:`~tritonllm.config.engine.ModelConfig`.

    Raises:
        ValueError: no such file, a bad field, or a model that can run neither as a family nor through transformers, or
            not by the one of them that ``model_impl`` asks for.
    """
    config: Mapping[str, Any] = checkpoint.read_config(folder)
    if as_classifier:
        config = families.as_classifier(config)
    if model_impl == "vllm" or (model_impl == "auto" and is_supported(config)):
        return spec_from_config(config)
    if model_impl == "transformers" and is_gguf(folder):
        raise ValueError("model_impl='transformers': a GGUF file runs natively alone: leave it out")
    return fallback_spec(folder, trust_remote_code)


def read_stages(
    folder: Path, spec: ModelSpec | FallbackSpec, parallel: ParallelConfig, *, trust_remote_code: bool = False
) -> Sequence[Stage]:
    """Check that a model can be cut for so many ranks, and deal its layers out to stages; no weights are read.

    Args:
        spec: what :func:`read_spec` said, with the experts dealt out.

    Raises:
        ValueError: the model cannot be cut; the message names the argument and what does not divide.
    """
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if isinstance(spec, ModelSpec):
        check(spec, ranks)
        check_context(spec, ranks, parallel.decode_context_parallel_size)
        return stages_of(spec, parameter_shapes(spec), stages)
    for name, given in (
        (
            f"decode_context_parallel_size={parallel.decode_context_parallel_size}",
            parallel.decode_context_parallel_size > 1,
        ),
        ("enable_expert_parallel", parallel.enable_expert_parallel),
    ):
        if given:
            raise ValueError(
                f"{name}: {spec.architecture} runs through transformers, whose plan says what ranks share: leave it out"
            )
    return fallback_stages(folder, spec, ranks, stages, trust_remote_code)


def load_model(
    folder: Path,
    spec: ModelSpec | FallbackSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    load_format: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
    allow_nan: bool = False,
    group: Group = ALONE,
    context: Group = ALONE,
    stage: Stage | None = None,
    batch_invariant: bool = False,
    counts_experts: bool = False,
    exchange: Exchange = NO_EXCHANGE,
    quantization: str | None = None,
) -> CausalLM:
    """Build the model and fill its weights.

    Args:
        spec: what :func:`read_spec` said.
        dtype: the dtype of weights and activations.
        max_model_len: the longest sequence that may come.
        load_format: which files; ``dummy`` makes weights up from ``seed`` instead of reading them.
        trust_remote_code: run Python code of the checkpoint, for architectures that transformers does not know.
        allow_nan: take weights that are NaN or infinite.
        group: the ranks that share the model, or the stage, of which this one gets its part.
        context: the ranks of the group that split the keys of each sequence.
        stage: which layers; all of them by default.
        batch_invariant: a token's bits do not depend on the rest of its step; for models that
            :func:`tritonllm.models.invariance.check_invariance` knows.
        counts_experts: steps count which experts tokens choose; for one of our families that has experts.
        exchange: the exchange between the engines that share the experts, of which this one gets its part; for one of
            our families that has experts.
        quantization: the narrow format that the weights of the layers' products get (``"fp8"``, ``"int8"``,
            ``"int4"``); for one of our families. Of a checkpoint that is stored narrow, how, or ``None``.

    Raises:
        ValueError: weights that do not match the configuration; the message names a tensor. Or the model has no experts
            that so many engines can share, or weights that cannot be made narrow.
    """
    begin = time.monotonic()
    check_shared(spec, exchange.size)
    stored = None if load_format == "dummy" else stored_format(folder)
    quantization = None if quantization == stored else quantization
    check_quantization(spec, quantization, device, stored)
    if isinstance(spec, FallbackSpec):
        logger.info("%s does not run natively: the fallback decoder runs it through transformers", spec.architecture)
        return load_fallback(
            folder,
            spec,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            load_format=load_format,
            seed=seed,
            max_model_len=max_model_len,
            allow_nan=allow_nan,
            group=group,
            stage=stage,
            batch_invariant=batch_invariant,
        )
    if spec.text_of:
        logger.info("%s: its text model alone (%s), without images or sound", spec.text_of, spec.architecture)
    sizes: dict[str, Any] = {"dtype": dtype, "device": device, "max_model_len": max_model_len}
    how: dict[str, Any] = {"batch_invariant": batch_invariant, "counts_experts": counts_experts}
    # a GPU has room for narrow weights, not for 16 bits of all; CPUs and invariant products compute with these
    narrow = device.type != "cpu" and not batch_invariant and (quantization or stored) is not None
    with deferred() if narrow and load_format != "dummy" else nullcontext():
        model = Decoder(spec, **sizes, group=group, context=context, stage=stage, exchange=exchange, **how)
    then = None if quantization is None else narrowing(model, quantization)
    if load_format != "dummy":
        load_weights(model, folder, load_format=load_format, allow_nan=allow_nan, then=then)
    else:
        dummy_weights(model, seed)
        if quantization is not None:
            quantize_layers(model, quantization)
    model.quantization = quantization or model.quantization
    if device.type == "cpu" and spec.hidden_size >= PACKED_FROM:
        pack_weights(model)
    gigabytes = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
    source = "made up" if load_format == "dummy" else f"read from {folder}"
    logger.info("%.2f GB of weights %s in %.1f s", gigabytes, source, time.monotonic() - begin)
    return model
