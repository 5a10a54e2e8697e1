"""LayerNorm with the residual addition before it, in place."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable
from autotune.ops.elementwise.fused_add_rms_norm import AddRmsNorm
from autotune.ops.elementwise.layer_norm import HIDDEN
from autotune.ops.elementwise.rms_norm import TOKENS, space
from autotune.problem import Inputs, TensorFactory, Work
from tritonllm.kernels import fused_add_layer_norm, fused_add_layer_norm_ref
from tritonllm.kernels.elementwise import norm


@dataclass(frozen=True)
class AddLayerNorm(AddRmsNorm):
    @property
    def name(self) -> str:
        return f"fused_add_layer_norm T{self.tokens} N{self.n}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return super().inputs(new) | {"bias": new.normal(self.n)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return fused_add_layer_norm(x["x"], x["residual"], x["weight"], x["bias"])

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return fused_add_layer_norm_ref(x["x"].float(), x["residual"].float(), x["weight"], x["bias"])

    def work(self, x: Inputs) -> Work:
        return Work(bytes=2 * (4 * self.tokens + 2) * self.n)


TUNABLE = Tunable(
    op="fused_add_layer_norm",
    module=norm,
    default=norm.default_config,
    problems=tuple(AddLayerNorm(tokens, n) for n in HIDDEN for tokens in TOKENS),
    space=space,
)
