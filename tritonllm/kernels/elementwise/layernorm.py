"""LayerNorm: the kernel and the operator of :mod:`tritonllm.kernels.elementwise.norm`, with the mean taken off and a
bias.

Ba, Kiros and Hinton, "Layer Normalization" (2016).
"""

import torch

from tritonllm.kernels.elementwise.arguments import NormOptions
from tritonllm.kernels.elementwise.norm import add_and_normalize, check_affine, check_input, normalize
from tritonllm.kernels.runtime.checks import check_tensor
from tritonllm.kernels.runtime.registry import with_reference


def _check_affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    if weight is not None:
        check_affine("weight", weight, x)
    if bias is not None:
        check_affine("bias", bias, x)
        if weight is not None:
            check_tensor("bias", bias, weight.shape)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension, in float32 until it is stored.

    The variance is the mean of the squared differences with the mean, so a large mean costs no precision.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32; contiguous in the last dimension. With up to three dimensions
            the others may have any strides, as in :func:`rms_norm`.
        weight: ``[N]`` float16, bfloat16 or float32. Where ``x`` is ``[..., H, N]`` also ``[H, N]``, contiguous: a row
            for each head. ``None`` multiplies by nothing (the first OLMo).
        bias: as ``weight``, and of its shape if both are given.
        eps: added to the variance.
        out: ``[..., N]`` to write into, which may be ``x`` itself but not overlap it otherwise; by default a new
            tensor with the dtype of ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: a wrong shape, dtype or device, or rows that are not contiguous.
    """
    check_input(x, out)
    _check_affine(x, weight, bias)
    return normalize(x, NormOptions(weight, bias, eps, mean=True), out)


layer_norm_ref = with_reference(layer_norm)


def fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    x_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x * x_scale``, then ``x = layer_norm(residual, weight, bias, eps)``, in place and in one pass.

    The norm is of the sum as it is stored, as in :func:`fused_add_rms_norm`.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32, overwritten with the normed sum; strides as in
            :func:`layer_norm`.
        residual: ``[..., N]``, overwritten with the sum; its dtype may differ from that of ``x``. Must not overlap
            ``x``.
        weight: ``[N]`` or ``[H, N]`` as in :func:`layer_norm`, or ``None``.
        bias: as ``weight``, and of its shape if both are given.
        eps: added to the variance.
        x_scale: ``x`` is multiplied by it, in float32.

    Returns:
        ``(x, residual)``, the tensors given.

    Raises:
        ValueError: a wrong shape, dtype or device, rows that are not contiguous, or a tensor of more than three
            dimensions that is not contiguous.
    """
    check_input(x)
    check_tensor("residual", residual, x.shape, like=x)
    _check_affine(x, weight, bias)
    return add_and_normalize(x, residual, NormOptions(weight, bias, eps, mean=True), x_scale)


fused_add_layer_norm_ref = with_reference(fused_add_layer_norm)
