"""Products of few rows with a weight of a byte or half a byte an element: which kernel, and by what tiles."""

from dataclasses import dataclass

import torch

from autotune.narrow import BY_ROW, NarrowFormat
from autotune.ops import Tunable
from autotune.ops.dense import linear as plain
from autotune.problem import Inputs, TensorFactory, Work
from tritonllm.kernels import Weight, linear, linear_ref, widen_weight_ref
from tritonllm.kernels.dense import invariant, narrow, widen
from tritonllm.kernels.dense import linear as dense_linear
from tritonllm.kernels.dense.choice import default_narrow_config
from tritonllm.kernels.dense.portable import rows, tiles
from tritonllm.kernels.elementwise import activation, norm
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class NarrowProduct(plain.Product):
    """``m`` rows with a weight ``[n, k]`` in a narrow format, ``of``."""

    of: NarrowFormat = BY_ROW

    @property
    def name(self) -> str:
        return super().name.replace("linear", f"linear_narrow {self.of}", 1)

    def inputs(self, new: TensorFactory) -> Inputs:
        data, scales = self.of.parts(new, self.n, self.k)
        return {"weight": data, "scales": scales, **self._rows(new)}

    def _weight(self, x: Inputs) -> Weight:
        return Weight(x["weight"], x["scales"], self.of.format, self.of.groups)

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
        narrow = x["weight"].nbytes + x["scales"].nbytes
        return Work(bytes=whole.bytes - 2 * self.n * self.k + narrow, flops=whole.flops)


def space(m: int, n: int, k: int, gated: str, format: str, group: int) -> list[tuning.Config]:
    """Those of 16-bit weights, for what fits there fits here; tiles also with the weight as the left operand, of four
    warps: with eight, int8 and 128 rows Triton 3.6 gave wrong sums."""
    found = []
    for config in plain.space(m, n, k, 1, gated):
        if config["kernel"] != "tiles":
            found.append(config)
        elif not group or format == "fp4" or config["BLOCK_K"] <= group:
            turned = (False, True) if config["BLOCK_N"] == 64 and m >= 32 else (False,)
            found += [config | {"TURNED": each} for each in turned]
    return found


TUNABLE = Tunable(
    op="linear_narrow",
    module=dense_linear,
    also=(rows, tiles, narrow, widen, invariant, norm, activation),
    default=default_narrow_config,
    problems=tuple(
        NarrowProduct(m, **layer, of=NarrowFormat(format, group))
        for layer in plain.LAYERS
        if "logits" not in layer
        for format, group in (("fp8", 0), ("int4", 128), *((("fp8", 128),) if layer["n"] == layer["k"] else ()))
        for m in (1, 16, 128)
    ),
    space=space,
)
