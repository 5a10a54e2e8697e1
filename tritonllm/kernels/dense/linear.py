"""Products of few rows with a matrix, with what comes before and after them in a decode step.

Up to 64 rows, reading the weight bounds the product, and cuBLAS takes up to 1.7 times as long as that. A table says for
each size which of three is fastest: `portable/rows.py` (one or two rows), `portable/tiles.py`, or cuBLAS between
kernels of their own for the norm, the activation and the addition. More rows are cuBLAS's. On Hopper some of both go to
kernels of their own (``LINEAR`` and ``GATED_LINEAR``).

A narrow weight (:mod:`tritonllm.kernels.dense.narrow`) is widened in the first two, in registers, up to 128 rows; more
take it widened from memory, at 3 bytes an element and 2 more beside their product. One that rounds its rows, too, needs
no widening (:mod:`tritonllm.kernels.dense.rounded`).
"""

import math
from collections.abc import Callable

import torch
import triton

from tritonllm import env
from tritonllm.kernels.dense import invariant
from tritonllm.kernels.dense.arguments import NOT_SCALED, Fused, Operands, Scaled
from tritonllm.kernels.dense.choice import TORCH, default_config, default_narrow_config
from tritonllm.kernels.dense.cpu import whole_rows
from tritonllm.kernels.dense.narrow import check_narrow, narrow_key, scales_of, widen_numbers
from tritonllm.kernels.dense.portable.rows import MAX_ROWS, launch_rows
from tritonllm.kernels.dense.portable.tiles import launch_tiles
from tritonllm.kernels.dense.rounded import launch_rounded, rounded
from tritonllm.kernels.dense.weight import NARROW, Weight, elements
from tritonllm.kernels.elementwise import ACTIVATIONS, act_and_mul, apply_activation, rms_norm
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_same_dtype, check_scaled, check_tensor, require
from tritonllm.kernels.runtime.chip import chip_of
from tritonllm.kernels.runtime.dependent_launch import dependent_launch
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.runtime.variants import Variant, Variants

MAX_M = 64
MAX_NARROW_M = 128  # 256 rows take less with the weight widened in memory
MIN_BLOCK_N = 32  # of any configuration of `portable/tiles.py`
GATED = ("silu", "gelu", "gelu_tanh")
_NAMES = ", ".join(ACTIVATIONS)


def _reference(operands: Operands, fused: Fused, scaled: Scaled = NOT_SCALED) -> None:
    x, weight, bias, norm_weight, out, _ = operands
    x = x.float() if scaled.of_rows is None else x.float() * scaled.of_rows[:, None]
    if scaled.scales is not None:
        weight = widen_numbers(weight, scaled, torch.float32)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, fused.eps, weight_offset=fused.norm_offset)
    if scaled.rounds_rows and scaled.of_rows is None:
        x = rounded(x.to(operands.x.dtype), operands.weight.dtype)
    y = x @ weight.float().T
    if bias is not None:
        y += bias
    gate, up = y.chunk(2, dim=-1) if fused.gated else (y, None)
    if fused.activation is not None:
        gate = ACTIVATIONS[fused.activation](gate)
    y = gate if up is None else gate * up
    out.copy_(torch.add(out.float(), y, alpha=fused.scale) if fused.add else y)


def _only_compiles(x: torch.Tensor) -> bool:
    """Launches compile and do nothing else; a product on the CPU would take minutes at the sizes of a GPU."""
    return x.is_cpu and env.CPU_BACKEND == "compile"


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """``x @ weight.T + bias`` by cuBLAS, which writes float32 itself: rounded first, it would lose what it is for."""
    if _only_compiles(x):
        return
    if x.is_cpu:
        x = whole_rows(x)
    if out.dtype == x.dtype:
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)
        return
    if x.is_cuda and out.dtype == torch.float32:
        if out.is_contiguous():
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
        else:  # one rank's columns of a wider memory: cuBLAS has not been asked to write there yet
            out.copy_(torch.mm(x, weight.t(), out_dtype=out.dtype))
    else:
        out.copy_(x.float() @ weight.t().float())
    if bias is not None:
        out += bias


def _by_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, fused: Fused
) -> None:
    """cuBLAS, and a kernel for each step after the product; gated ones on Hopper mostly one launch."""
    _, _, activation, gated, add, scale, *_ = fused
    if add and activation is None and bias is None and out.dtype == x.dtype and not _only_compiles(x):
        out.addmm_(x, weight.t(), alpha=scale)
        return
    y = x.new_empty(out.shape) if gated and add else out
    whole = GATED_LINEAR.own(x.device, x, weight, y) if gated else None
    if whole is None:
        _around(lambda wide: _product(x, weight, bias, wide), x.dtype, len(weight), out, fused)
        return
    assert activation is not None
    whole.module.launch(x, weight, bias, y, activation, fused.constant_weight)
    if add:
        out.add_(y, alpha=scale)


