"""Products of few rows: which kernel, how much of the weight a program takes, and in how many parts."""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from autotune.ops import Tunable, product
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import linear, linear_ref, linear_workspace_size
from tritonllm.kernels.dense import linear as dense_linear
from tritonllm.kernels.dense.arguments import HEAVY
from tritonllm.kernels.dense.choice import TORCH, default_config
from tritonllm.kernels.dense.invariant import SMALL
from tritonllm.kernels.dense.portable import rows as portable_rows
from tritonllm.kernels.dense.portable import tiles as portable_tiles
from tritonllm.kernels.dense.portable.rows import MAX_ROWS
from tritonllm.kernels.elementwise import activation, norm
from tritonllm.kernels.runtime import tuning


@dataclass(frozen=True)
class Product(Problem):
    """``m`` rows with an ``[n, k]`` weight, and what a decode step fuses into it.

    Attributes:
        norm: RMS norm of the rows first.
        gated: the weight's halves are gate and up of a SwiGLU.
        residual: the result is added to it.
        logits: the result is float32.
    """

    mutates = ("residual",)
    together = HEAVY  # `sm90/few.py` has a table of its own

    m: int
    n: int
    k: int
    norm: bool = False
    gated: bool = False
    residual: bool = False
    logits: bool = False

    @property
    def name(self) -> str:
        fused = " ".join(name for name in ("norm", "gated", "residual", "logits") if getattr(self, name))
        return f"linear M{self.m} N{self.n} K{self.k} {fused}".strip()

    @property
    def columns(self) -> int:
        return self.n // 2 if self.gated else self.n

    def shared(self, new: TensorFactory) -> Inputs:
        return {"workspace": new.filled(0, linear_workspace_size(self.n), dtype=torch.int32)}

    def inputs(self, new: TensorFactory) -> Inputs:
        return {"weight": new.normal(self.n, self.k, std=self.k**-0.5), **self._rows(new)}

    def _rows(self, new: TensorFactory) -> Inputs:
        """All inputs but the weight."""
        return {
            "x": new.normal(self.m, self.k),
            "norm_weight": new.normal(self.k, mean=1, std=0.1) if self.norm else None,
            "residual": new.normal(self.m, self.n if self.residual else 0),
        }

    def _fused(self, x: Inputs) -> Inputs:
        return {
            "norm_weight": x["norm_weight"],
            "activation": "silu" if self.gated else None,
            "gated": self.gated,
            "residual": x["residual"] if self.residual else None,
        }

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        out = torch.empty(self.m, self.n, dtype=torch.float32, device=x["x"].device) if self.logits else None
        more = {"out": out, "workspace": x["workspace"], "constant_weight": True, "together": self.together}
        return (linear(x["x"], x["weight"], **self._fused(x), **more),)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        fused = self._fused(x)
        if self.residual:
            fused["residual"] = x["residual"].float()
        return (linear_ref(x["x"].float(), x["weight"].float(), **fused),)

    def error_allowed(self, dtype: torch.dtype) -> float:
        """Tensor cores cut off what they add, so a float32 sum's error grows with its length: cuBLAS has 1.0e-6 at K
        1024 and 4.4e-6 at K 4096 (an H200)."""
        least = super().error_allowed(dtype)
        return max(least, 2e-9 * self.k) if dtype == torch.float32 else least

    def work(self, x: Inputs) -> Work:
        weights = self.n * self.k + (self.k if self.norm else 0)
        rows = self.k + self.columns * (2 if self.residual or self.logits else 1)
        return Work(bytes=2 * (weights + self.m * rows), flops=2 * self.m * self.n * self.k)


def space(m: int, n: int, k: int, itemsize: int, gated: str) -> list[tuning.Config]:
    """16 to 128 weights a thread, or up to 800 programs with 90 to 226 kB of shared memory on a processor.

    Where one kernel was never the faster (tiles of one row, rows of two and a large weight), it is left out.
    """
    configs = []
    if m == 1 or (m <= MAX_ROWS and n * k <= SMALL):
        whole = triton.next_power_of_2(k)
        for config in product(
            kernel=("rows",),
            LATE=(False, True) if n * k > SMALL else (False,),
            BLOCK_N=(1, 2, 4, 8),
            BLOCK_K=sorted({min(whole, 4096), min(whole, 2048), min(whole, 1024)}),
            num_warps=(1, 2, 4, 8),
        ):
            per_thread = config["BLOCK_N"] * k // (32 * config["num_warps"])
            if 16 <= per_thread <= 128 and config["BLOCK_N"] > (gated == "yes") and 128 * config["num_warps"] <= whole:
                configs.append(config)
    rows = max(16, m)
    for config in product(
        kernel=("tiles",),
        BLOCK_N=(32, 64, 128),
        BLOCK_K=(64, 128, 256),
        SPLIT_K=(1, 2, 3, 4, 8),
        num_warps=(4, 8),
        num_stages=(3, 4, 6, 8),
    ):
        shared = (config["BLOCK_N"] + rows) * config["BLOCK_K"] * 2 * config["num_stages"]
        programs = triton.cdiv(n, config["BLOCK_N"]) * config["SPLIT_K"]
        held = min(4, triton.cdiv(programs, 132))
        filled = 90e3 <= shared * held <= 226e3 and (60 <= programs <= 800 or config["SPLIT_K"] == 1)
        if m > 1 and filled and (config["num_warps"] == 8) == (config["BLOCK_N"] == 128):
            configs.append(config)
    return [*configs, TORCH]


# qkv, o, gate and up, down: Qwen3-0.6B, Llama-3.1-8B; a square; logits
LAYERS: tuple[dict[str, Any], ...] = (
    {"n": 4096, "k": 1024, "norm": True},
    {"n": 1024, "k": 2048, "residual": True},
    {"n": 6144, "k": 1024, "norm": True, "gated": True},
    {"n": 1024, "k": 3072, "residual": True},
    {"n": 6144, "k": 4096, "norm": True},
    {"n": 4096, "k": 4096, "residual": True},
    {"n": 28672, "k": 4096, "norm": True, "gated": True},
    {"n": 4096, "k": 14336, "residual": True},
    {"n": 14336, "k": 4096},
    {"n": 151936, "k": 1024, "logits": True},
    {"n": 128256, "k": 4096, "logits": True},
)

TUNABLE = Tunable(
    op="linear",
    module=dense_linear,
    also=(portable_rows, portable_tiles, norm, activation),
    default=default_config,
    problems=tuple(Product(m, **layer) for layer in LAYERS for m in (1, 2, 4, 8, 16, 32, 64)),
    space=space,
)
