"""Narrow weights made of a model's 16-bit ones when it is loaded: ``quantization="fp8"``, ``"int8"`` or ``"int4"``.

The weights of all layers' products become numbers of a byte with a scale for each row, or of four bits with one for
each 128 columns of a row; embeddings, the output projection, norms and biases stay as they are, and so do activations.
Ranks that have parts of a row agree on its scale, so that several ranks have the weights of one.
"""

import torch

from tritonllm.kernels import quantize_weight
from tritonllm.kernels.dense.narrow import unit_of
from tritonllm.kernels.dense.weight import INT4, NARROW, Groups, Weight
from tritonllm.layers.linear import Linear
from tritonllm.layers.moe import MoESpec
from tritonllm.models.decoder import Decoder
from tritonllm.models.fallback_decoder import FallbackSpec
from tritonllm.models.shards import Split, splits
from tritonllm.models.spec import ModelSpec

GROUPS = {INT4: Groups(1, 128)}  # of the formats in which a row is not one group


def check_quantization(spec: ModelSpec | FallbackSpec, quantization: str | None, device: torch.device) -> None:
    """Check that the weights of a model can be made narrow.

    Raises:
        ValueError: they cannot; the message says why.
    """
    if quantization is None:
        return
    what = f"quantization={quantization!r}"
    if not isinstance(spec, ModelSpec):
        raise ValueError(f"{what}: {spec.architecture} runs through transformers, with 16-bit weights: leave it out")
    if any(isinstance(layer.mlp, MoESpec) for layer in spec.layers):
        raise ValueError(f"{what}: experts ({spec.architecture}) have 16-bit weights only so far: leave it out")
    if quantization == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"{what} needs a GPU of compute capability 8.9 or more: quantization='int8' runs here")


@torch.no_grad()
def quantize_layers(model: Decoder, quantization: str) -> None:
    """Make the weights of all layers' products narrow, one after the other; each takes its 16-bit one's place."""
    cut = splits(model.whole) if model.group.size > 1 else {}
    for name, module in model.layers.named_modules():
        if not isinstance(module, Linear):
            continue
        where = cut.get(model.stage.whole_name(f"layers.{name}.weight"))
        by_columns = isinstance(where, Split) and where.axis == 1
        groups, largest = GROUPS.get(quantization, Groups()), None
        if quantization == INT4 and module.weight.shape[1] % unit_of(groups):
            raise ValueError(
                f"quantization='int4': layers.{name} has {module.weight.shape[1]} columns on a rank, and its groups "
                f"have {unit_of(groups)}: use 'int8', or another tensor_parallel_size"
            )
        if by_columns and groups.columns == 0 and not module.weight.is_meta:
            largest = model.group.stack(module.weight.abs().amax(1, keepdim=True).float()).amax(0)
        module.narrow(_narrow(module.weight, quantization, groups, largest))
    model.quantization = quantization
    model.fuse_anew()


def _narrow(weight: torch.Tensor, quantization: str, groups: Groups, largest: torch.Tensor | None) -> Weight:
    """The weight in a narrow format; of one without numbers, on a meta device, one without numbers."""
    if not weight.is_meta:
        return quantize_weight(weight, quantization, groups, largest=largest)
    n, k = weight.shape
    data = weight.new_empty(n, k // 2 if quantization == INT4 else k, dtype=NARROW[quantization])
    return Weight(data, weight.new_empty(groups.shape(n, k), dtype=torch.float32), quantization, groups)