def _around(
    product: Callable[[torch.Tensor], None], dtype: torch.dtype, columns: int, out: torch.Tensor, fused: Fused
) -> None:
    """A product that writes ``[M, columns]`` into a tensor of the given dtype, or into ``out``, and a kernel for each
    step after it."""
    _, _, activation, gated, add, scale, *_ = fused
    if activation is None and not add:
        product(out)
        return
    if gated:
        assert activation is not None
        y = out.new_empty(out.shape, dtype=dtype) if add else out
        both = out.new_empty(len(out), columns, dtype=dtype)
        product(both)
        act_and_mul(both, activation, out=y)
    else:
        y = out if out.dtype == dtype and not add else out.new_empty(out.shape, dtype=dtype)
        product(y)
        if activation is not None:
            apply_activation(y, activation, out=y if add else out)
    if add:
        out.add_(y, alpha=scale)


LINEAR = Variants(
    "linear",
    Variant("few", "dense/sm90/few.py", (90,), "fits", "pays"),
    Variant("rows", "dense/portable/rows.py"),  # these and cuBLAS by dense/choice.py
    Variant("tiles", "dense/portable/tiles.py"),
    Variant("torch", "dense/linear.py"),
)
GATED_LINEAR = Variants(
    "linear, gated",  # but for what "linear" has of up to 64 rows
    Variant("invariant", "dense/invariant.py", (90,), invariant.fits_gated, invariant.pays_gated),
    Variant("gated", "dense/sm90/gated.py", (90,), "fits", "pays"),
    Variant("torch", "dense/linear.py"),
)


@register_op(mutates=("out", "workspace"), reference=_reference)
def _linear(operands: Operands, fused: Fused, scaled: Scaled) -> None:
    x, weight, bias, norm_weight, out, workspace = operands
    m, k = x.shape
    if out.numel() == 0:
        return
    if k == 0:  # sums of nothing: what is left is the bias
        _reference(operands._replace(norm_weight=None), fused)
        return
    if scaled.rounds_rows:
        launch_rounded(operands, fused, scaled, lambda product: _around(product, out.dtype, len(weight), out, fused))
        return
    narrow = scaled.scales is not None
    if narrow and m > _most_narrow_rows(x):
        narrow, weight = False, widen_numbers(weight, scaled, x.dtype)
        operands, scaled = operands._replace(weight=weight), NOT_SCALED
    few = None if narrow else LINEAR.own(x.device, x, weight, norm_weight, fused.together or 4 * weight.numel())
    if few is not None:
        few.module.launch(operands, fused)
        return
    config = TORCH
    key: dict[str, int | str] = {"m": triton.next_power_of_2(m), "n": weight.shape[0], "k": k}
    key["gated"] = "yes" if fused.gated else "no"
    if narrow:
        key |= narrow_key(weight, scaled)
        config = tuning.get_config("linear_narrow", x.device, default_narrow_config, **key)
    elif m <= MAX_M and not (fused.gated and GATED_LINEAR.own(x.device, x, weight, out)):
        config = tuning.get_config("linear", x.device, default_config, **key, itemsize=weight.dtype.itemsize)
    if config["kernel"] == "rows" and m <= MAX_ROWS:
        launch_rows(operands, fused, scaled, config, dependent_launch(weight.device))
        return
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, fused.eps, weight_offset=fused.norm_offset)
    if config["kernel"] == "tiles":
        operands = Operands(x, weight, bias, None, out, workspace)
        launch_tiles(operands, fused, scaled, config, dependent_launch(weight.device))
    else:
        _by_torch(x, widen_numbers(weight, scaled, x.dtype) if narrow else weight, bias, out, fused)


def _most_narrow_rows(x: torch.Tensor) -> int:
    """More take a narrow weight widened in memory: of other chips than Hopper, tiles of so many rows have no room."""
    chip = chip_of(x.device)
    return MAX_NARROW_M if x.dtype != torch.float32 and (chip is None or chip.arch == 90) else MAX_M


