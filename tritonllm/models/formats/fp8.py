"""float8 weights as Hugging Face's ``fp8`` stores them: DeepSeek's, Qwen3's, MiniMax's, and those of one scale.

``X.weight`` is float8_e4m3fn ``[N, K]`` and ``X.weight_scale_inv`` float32 (or bfloat16, or a power of two in E8M0), by
which it is multiplied in spite of its name: ``[ceil(N / 128), ceil(K / 128)]`` of blocks (``weight_block_size``), or a
single one. Others call it ``weight_scale``, of the whole or of each row. Experts lie one by one, or stacked:
``experts.gate_up_proj`` ``[E, 2I, hidden]`` and ``experts.gate_up_proj_scale_inv``. DeepSeek-AI, "DeepSeek-V3 Technical
Report" (2024), section 3.3. What is not narrow (``modules_to_not_convert``) has 16-bit tensors as ever.

Products round their rows, too: by scales that are made for each row, also where the checkpoint brings one for all
(``activation_scheme``: static). With scales of blocks they do not here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonllm.models.formats.joining import SCALE_TYPES, Headers
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.formats.row_major import RowMajor
from tritonllm.models.tensor_files import StoredTensor

NAME = "fp8"
_SCALES = ("_scale_inv", "_scale")
_TYPES = (*SCALE_TYPES, "F8_E8M0")


@dataclass(frozen=True)
class Fp8:
    """float8 weights with scales of the whole, of rows or of blocks.

    Attributes:
        block: rows and columns of a block; ``None``: there are none.
    """

    block: tuple[int, int] | None

    def claim(self, name: str, tensor: StoredTensor, headers: Headers) -> tuple[str, NarrowTensor] | None:
        """As :class:`~tritonllm.models.formats.joining.CheckpointFormat` says."""
        if tensor.dtype != "F8_E4M3" or len(tensor.shape) not in (2, 3):
            return None
        scales = next((name + end for end in _SCALES if name + end in headers.stored), name + _SCALES[0])
        part, groups = headers.scales(name, NAME, scales, _TYPES, tensor.shape, block=self.block)
        rounds = groups.columns == 0 and len(tensor.shape) == 2
        scheme = RowMajor(NAME, (tensor.shape[-2], tensor.shape[-1]), groups, rounds_rows=rounds)
        return name, NarrowTensor(tensor.shape, scheme, {"numbers": (name, tensor), "scales": part})


def fp8(config: Mapping[str, Any]) -> Fp8:
    """The format of ``"quant_method": "fp8"`` and of ``"fbgemm_fp8"``.

    Raises:
        ValueError: a bad field.
    """
    if config.get("fmt") not in (None, "e4m3"):
        raise ValueError(f"config.json: fmt of the quantization_config must be 'e4m3', got {config['fmt']!r}")
    return Fp8(two_sizes(config.get("weight_block_size"), "weight_block_size"))


def two_sizes(value: Any, field: str) -> tuple[int, int] | None:
    """A pair of sizes, or ``None``.

    Raises:
        ValueError: something else.
    """
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(v, int) and v > 0 for v in value):
        raise ValueError(f"config.json: {field} of the quantization_config must be two sizes, got {value!r}")
    return value[0], value[1]
