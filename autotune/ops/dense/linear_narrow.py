"""Products of few rows with a weight of a byte an element: which kernel, and how much of the weight a program takes."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable
from autotune.ops.dense import linear as plain
from autotune.problem import Inputs, TensorFactory, Work
from tritonllm.kernels import Groups, Weight, linear, linear_ref, widen_weight_ref
from tritonllm.kernels.dense import invariant, narrow
from tritonllm.kernels.dense import linear as dense_linear
from tritonllm.kernels.dense.choice import default_narrow_config
from tritonllm.kernels.dense.portable import rows, tiles
from tritonllm.kernels.elementwise import activation, norm
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class NarrowProduct(plain.Product):
    """``m`` rows with a float8 weight ``[n, k]``.

    Attributes:
        group: the rows and columns that share a scale; 0: each row has one.
    """

    group: int = 0

    @property
    def name(self) -> str:
        return super().name.replace("linear", "linear_narrow", 1) + (f" G{self.group}" if self.group else "")

    @property
    def groups(self) -> Groups:
        return Groups(self.group, self.group) if self.group else Groups()

    def inputs(self, new: TensorFactory) -> Inputs:
        # numbers from 0 to 416 at random, as their bytes; signs are the rows'
        numbers = new.integers(0, 0x7E, self.n, self.k, dtype=torch.int8).view(torch.float8_e4m3fn)
        scales = new.uniform(*self.groups.shape(self.n, self.k)) * (self.k**-0.5 / 256)
        return {"weight": numbers, "scales": scales, **self._rows(new)}

    def _weight(self, x: Inputs) -> Weight:
        return Weight(x["weight"], x["scales"], "fp8", self.groups)

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        out = torch.empty(self.m, self.n, dtype=torch.float32, device=x["x"].device) if self.logits else None
        more = {"out": out, "workspace": x["workspace"], "constant_weight": True}
        return (linear(x["x"], self._weight(x), **self._fused(x), **more),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        fused = self._fused(x)
        if self.residual:
            fused["residual"] = x["residual"].float()
        return (linear_ref(x["x"].float(), widen_weight_ref(self._weight(x), torch.float32), **fused),)

    def work(self, x: Inputs) -> Work:
        whole = super().work(x)
        return Work(bytes=whole.bytes - self.n * self.k + 4 * x["scales"].numel(), flops=whole.flops)


def space(m: int, n: int, k: int, gated: str, group: int) -> list[tuning.Config]:
    """Those of 16-bit weights: what fits there fits here."""
    return plain.space(m, n, k, 1, gated)


TUNABLE = Tunable(
    op="linear_narrow",
    module=dense_linear,
    also=(rows, tiles, narrow, invariant, norm, activation),
    default=default_narrow_config,
    problems=tuple(
        NarrowProduct(m, **layer, group=group)
        for layer in plain.LAYERS
        if "logits" not in layer
        for group in ((0, 128) if layer["n"] == layer["k"] else (0,))
        for m in (1, 16, 64)
    ),
    space=space,
)
