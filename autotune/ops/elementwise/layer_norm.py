"""LayerNorm alone, with a bias; its candidates are those of RMSNorm."""

from dataclasses import dataclass

import torch

from autotune.ops import Tunable
from autotune.ops.elementwise.rms_norm import TOKENS, RmsNorm, space
from autotune.problem import Inputs, TensorFactory, Work
from tritonllm.kernels import layer_norm, layer_norm_ref
from tritonllm.kernels.elementwise import norm


@dataclass(frozen=True)
class LayerNorm(RmsNorm):
    @property
    def name(self) -> str:
        return f"layer_norm T{self.tokens} N{self.n}"

    def inputs(self, new: TensorFactory) -> Inputs:
        return super().inputs(new) | {"bias": new.normal(self.n)}

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (layer_norm(x["x"], x["weight"], x["bias"]),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        return (layer_norm_ref(x["x"].float(), x["weight"], x["bias"]),)

    def work(self, x: Inputs) -> Work:
        return Work(bytes=2 * (2 * self.tokens + 2) * self.n)


# Hidden sizes of GPT-2, OPT and Pythia, Command-R and Command-R+.
HIDDEN = (768, 1024, 2048, 2560, 4096, 5120, 8192, 12288)

TUNABLE = Tunable(
    op="layer_norm",
    module=norm,
    default=norm.default_config,
    problems=tuple(LayerNorm(tokens, n) for n in HIDDEN for tokens in TOKENS),
    space=space,
)
