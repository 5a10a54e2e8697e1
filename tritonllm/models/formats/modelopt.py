"""Checkpoints of NVIDIA's ModelOpt: FP8 and NVFP4.

``X.weight`` is float8_e4m3fn ``[N, K]`` with one ``X.weight_scale``, or uint8 ``[N, K / 2]`` of 4-bit floats, the first
in the low half, with a float8 ``X.weight_scale`` ``[N, K / 16]`` and a number ``X.weight_scale_2``: a scale is their
product.
"""

from collections.abc import Mapping
from typing import Any

from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats.fp8 import Fp8
from tritonllm.models.formats.joining import Headers
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.formats.row_major import FLOATS4, RowMajor
from tritonllm.models.tensor_files import StoredTensor

NAME = "modelopt"
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")


class ModelOpt:
    """The narrow weights of a checkpoint of ModelOpt; tensors say which are FP8, and which NVFP4."""

    def claim(self, name: str, tensor: StoredTensor, headers: Headers) -> tuple[str, NarrowTensor] | None:
        """As :class:`~tritonllm.models.formats.joining.CheckpointFormat` says."""
        if name.endswith(".weight") and tensor.dtype == "U8" and len(tensor.shape) == 2:
            n, k = tensor.shape[0], 2 * tensor.shape[1]
            groups = Groups(1, 16)
            scales = headers.part(name, NAME, f"{name}_scale", ["F8_E4M3"], [groups.shape(n, k)])
            factor = headers.part(name, NAME, f"{name}_scale_2", ["F32"], [(), (1,)])
            parts = {"numbers": (name, tensor), "scales": scales, "factor": factor}
            return name, NarrowTensor((n, k), RowMajor(NAME, (n, k), groups, FLOATS4), parts)
        return Fp8(None).claim(name, tensor, headers) if name.endswith(".weight") else None


def modelopt(config: Mapping[str, Any]) -> ModelOpt:
    """The format of ``"quant_method": "modelopt"``, and of ``hf_quant_config.json``.

    Raises:
        ValueError: an algorithm that is not supported.
    """
    algorithm = config.get("quant_algo")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(
            f"quantization_config ({NAME}): quant_algo {algorithm!r} is not supported; "
            f"supported: {', '.join(ALGORITHMS)}"
        )
    return ModelOpt()
