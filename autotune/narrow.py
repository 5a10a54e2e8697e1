"""Narrow weights of problems: random numbers, in the formats that products read."""

from dataclasses import dataclass

import torch

from autotune.problem import TensorFactory
from tritonllm.kernels import Groups
from tritonllm.kernels.dense.narrow import aligned
from tritonllm.kernels.dense.weight import FP4, NARROW, PACKED

_LARGEST = {"fp8": 256, "int8": 128, "int4": 8}


@dataclass(frozen=True)
class NarrowFormat:
    """Attributes:
    format: ``"fp8"``, ``"int8"``, ``"int4"`` or ``"fp4"`` (MXFP4).
    group: the columns that share a scale, of fp8 as many rows, too; 0: each row has one.
    """

    format: str = "fp8"
    group: int = 0

    def __str__(self) -> str:
        return f"{self.format} G{self.group}"

    @property
    def groups(self) -> Groups:
        return Groups(self.group if self.format == "fp8" else 1, self.group) if self.group else Groups()

    def parts(self, new: TensorFactory, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and scales of a weight ``[..., N, K]``. All bytes of two nibbles are numbers, and of float8 those from 0
        to 0x7e: up to 448; signs are the rows'."""
        *experts, n, k = shape
        columns, most = (k // 2, 0xFF) if self.format in PACKED else (k, 0x7E)
        of_scales = *experts, *self.groups.shape(n, k)
        data = new.integers(0, most, *experts, n, columns, dtype=torch.uint8).view(NARROW[self.format])
        if self.format == FP4:
            exponent = 125 - k.bit_length() // 2  # of numbers up to 6
            scales = new.integers(exponent - 2, exponent + 1, *of_scales, dtype=torch.uint8)
            return data, aligned(scales.view(torch.float8_e8m0fnu))
        return data, new.uniform(*of_scales) * (k**-0.5 / _LARGEST[self.format])


BY_ROW = NarrowFormat()
