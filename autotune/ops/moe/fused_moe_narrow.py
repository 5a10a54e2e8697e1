"""A mixture of experts with narrow weights: the tile of the two grouped products."""

from dataclasses import dataclass

import torch

from autotune.narrow import BY_ROW, NarrowFormat
from autotune.ops import Tunable
from autotune.ops.moe.fused_moe import FusedMoe, portable_space
from autotune.problem import Inputs, TensorFactory, Work
from tritonllm.kernels import Weight, fused_moe, fused_moe_ref
from tritonllm.kernels.dense import narrow, widen
from tritonllm.kernels.moe import experts as moe_experts
from tritonllm.kernels.moe import grouping, tiles
from tritonllm.kernels.moe.portable import products
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class NarrowFusedMoe(FusedMoe):
    """Experts whose weights are in a narrow format, ``of``."""

    of: NarrowFormat = BY_ROW

    @property
    def name(self) -> str:
        return super().name.replace("fused_moe", f"fused_moe_narrow {self.of}", 1)

    def shared(self, new: TensorFactory) -> Inputs:
        e, n, i = self.experts, self.hidden, self.intermediate
        up, down = self.of.parts(new, e, 2 * i, n), self.of.parts(new, e, n, i)
        return {"w_gate_up": up[0], "w_gate_up_scales": up[1], "w_down": down[0], "w_down_scales": down[1]}

    def _both(self, x: Inputs) -> list[Weight]:
        names = ("w_gate_up", "w_down")
        return [Weight(x[name], x[f"{name}_scales"], self.of.format, self.of.groups) for name in names]

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
        NarrowFusedMoe(tokens, *shape, NarrowFormat(format, group))
        for shape, format, group in (
            ((128, 8, 2048, 768), "fp8", 128),
            ((128, 8, 2048, 768), "int4", 128),
            ((128, 4, 2880, 2880), "fp4", 32),  # gpt-oss-120b
        )
        for tokens in (1, 16, 256, 2048)
    ),
    space=space,
)
