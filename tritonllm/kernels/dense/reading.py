"""How the kernels of tiles read a weight of any format: what they are given, and how a tile must lie."""

from typing import Any, NamedTuple

import torch

from tritonllm.kernels.dense.arguments import Scaled, half_unit, scales_for_kernel
from tritonllm.kernels.dense.widen import widens_in_place
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.chip import on_amd

AMD_STAGES = 3  # its pipeliner fails with more where floats of four bits get their scales


class TileReading(NamedTuple):
    """What a launch adds for the format of its weight.

    Attributes:
        parts: scales, zero points and scales of rows, each a tensor or None.
        constants: ``GROUP_N``, ``GROUP_K``, ``HALF``, ``SCALES``, ``WORDS`` and ``IN_PLACE`` of the kernel.
        config: the launch's configuration, with a ``BLOCK_K`` and ``num_stages`` that the format allows.
    """

    parts: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    constants: dict[str, Any]
    config: tuning.Config


def tile_reading(weight: torch.Tensor, scaled: Scaled, config: tuning.Config) -> TileReading:
    """How to read ``weight [..., N, K]`` by tiles of at most ``BLOCK_K`` columns, or of a whole unit.

    A tile has columns of one group; of floats of four bits, which get their scales where they are widened, of any
    number of groups.
    """
    (scales, kind), half, columns = scales_for_kernel(scaled), half_unit(weight, scaled), scaled.group_columns
    block = config["BLOCK_K"] if kind or not columns else min(config["BLOCK_K"], columns)
    config = config | {"BLOCK_K": max(block, 2 * half)}
    if kind and on_amd(weight.device):
        config |= {"num_stages": min(config["num_stages"], AMD_STAGES)}
    constants = {"GROUP_N": scaled.group_rows, "GROUP_K": columns, "HALF": half, "SCALES": kind}
    constants |= {"WORDS": kind is not None and _are_words(scales, columns, config["BLOCK_K"])}
    constants |= {"IN_PLACE": scales is not None and widens_in_place(weight.device)}
    parts = scales, scaled.zeros, scaled.row_scales
    return TileReading(parts, constants, config)


def _are_words(scales: torch.Tensor | None, columns: int, block: int) -> bool:
    """Whether the bytes of scales of a row's next ``block`` columns are one aligned word."""
    count = block // columns if columns else 0
    if scales is None or count not in (4, 8):
        return False
    return scales.data_ptr() % count == 0 and all(stride % count == 0 for stride in scales.stride()[:-1])