def _checked(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    activation: str | None,
    gated: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(x [M, K], what is written)`` after all checks."""
    check_tensor("x", x, [None] * max(x.dim(), 1))
    k = x.shape[-1]
    if weight.format in NARROW:
        check_narrow("weight", weight, k, x)
    else:
        check_tensor("weight", elements("weight", weight), ("N", k), like=x)
        require(not weight.rounds_rows, f"weight.rounds_rows must be False for the format {weight.format!r}")
        check_same_dtype("weight", weight.data, "x", x)
    rows = weight.data.shape[0]
    require(activation is None or activation in ACTIVATIONS, f"activation must be one of {_NAMES}, got {activation!r}")
    if gated:
        require(activation in GATED, f"activation must be {' or '.join(GATED)} if gated, got {activation!r}")
        require(rows % 2 == 0, f"weight must have an even number of rows if gated (gate, then up), got {rows}")
    if bias is not None:
        check_tensor("bias", bias, (rows,), like=x)
        check_same_dtype("bias", bias, "x", x)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (k,), like=x)
    if workspace is not None:
        check_tensor("workspace", workspace, (None,), dtype=torch.int32, like=x)
        size = linear_workspace_size(rows)
        require(len(workspace) >= size, f"workspace must have {size} elements or more, got {len(workspace)}")
    require(residual is None or out is None, "out must be None if there is a residual, which is what is written")
    shape = (*x.shape[:-1], rows // 2 if gated else rows)
    name, out = ("out", out) if residual is None else ("residual", residual)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    check_tensor(name, out, shape, like=x)
    require(out.dim() <= 2 or out.is_contiguous(), f"{name} must be contiguous if it has more than two dimensions")
    return x.reshape(math.prod(x.shape[:-1]), k), out


def multiply(operands: Operands, fused: Fused, scaled: Scaled = NOT_SCALED) -> torch.Tensor:
    """:func:`linear` of matrices that are known to fit, as a layer's do in every step; returns what is written."""
    _linear(*operands, *fused, *scaled)
    return operands.out


def linear_workspace_size(rows: int) -> int:
    """Elements of the ``workspace`` of a weight with so many rows."""
    return triton.cdiv(rows, MIN_BLOCK_N)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Weight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    activation: str | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    constant_weight: bool = False,
    together: int = 0,
) -> torch.Tensor:
    """``act(rms_norm(x) @ weight.T + bias)``, or that times ``scale`` added to ``residual``: one launch for few rows.

    Sums are in float32 and rounded once, when they are stored. Which kernel computes them depends on the sizes alone
    (beyond 64 rows it is cuBLAS, but for most gated products on Hopper); for the same kernel and number of
    rows, a row's result does not depend on the others.

    Args:
        x: ``[..., K]`` float16, bfloat16 or float32; contiguous in the last dimension.
        weight: ``[N, K]`` with the dtype of ``x``; contiguous in the last dimension. A tensor or a :class:`Weight`,
            which may be ``"fp8"``, ``"int8"``, ``"int4"`` or ``"fp4"``, too.
        bias: ``[N]`` with the dtype of ``x``.
        norm_weight: ``[K]`` float16, bfloat16 or float32; ``x`` is normalised first, as by :func:`rms_norm`.
        norm_eps: added to the mean square.
        norm_weight_offset: added to ``norm_weight``, in float32.
        activation: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, ``"relu"`` or ``"relu2"`` of the result.
        gated: the first half of the weight's rows is a gate: the result is ``activation(gate) * up``, ``[..., N / 2]``.
            With ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        residual: ``[..., N]``, to which ``scale`` times the result is added in place; any of the three dtypes. Must not
            overlap ``x``.
        scale: see ``residual``, without which it must be 1.
        out: ``[..., N]`` to write into, of any of the three dtypes; by default a new tensor with the dtype of ``x``.
            Must not overlap ``x``.
        workspace: ``[linear_workspace_size(N)]`` int32, zeros, and zeros again afterwards, so that all
            launches on one stream may share it. None: a new one, filled by a launch of its own where one is needed.
        constant_weight: no kernel that may still run writes ``weight``, ``bias`` or ``norm_weight`` (true while a model
            is served): they are read before the kernel before this one ends.
        together: elements of the weights of all products that take turns with this one, such as those of a layer. On
            Hopper, a kernel of 2 to 16 rows is fast among its like only, so all of them choose by this one number.
            0: four times those of ``weight``.

    Returns:
        ``residual`` or ``out``.

    Raises:
        ValueError: a shape, dtype or device that does not fit, another format of weight or activation, both
            ``residual`` and ``out``, a ``scale`` without ``residual``.
    """
    of = weight if isinstance(weight, Weight) else Weight(weight)
    check_scaled(scale, residual)
    rows, target = _checked(x, of, bias, norm_weight, activation, gated, residual, out, workspace)
    written = target.view(len(rows), target.shape[-1])
    _linear(
        *(rows, of.data, bias, norm_weight, written, workspace),
        *Fused(norm_eps, norm_weight_offset, activation, gated, residual is not None, scale, constant_weight, together),
        *scales_of(of),
    )
    return target


linear_ref = with_reference(linear)
