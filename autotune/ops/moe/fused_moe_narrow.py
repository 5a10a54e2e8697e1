"""A mixture of experts with narrow weights: the tile of the two grouped products."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable
from autotune.ops.moe.fused_moe import FusedMoe, portable_space
from autotune.problem import Inputs, TensorFactory, Work
from tritonllm.kernels import Groups, Weight, fused_moe, fused_moe_ref
from tritonllm.kernels.dense import narrow, widen
from tritonllm.kernels.dense.weight import NARROW
from tritonllm.kernels.moe import experts as moe_experts
from tritonllm.kernels.moe import grouping, tiles
from tritonllm.kernels.moe.portable import products
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class NarrowFusedMoe(FusedMoe):
    """Attributes:
    format: ``"fp8"``, ``"int8"`` or ``"int4"``.
    group: the columns that share a scale, of fp8 as many rows, too; 0: each row has one.
    """

    format: str = "fp8"
    group: int = 0

    @property
    def name(self) -> str:
        return super().name.replace("fused_moe", f"fused_moe_narrow {self.format} G{self.group}", 1)

    @property
    def groups(self) -> Groups:
        return Groups(self.group if self.format == "fp8" else 1, self.group) if self.group else Groups()

    def shared(self, new: TensorFactory) -> Inputs:
        made: Inputs = {}
        e, n, i = self.experts, self.hidden, self.intermediate
        largest = {"fp8": 256, "int8": 128, "int4": 8}[self.format]
        for name, rows, k in (("w_gate_up", 2 * i, n), ("w_down", n, i)):
            columns, most = (k // 2, 0xFF) if self.format == "int4" else (k, 0x7E)
            made[name] = new.integers(0, most, e, rows, columns, dtype=torch.uint8).view(NARROW[self.format])
            made[f"{name}_scales"] = new.uniform(e, *self.groups.shape(rows, k)) * (k**-0.5 / largest)
        return made

    def _both(self, x: Inputs) -> list[Weight]:
        return [Weight(x[name], x[f"{name}_scales"], self.format, self.groups) for name in ("w_gate_up", "w_down")]

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (fused_moe(x["x"], *self._both(x), x["weights"], x["ids"]),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (fused_moe_ref(x["x"].float(), *self._both(x), x["weights"], x["ids"]),)

    def work(self, x: Inputs) -> Work:
        whole = super().work(x)
        of_one_expert = 3 * self.hidden * self.intermediate
        hit = len(x["ids"].unique())
        narrow = hit * sum(x[name].nbytes for name in ("w_gate_up", "w_down", "w_gate_up_scales", "w_down_scales"))
        return Work(bytes=whole.bytes - 2 * hit * of_one_expert + narrow // self.experts, flops=whole.flops)


def space(
    tokens: int,
    top_k: int,
    experts: int,
    n: int,
    i: int,
    itemsize: int,
    activation: str,
    arch: str,
    format: str,
    group: int,
) -> list[tuning.Config]:
    default = tiles.narrow_config(tokens, top_k, experts, n, i, itemsize, activation, arch, format, group)
    return portable_space(default)


TUNABLE = Tunable(
    op="fused_moe_narrow",
    module=products,
    also=(moe_experts, grouping, narrow, widen),
    default=tiles.narrow_config,
    problems=tuple(
        NarrowFusedMoe(tokens, 128, 8, 2048, 768, format, group)
        for format, group in (("fp8", 128), ("int4", 128))
        for tokens in (1, 16, 256, 2048)
    ),
    space=space,
)
