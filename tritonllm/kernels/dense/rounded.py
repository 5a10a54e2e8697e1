"""Products of which both sides are float8 or int8 (W8A8): the rows are rounded first, each with a scale of its own.

Nothing has to be widened, and the tensor cores multiply 8 bits at twice the rate of 16. A product means the same
for any number of rows: otherwise a request's tokens would depend on how many others are in a step. Up to 256 rows
`portable/tiles.py` multiplies, with what is around the product; more rows of float8 are CUTLASS's through torch, or,
where that has no such product, tiles again. Sums of float8 have the accumulators of the matrix unit (on Hopper fewer
bits than float32), as CUTLASS's have; those of int8 are exact. Scales by row: "ZeroQuant", Yao et al. (2022).
"""

from collections.abc import Callable

import torch
import triton

from tritonllm.kernels.dense.arguments import Fused, Operands, Scaled
from tritonllm.kernels.dense.choice import MANY, default_rounded_config
from tritonllm.kernels.dense.portable.tiles import launch_tiles
from tritonllm.kernels.elementwise import NormOptions, round_rows
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch
from tritonllm.kernels.runtime.float8 import quantize_reference


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[M, K]`` as products with a weight of that dtype see them, in float32."""
    q = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    quantize_reference(x, q, scale)
    return q.float() * scale[:, None]


def _torch_multiplies(weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> bool:
    """Torch has such a product."""
    fits = weight.is_cuda and weight.dtype == torch.float8_e4m3fn and weight.shape[0] % 16 == weight.shape[1] % 16 == 0
    return fits and out.dtype == torch.bfloat16 and (bias is None or bias.dtype == out.dtype)


def launch_rounded(
    operands: Operands, fused: Fused, scaled: Scaled, around: Callable[[Callable[[torch.Tensor], None]], None]
) -> None:
    """Round the rows, unless they are, and multiply. Where torch does, ``around`` gets what writes
    ``x @ weight.T + bias`` into a tensor, and does the rest."""
    x, weight, bias, norm_weight, out, _ = operands
    (m, k), n = x.shape, len(weight)
    if scaled.of_rows is None:
        norm = None if norm_weight is None else NormOptions(norm_weight, None, fused.eps, fused.norm_offset)
        q, row_scales = round_rows(x, norm, weight.dtype)
    else:
        assert norm_weight is None
        q, row_scales = x, scaled.of_rows
    key: dict[str, int | str] = {"m": triton.next_power_of_2(m), "n": n, "k": k}
    config = tuning.get_config("linear_rounded", x.device, default_rounded_config, **key)
    if config["kernel"] == "torch" and not _torch_multiplies(weight, bias, out):
        config = MANY
    if config["kernel"] != "torch":
        operands, scaled = operands._replace(x=q, norm_weight=None), scaled._replace(of_rows=row_scales)
        launch_tiles(operands, fused, scaled, config, dependent_launch(weight.device))
        return
    factors = scaled.scales
    assert factors is not None
    if scaled.group_rows > 1:
        factors = factors.repeat_interleave(scaled.group_rows, 0)[:n]

    def product(y: torch.Tensor) -> None:
        scales = row_scales[:, None], factors.float().t()
        torch._scaled_mm(q, weight.t(), *scales, bias, out_dtype=y.dtype, use_fast_accum=True, out=y)

    around(product)
