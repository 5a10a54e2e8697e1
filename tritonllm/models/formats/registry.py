"""Which narrow format a checkpoint has: by ``quantization_config`` of its ``config.json``."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tritonllm.models.checkpoint import read_json
from tritonllm.models.formats.awq import awq
from tritonllm.models.formats.bitsandbytes import bitsandbytes
from tritonllm.models.formats.compressed_tensors import compressed_tensors
from tritonllm.models.formats.fp8 import fp8
from tritonllm.models.formats.gptq import auto_round, gptq
from tritonllm.models.formats.joining import CheckpointFormat
from tritonllm.models.formats.modelopt import modelopt
from tritonllm.models.formats.mxfp4 import Mxfp4, mxfp4

FIELD = "quantization_config"
OLD_FIELD = "compression_config"  # what first checkpoints of compressed-tensors call it
MODELOPT_FILE = "hf_quant_config.json"  # where ModelOpt's older checkpoints say it
METHODS: dict[str, Callable[[Mapping[str, Any]], CheckpointFormat]] = {
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "gptq": gptq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
}


def format_of(quantization: Mapping[str, Any]) -> CheckpointFormat:
    """The format that a ``quantization_config`` describes.

    Raises:
        ValueError: one that is not supported, or a bad field; the message names it.
    """
    if not isinstance(quantization, Mapping):
        raise ValueError(f"config.json: {FIELD} must be an object, got {quantization!r}")
    method = str(quantization.get("quant_method"))
    if "quant_method" not in quantization and any(quantization.get(f"load_in_{bits}bit") for bits in (4, 8)):
        method = "bitsandbytes"  # its first checkpoints do not name it
    if method not in METHODS:
        raise ValueError(
            f"config.json: {FIELD} with quant_method={method!r} is not supported; supported: {', '.join(METHODS)}"
        )
    return METHODS[method](quantization)


def format_in(folder: Path) -> CheckpointFormat:
    """The format of the checkpoint in a folder. Without a ``quantization_config``, tensors may still be MXFP4: their
    names alone say so.

    Raises:
        ValueError: as :func:`format_of`.
    """
    quantization = _said_in(folder)
    return Mxfp4() if quantization is None else format_of(quantization)


def stored_format(folder: Path) -> str | None:
    """What the checkpoint in a folder calls its narrow format; ``None`` where it says nothing."""
    quantization = _said_in(folder)
    return None if quantization is None else str(quantization.get("quant_method"))


def _said_in(folder: Path) -> Mapping[str, Any] | None:
    """What ``config.json``, or ModelOpt's file beside it, says of the weights."""
    file, apart = folder / "config.json", folder / MODELOPT_FILE
    quantization = quantization_of(read_json(file)) if file.exists() else None
    if quantization is None and apart.exists():
        return {"quant_method": "modelopt", **(read_json(apart).get("quantization") or {})}
    return quantization


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The ``quantization_config`` of a model, or of the text model in it; ``None`` if there is none."""
    parts = [config, *(config.get(name) for name in ("text_config", "llm_config"))]
    found = [part.get(field) for part in parts if isinstance(part, Mapping) for field in (FIELD, OLD_FIELD)]
    return next((quantization for quantization in found if quantization is not None), None)
