"""Narrow weights made of a model's 16-bit ones when it is loaded: ``quantization="fp8"``, ``"int8"`` or ``"int4"``.

The weights of all layers' products become numbers of a byte with a scale for each row, or of four bits with one for
each 128 columns of a row; embeddings, the output projection, routers, norms and biases stay as they are. Products with
float8 round their rows to it, too, but for those of experts; with the others activations stay as they are. Ranks that
have parts of a row agree on its scale, so that several ranks have the weights of one.
"""

import torch

from tritonllm.config.engine import MADE
from tritonllm.kernels import quantize_weight
from tritonllm.kernels.dense.narrow import unit_of
from tritonllm.kernels.dense.weight import FP8, INT4, NARROW, Groups, Weight
from tritonllm.kernels.runtime.float8 import require_float8
from tritonllm.layers.parameters import HoldsWeights
from tritonllm.models.decoder import Decoder
from tritonllm.models.deferred_weights import Then, products_of_layers
from tritonllm.models.fallback_decoder import FallbackSpec
from tritonllm.models.shards import Split, splits
from tritonllm.models.spec import ModelSpec

GROUPS = {INT4: Groups(1, 128)}  # of the formats in which a row is not one group


def check_quantization(
    spec: ModelSpec | FallbackSpec, quantization: str | None, device: torch.device, stored: str | None = None
) -> None:
    """Check that the weights of a model can be made narrow.

    Args:
        stored: the narrow format of the checkpoint, if it has one.

    Raises:
        ValueError: they cannot; the message says why.
    """
    if quantization is None:
        return
    what = f"quantization={quantization!r}"
    if stored is not None:
        raise ValueError(f"{what}: the checkpoint's weights are narrow already ({stored}): leave it out")
    if quantization not in MADE:
        raise ValueError(f"{what}: config.json has no quantization_config that says so: leave it out")
    if not isinstance(spec, ModelSpec):
        raise ValueError(f"{what}: {spec.architecture} runs through transformers, with 16-bit weights: leave it out")
    if quantization == FP8 and device.type == "cuda":
        require_float8(what, device, "quantization='int8' runs here")


@torch.no_grad()
def quantize_layers(model: Decoder, quantization: str) -> None:
    """Make the weights of all layers' products narrow, one after the other; each takes its 16-bit one's place. Raises
    as :func:`narrowing`."""
    narrow = narrowing(model, quantization)
    for name, module, attribute in list(products_of_layers(model)):
        narrow(model.stage.whole_name(name), module, attribute)
    model.quantization = quantization
    model.fuse_anew()


def narrowing(model: Decoder, quantization: str) -> Then:
    """What makes a weight narrow, given its name in the whole model, its module, and its name there; those that are not
    of layers' products stay as they are.

    Raises:
        ValueError: rows of a weight here are not in whole groups. What is returned raises it for values that are NaN or
            infinite.
    """
    cut = splits(model.whole) if model.group.size > 1 else {}
    of_layers = {model.stage.whole_name(name): getattr(module, own) for name, module, own in products_of_layers(model)}
    unit = unit_of(GROUPS[INT4])
    for name, weight in of_layers.items():
        if quantization == INT4 and weight.shape[-1] % unit:
            raise ValueError(
                f"quantization='int4': {name} has {weight.shape[-1]} columns on a rank, and its groups have {unit}: "
                "use 'int8', or another tensor_parallel_size"
            )

    def narrow(parameter: str, module: HoldsWeights, name: str) -> None:
        if parameter not in of_layers:
            return
        weight, where = getattr(module, name), cut.get(parameter)
        by_columns = isinstance(where, Split) and where.axis == weight.dim() - 1
        try:
            module.hold(name, _narrow(weight, quantization, model, by_columns))
        except ValueError as error:
            raise ValueError(f"quantization={quantization!r}: {parameter}: {error}") from error

    return narrow


def _narrow(weight: torch.Tensor, quantization: str, model: Decoder, by_columns: bool) -> Weight:
    """The weight, or those of experts, in a narrow format; of one without numbers, on a meta device, one without
    numbers. ``by_columns``: ranks have parts of its rows."""
    groups, (*experts, n, k) = GROUPS.get(quantization, Groups()), weight.shape
    scales = *experts, *groups.shape(n, k)
    if weight.is_meta:
        data = weight.new_empty(*experts, n, k // 2 if quantization == INT4 else k, dtype=NARROW[quantization])
        scale = weight.new_empty(scales, dtype=torch.float32)
        return Weight(data, scale, quantization, groups, rounds_rows=quantization == FP8 and not experts)
    largest = None
    if by_columns and groups.columns == 0:
        largest = model.group.stack(weight.abs().amax(-1, keepdim=True).float()).amax(0)
    if not experts:
        narrow = quantize_weight(weight, quantization, groups, largest=largest)
        return narrow._replace(rounds_rows=quantization == FP8)
    each = [
        quantize_weight(one, quantization, groups, largest=None if largest is None else largest[place])
        for place, one in enumerate(weight)
    ]
    data, of_each = torch.stack([one.data for one in each]), [one.scales for one in each if one.scales is not None]
    return Weight(data, torch.stack(of_each), quantization, groups)
